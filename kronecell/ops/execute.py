"""One product of a plan, or one network contracted, for tensors that were not checked before."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kronecell.errors import PlanError, ShapeError
from kronecell.ops import engine
from kronecell.ops.contract import apply, check_dtype, contract_text, prepare, ready_now, tensors_of
from kronecell.plans.network import Network
from kronecell.plans.plan import Plan


def execute(plan: Plan, x: Tensor, factors: Mapping[str, Tensor], bias: Tensor | None = None) -> Tensor:
    """The product for input and factors that were not checked before: says what is wrong with them. Differentiable."""
    check_factors(plan.network, factors)
    check_input(plan, x, next(iter(factors.values())).dtype)
    return apply(plan.text, x, prepare(plan.text, factors), bias)


def plain_execute(plan: Plan, x: Tensor, factors: Mapping[str, Tensor], bias: Tensor | None = None) -> Tensor:
    """The product in operations of torch alone, for graphs that other runtimes read."""
    of = ready_now(plan.text)
    tensors = tensors_of(of.network, [factors[name] for name in of.names])
    found = engine.run_hoisted(of.program, tensors, plain=True)
    operands = [op.lay_out(found[op.right]) for op in of.program.hot]
    y = engine.reference(of.program, x.reshape(-1, x.shape[-1]), operands, bias)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def contract_network(plan: Plan, factors: Mapping[str, Tensor]) -> Tensor:
    """For a network without input: the tensor with the legs `outputs`. Differentiable."""
    if plan.network.inputs:
        raise PlanError("contract_network() is for networks without input; use execute(plan, x, factors)")
    check_factors(plan.network, factors)
    return contract_text(plan.text, factors)


def check_factors(network: Network, factors: Mapping[str, Tensor]) -> None:
    """Every factor there, of its shape, and all of one floating point dtype."""
    for factor in network.parameters:
        tensor = factors.get(factor.name)
        if tensor is None:
            raise ShapeError(f"factor {factor.name!r} is missing; expected {[*network.shapes]}, got {[*factors]}")
        expected = network.shapes[factor.name]
        if tuple(tensor.shape) != expected:
            raise ShapeError(
                f"factor {factor.name!r} has the wrong shape: expected {expected} for legs {factor.legs}, "
                f"got {tuple(tensor.shape)}"
            )
    dtypes = {factors[factor.name].dtype for factor in network.parameters}
    if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
        raise ShapeError(
            f"factors must share one floating point dtype, got {sorted(map(str, dtypes))}; convert with .to(dtype)"
        )


def check_input(plan: Plan, x: Tensor, dtype: torch.dtype) -> None:
    """x has the width of the network, and the dtype of the factors or bytes."""
    if x.ndim == 0 or x.shape[-1] != plan.width:
        raise ShapeError(
            f"input has the wrong width: expected (..., {plan.width}) for modes "
            f"{'x'.join(map(str, plan.network.shape(plan.network.inputs)))}, got {tuple(x.shape)}"
        )
    check_dtype(x, dtype)
