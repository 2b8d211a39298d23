"""What a product may be given: each check says what was wrong, what was expected and what was got."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kronecell.errors import ShapeError
from kronecell.plans.network import Network
from kronecell.plans.plan import Plan


def check_tensor(value: object, what: str) -> Tensor:
    """The tensor itself, or a ShapeError that names the argument."""
    if not isinstance(value, torch.Tensor):
        raise ShapeError(f"{what} must be a torch tensor, got {type(value).__name__}; use torch.as_tensor(...)")
    return value


def check_dtype(x: Tensor, dtype: torch.dtype) -> None:
    """Refuse an input that is neither of the dtype of the factors nor of bytes."""
    if x.dtype not in (dtype, torch.uint8):
        raise ShapeError(f"input has dtype {x.dtype}, the factors {dtype}; convert one with .to(...) (uint8 is fine)")


def check_device(x: Tensor, like: Tensor) -> None:
    """Refuse an input that is not where the factors are."""
    if x.device != like.device:  # torch would multiply what is on no device as if it were memory of the CPU
        raise ShapeError(f"input is on {x.device}, the factors on {like.device}; move one with .to(...)")


def check_input(plan: Plan, x: Tensor, dtype: torch.dtype) -> None:
    """x has the width of the network, and the dtype of the factors or bytes."""
    if x.ndim == 0 or x.shape[-1] != plan.width:
        raise ShapeError(
            f"input has the wrong width: expected (..., {plan.width}) for modes "
            f"{'x'.join(map(str, plan.network.shape(plan.network.inputs)))}, got {tuple(x.shape)}"
        )
    check_dtype(x, dtype)


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
