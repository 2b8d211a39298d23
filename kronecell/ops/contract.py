"""The operators that run plans: `kronecell::hoist` for the weights alone, `kronecell::contract` for x.

Both are told what to do by the text of a plan, so that a graph which holds them holds everything. They take the
factors of a network in the order of its parameters, and contract takes the small operand of every step with x.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kronecell.errors import ShapeError
from kronecell.ops import engine
from kronecell.ops.lowering import lower
from kronecell.ops.program import Op, Program
from kronecell.ops.registration import constant_when_traced, operator
from kronecell.ops.small_products import Products, products_of, small_products, small_products_backward
from kronecell.plans.network import Network
from kronecell.plans.plan import Plan, plan_of

Optional = Tensor | None


@dataclass(frozen=True)
class Ready:
    """A plan with everything that is derived from it once: what the operators look up by its text."""

    plan: Plan
    program: Program
    hoisted: tuple[Op, ...]  # steps with x whose small operand `hoist` gives: a result, or a factor that is permuted
    made: tuple[str, ...]  # the results among these operands
    products: Products | None  # the hoisted steps for the kernel of small products, if they are small
    names: tuple[str, ...]  # of the factors
    used: tuple[bool, ...]  # whether a factor is read by `hoist`
    sources: tuple[tuple[int, ...], ...]  # of every operand: the number of its factor and its shape, or () from `hoist`

    @cached_property
    def network(self) -> Network:
        return self.plan.network

    @cached_property
    def closed(self) -> bool:
        """Whether there is no x."""
        return not self.program.hot


@constant_when_traced
def ready(text: str) -> Ready:
    """A plan's text, parsed and lowered."""
    plan = plan_of(text)
    program = lower(plan)
    names = (*plan.network.shapes,)
    sources = tuple(
        (names.index(op.right), *op.right_view.groups)
        if op.right in names and op.right_view.permutation is None
        else ()
        for op in program.hot
    )
    hoisted = tuple(op for op, source in zip(program.hot, sources, strict=True) if not source)
    made = tuple(op.right for op in hoisted if op.right in program.hoisted_results)
    read = {name for op in program.hoisted for name in (op.left, op.right)} | {op.right for op in hoisted}
    used = tuple(name in read or not program.hot for name in names)
    return Ready(plan, program, hoisted, made, products_of(program) if made else None, names, used, sources)


# The same for operators, below what is traced: a plan that was met before costs no call of Python.
ready_now: Callable[[str], Ready] = ready.cached  # type: ignore[attr-defined]


def tensors_of(network: Network, factors: Sequence[Tensor]) -> dict[str, Tensor]:
    """All factors by name, constants made."""
    tensors = {factor.name: tensor for factor, tensor in zip(network.parameters, factors, strict=True)}
    for factor in network.constants:
        tensors[factor.name] = engine.constant_tensor(factor, network, factors[0])
    return tensors


# hoist -----------------------------------------------------------------------------------------------------------


def _hoist_reference(factors: Sequence[Tensor], plan: str) -> list[Tensor]:
    """Results of hoisted steps, and factors that are permuted, laid out for the steps with x that take them.

    Of a network without x, it is the contracted network.
    """
    of = ready_now(plan)
    found = engine.run_hoisted(of.program, tensors_of(of.network, factors), plain=True)
    if of.closed:
        return [of.program.last(found[of.program.result])]
    return [op.lay_out(found[op.right]) for op in of.hoisted]


def _hoist(factors: Sequence[Tensor], plan: str) -> list[Tensor]:
    of = ready_now(plan)
    tensors = tensors_of(of.network, factors)
    if of.closed:
        result = of.program.last(engine.run_hoisted(of.program, tensors)[of.program.result])
        return [result.contiguous() if of.program.hoisted else _copy(result)]
    if of.products is None:
        tensors = engine.run_hoisted(of.program, tensors)
        return [_copy(op.lay_out(tensors[op.right])) for op in of.hoisted]
    given = [tensors[name] for name in of.products.inputs]
    results = iter(small_products.kernel(given, of.products.description, of.products.shapes))
    return [next(results) if op.right in of.made else _copy(op.lay_out(tensors[op.right])) for op in of.hoisted]


def _copy(tensor: Tensor) -> Tensor:
    """The result of an operator: no alias of an input, and contiguous as its fake says."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _hoist_fake(factors: Sequence[Tensor], plan: str) -> list[Tensor]:
    of = ready_now(plan)
    if of.closed:
        return [factors[0].new_empty(of.network.shape(of.network.outputs))]
    return [factors[0].new_empty(op.right_view.groups) for op in of.hoisted]


def _hoist_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    factors, ctx.plan = inputs
    ctx.save_for_backward(*factors)


def _hoist_gradient(ctx: Any, upstream: list[Tensor]) -> tuple[list[Optional], None]:
    flags = [flag and used for flag, used in zip(ctx.needs_input_grad[0], ready_now(ctx.plan).used, strict=True)]
    found = hoist_backward(upstream, ctx.saved_tensors, flags, ctx.plan)
    return [gradient if flag else None for gradient, flag in zip(found, flags, strict=True)], None


def _hoist_backward_reference(
    upstream: Sequence[Tensor], factors: Sequence[Tensor], wanted: Sequence[bool], plan: str
) -> list[Tensor]:
    """Gradients of the factors from those of the results; what is not wanted has no elements."""
    _, pull_back = torch.func.vjp(lambda *given: tuple(_hoist_reference(given, plan)), *factors)  # type: ignore[misc]
    found = pull_back(tuple(upstream))
    return [gradient if flag else gradient.new_empty(0) for gradient, flag in zip(found, wanted, strict=True)]


def _hoist_backward(
    upstream: Sequence[Tensor], factors: Sequence[Tensor], wanted: Sequence[bool], plan: str
) -> list[Tensor]:
    of = ready_now(plan)
    tensors = tensors_of(of.network, factors)
    if of.closed:
        gradient = of.program.last.undo(upstream[0])
        if of.program.hoisted:
            gradients = engine.hoisted_gradients(of.program, tensors, {of.program.result: gradient})
        else:
            gradients = {of.program.result: _copy(gradient.reshape(tensors[of.program.result].shape))}
        return _wanted_of(gradients, of, factors, wanted)
    pairs = [*zip(of.hoisted, upstream, strict=True)]
    gradients = {
        op.right: _copy(op.right_view.undo(gradient).reshape(tensors[op.right].shape))
        for op, gradient in pairs
        if op.right not in of.made
    }
    above = [gradient for op, gradient in pairs if op.right in of.made]
    if of.products is not None:
        inputs = of.products.inputs
        flags = [name in of.names and wanted[of.names.index(name)] for name in inputs]
        given = [tensors[name] for name in inputs]
        found = small_products_backward.kernel(above, given, of.products.description, flags)
        gradients.update(zip(inputs, found, strict=True))
    elif above:
        results = {op.right: op.right_view.undo(gradient) for op, gradient in pairs if op.right in of.made}
        gradients |= engine.hoisted_gradients(of.program, tensors, results)
    return _wanted_of(gradients, of, factors, wanted)


def _wanted_of(
    gradients: Mapping[str, Tensor], of: Ready, factors: Sequence[Tensor], wanted: Sequence[bool]
) -> list[Tensor]:
    empty = factors[0].new_empty(0)
    return [gradients[name] if flag else empty for name, flag in zip(of.names, wanted, strict=True)]


def _hoist_backward_fake(
    upstream: Sequence[Tensor], factors: Sequence[Tensor], wanted: Sequence[bool], plan: str
) -> list[Tensor]:
    return [
        torch.empty_like(factor) if flag else factor.new_empty(0) for factor, flag in zip(factors, wanted, strict=True)
    ]


hoist_backward = operator(
    "hoist_backward(Tensor[] upstream, Tensor[] factors, bool[] wanted, str plan) -> Tensor[]",
    _hoist_backward_reference,
    _hoist_backward_fake,
    kernel=_hoist_backward,
)
hoist = operator(
    "hoist(Tensor[] factors, str plan) -> Tensor[]",
    _hoist_reference,
    _hoist_fake,
    kernel=_hoist,
    setup=_hoist_setup,
    backward=_hoist_gradient,
)


# contract --------------------------------------------------------------------------------------------------------


def _contract_reference(
    x: Tensor, operands: Sequence[Tensor], bias: Optional, plan: str, keep: bool
) -> tuple[Tensor, list[Tensor]]:
    """x (rows, M) times the matrix of the network, plus the bias; and what the gradient saves."""
    program = ready_now(plan).program
    return engine.reference(program, x, operands, bias), []


def _contract(
    x: Tensor, operands: Sequence[Tensor], bias: Optional, plan: str, keep: bool
) -> tuple[Tensor, list[Tensor]]:
    y, saved = engine.forward(ready_now(plan).program, x, operands, bias, keep)
    return y.contiguous(), saved


def _contract_fake(
    x: Tensor, operands: Sequence[Tensor], bias: Optional, plan: str, keep: bool
) -> tuple[Tensor, list[Tensor]]:
    program = ready_now(plan).program
    like = operands[0]
    shapes = engine.saved_shapes(program, x, keep)
    return like.new_empty(x.shape[0], program.outputs), [like.new_empty(shape) for shape in shapes]


def _contract_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    x, operands, bias, ctx.plan, _ = inputs
    saved = output[1]
    ctx.sizes = (len(operands), bias is not None)
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)  # of what is saved: zeros as large as y and v, in every backward
    ctx.save_for_backward(x, *operands, *saved)


def _contract_gradient(ctx: Any, upstream: Optional, _: list[Optional]) -> tuple[Any, ...]:
    count, has_bias = ctx.sizes
    if upstream is None:
        return None, [None] * count, None, None, None
    x, *rest = ctx.saved_tensors
    operands, saved = rest[:count], rest[count:]
    of_x, of_operands, of_bias = ctx.needs_input_grad[:3]
    flags = [of_x, *of_operands, bool(has_bias and of_bias)]
    found = contract_backward(upstream, x, operands, saved, flags, ctx.plan)
    gradients = [gradient if flag else None for gradient, flag in zip(found, flags, strict=True)]
    return gradients[0], gradients[1:-1], gradients[-1], None, None


def _backward_reference(
    upstream: Tensor, x: Tensor, operands: Sequence[Tensor], saved: Sequence[Tensor], wanted: Sequence[bool], plan: str
) -> list[Tensor]:
    """Gradients of x, the operands and the bias from that of the result; what is not wanted has no elements."""
    return engine.backward(ready_now(plan).program, upstream, x, operands, [], wanted, plain=True)


def _backward(
    upstream: Tensor, x: Tensor, operands: Sequence[Tensor], saved: Sequence[Tensor], wanted: Sequence[bool], plan: str
) -> list[Tensor]:
    found = engine.backward(ready_now(plan).program, upstream, x, operands, saved, wanted)
    return [gradient.contiguous() for gradient in found]


def _backward_fake(
    upstream: Tensor, x: Tensor, operands: Sequence[Tensor], saved: Sequence[Tensor], wanted: Sequence[bool], plan: str
) -> list[Tensor]:
    shapes = [x.shape, *(operand.shape for operand in operands), upstream.shape[1:]]
    return [upstream.new_empty(shape if flag else (0,)) for shape, flag in zip(shapes, wanted, strict=True)]


contract_backward = operator(
    "contract_backward(Tensor upstream, Tensor x, Tensor[] operands, Tensor[] saved, bool[] wanted, str plan)"
    " -> Tensor[]",
    _backward_reference,
    _backward_fake,
    kernel=_backward,
)
contract = operator(
    "contract(Tensor x, Tensor[] operands, Tensor? bias, str plan, bool keep) -> (Tensor, Tensor[])",
    _contract_reference,
    _contract_fake,
    kernel=_contract,
    setup=_contract_setup,
    backward=_contract_gradient,
)


# The whole product -----------------------------------------------------------------------------------------------


def prepare(plan: str, factors: Mapping[str, Tensor]) -> list[Tensor]:
    """The small operand of every step with x, from the factors: work that depends on the weights alone."""
    names, sources = operand_sources(plan)
    given = [factors[name] for name in names]
    hoisted = hoist(given, plan) if () in sources else []
    operands, taken = [], 0
    for source in sources:
        if source:
            operands.append(given[source[0]].reshape(source[1:]))
        else:
            operands.append(hoisted[taken])
            taken += 1
    return operands


@constant_when_traced
def operand_sources(plan: str) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Names of the factors; and of every operand the number of its factor and its shape, or () from `hoist`."""
    of = ready_now(plan)
    return of.names, of.sources


@constant_when_traced
def operand_count(plan: str) -> int:
    """How many operands a plan takes."""
    return len(ready_now(plan).program.hot)


def gradients_follow() -> bool:
    """Whether a forward should save what its gradient needs. Not in a traced graph, which must not depend on it."""
    return torch.is_grad_enabled() and not torch.jit.is_tracing()


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


def apply(plan: str, x: Tensor, operands: Sequence[Tensor], bias: Optional = None) -> Tensor:
    """x (..., M) times the matrix of the network: (..., gates * N), gate-major. A byte b of uint8 input is b / 255.

    Under autocast products with x are of lower precision, as nn.Linear's.
    """
    like, device = operands[0], x.device.type
    check_device(x, like)
    if like.dtype == torch.float32 and device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        operands = [operand.to(dtype) for operand in operands]
        bias = None if bias is None else bias.to(dtype)
        x = x if x.dtype == torch.uint8 else x.to(dtype)
    else:
        check_dtype(x, like.dtype)
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    keep = gradients_follow() and any([operand.requires_grad for operand in operands])  # noqa: C419 (in the path of a step)
    y: Tensor = contract(rows, operands, bias, plan, keep)[0]
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], y.shape[-1])


def contract_text(plan: str, factors: Mapping[str, Tensor]) -> Tensor:
    """The same by the text of a plan, for factors that fit. Exported graphs get operations that other runtimes know."""
    run = hoist.reference if torch.compiler.is_exporting() else hoist
    result: Tensor = run([factors[name] for name in operand_sources(plan)[0]], plan)[0]
    return result
