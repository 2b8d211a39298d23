"""The steps that touch x, run one after the other; for autograd they are one operation with a backward of its own.

Autograd would save the same tensors, but walk through a node for every view and permutation, and it cannot know which
form of a small product is fast. In chunks, only x is saved: intermediates are made again, a few rows at a time, while
they are in cache. A second derivative goes through the plain steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kronecell.lowering import Op, View


@dataclass(frozen=True)
class Hot:
    """The steps, the permutation after the last, and whether that one can be written straight into its place."""

    ops: tuple[Op, ...]
    last: View
    straight: bool
    chunk: int | None = None  # rows at a time


def run_hot(hot: Hot, x: Tensor, small: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """x (rows, M) through all steps, whose other operands, laid out, are `small`, plus the bias."""
    inputs = (x, *small) if bias is None else (x, *small, bias)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in inputs):
        return _run(hot, x, small, bias, straight=hot.straight and _ordinary())
    return _Hot.apply(hot, x, bias, *small) if _ordinary() else _run(hot, x, small, bias, straight=False)


def _ordinary() -> bool:
    """Nobody follows the operations but backward(): no compiler, no transform of torch.func, no forward mode."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()
    )


def _run(hot: Hot, x: Tensor, small: Sequence[Tensor], bias: Tensor | None, straight: bool) -> Tensor:
    if hot.chunk is not None and len(x) > hot.chunk:
        whole = replace(hot, chunk=None)
        return torch.cat([_run(whole, part, small, bias, straight) for part in x.split(hot.chunk)])
    return _end(hot, _lefts(hot.ops[:-1], x, small)[-1], small[-1], bias, straight)


def _end(hot: Hot, left: Tensor, operand: Tensor, bias: Tensor | None, straight: bool) -> Tensor:
    """The last step with its permutation and the bias."""
    op = hot.ops[-1]
    if not straight:
        y = hot.last(op.product(left, operand))
        return y if bias is None else y + bias
    a, b = op.a(left), operand
    y = a.new_empty(a.shape[1], a.shape[0], b.shape[2])
    place = y.transpose(0, 1)
    if bias is None:
        torch.bmm(a, b, out=place)
    else:
        torch.baddbmm(bias.reshape(len(a), 1, -1), a, b, out=place)
    return y.reshape(len(y), -1)


class _Hot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hot: Hot, x: Tensor, bias: Tensor | None, *small: Tensor) -> Tensor:
        ctx.hot = hot
        if hot.chunk is not None and len(x) > hot.chunk:
            ctx.save_for_backward(x, bias, *small)
            return _run(hot, x, small, bias, hot.straight)
        lefts = _lefts(hot.ops[:-1], x, small)
        ctx.save_for_backward(x, bias, *small, *lefts[1:])
        return _end(hot, lefts[-1], small[-1], bias, hot.straight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hot: Hot = ctx.hot
        x, bias, *others = ctx.saved_tensors
        small, middle = others[: len(hot.ops)], others[len(hot.ops) :]
        (gradient,) = gradients
        wanted = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return None, *_again(hot, x, bias, small, gradient, wanted)
        gradient = gradient.contiguous()  # that of a sum has one element in memory, which BLAS would copy each time
        of_bias = gradient.sum(0) if wanted[1] else None
        of_small: list[Tensor | None] = [None] * len(small)
        if hot.chunk is None or len(x) <= hot.chunk:
            of_x = _backward(hot, [x, *middle], small, gradient, wanted, of_small)
            return None, of_x, of_bias, *of_small
        of_x = torch.empty_like(x) if wanted[0] else None
        for start in range(0, len(x), hot.chunk):
            rows = slice(start, start + hot.chunk)
            lefts = _lefts(hot.ops[:-1], x[rows], small)
            part = _backward(hot, lefts, small, gradient[rows], wanted, of_small)
            if of_x is not None and part is not None:
                of_x[rows] = part
        return None, of_x, of_bias, *of_small


def _lefts(ops: Sequence[Op], x: Tensor, small: Sequence[Tensor]) -> list[Tensor]:
    """x, and what it is after every one of these steps."""
    lefts = [x]
    for op, operand in zip(ops, small, strict=False):
        lefts.append(op.product(lefts[-1], operand))
    return lefts


def _backward(
    hot: Hot,
    lefts: Sequence[Tensor],
    small: Sequence[Tensor],
    gradient: Tensor,
    wanted: Sequence[bool],
    of_small: list[Tensor | None],
) -> Tensor | None:
    """The gradient of x from that of the result; those of the small operands are added to `of_small`.

    `wanted` is for x, the bias and the operands.
    """
    gradient = hot.last.undo(gradient, hot.ops[-1].shape)
    for i in reversed(range(len(small))):
        op = hot.ops[i]
        whole = op.product_gradient(gradient)
        if wanted[2 + i]:
            of_small[i] = op.small_gradient(lefts[i], whole, of_small[i])
        if not wanted[0] and not any(wanted[2 : 2 + i]):
            return None
        gradient = op.big_gradient(small[i], whole, lefts[i].shape)
    return gradient


def _again(
    hot: Hot, x: Tensor, bias: Tensor | None, small: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients as a graph, for backward with create_graph: the steps are run once more in autograd's sight."""
    y = _run(replace(hot, chunk=None), x, small, bias, straight=False)
    chosen = [t for t, want in zip((x, bias, *small), wanted, strict=True) if t is not None and want]
    found = iter(torch.autograd.grad(y, chosen, gradient, create_graph=True))
    return [next(found) if want else None for want in wanted]
