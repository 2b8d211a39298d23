"""A product that is a fold of x and a last product, with its products of weights, as one operation for autograd.

That is KCP in the order that is chosen for it. As an operation for the products of weights and another for the steps
with x, a training step spent a tenth of its time in Python: on nodes, views, lists and questions asked once here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kronecell.ops import compiled

from kronecell.ops import last
from kronecell.ops.fold import LEAST_ELEMENTS, Fold
from kronecell.ops.hot import Hot, lender, run_hot
from kronecell.ops.narrow import compiled_suits
from kronecell.ops.operation import Op
from kronecell.ops.processor import LANES
from kronecell.ops.products import Products, differentiated
from kronecell.ops.watched import autocast_off, numbers, ordinary


@dataclass(frozen=True)
class Joined:
    """Products of weights, and the three steps with x whose small operands they make."""

    products: Products
    hot: Hot
    fold: Fold
    end: Op  # the last of the steps
    shapes: tuple[tuple[int, ...], ...]  # of what the products of weights are made of
    width: int  # of x
    outputs: int

    def suits(self, x: Tensor, factors: Mapping[str, Tensor], bias: Tensor | None) -> bool:
        """Whether the kernels take x (..., M) and the rest, of which everything but x wants a gradient."""
        if not ordinary(x) or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return False  # first of all: a tracer would take a look at sizes for a condition
        if x.numel() < max(LEAST_ELEMENTS, last.LEAST_ROWS * self.width) or x.shape[-1] != self.width:
            return False
        if x.requires_grad or not x.is_contiguous():
            return False
        if not compiled_suits(x, self.fold.first.a.groups[1], self.fold.columns):
            return False
        given = [x]
        for name, shape in zip(self.products.inputs, self.shapes, strict=True):
            factor = factors.get(name)
            if factor is None or factor.shape != shape or not factor.requires_grad or not factor.is_contiguous():
                return False  # what is wrong, others say
            given.append(factor)
        if bias is not None:
            if bias.shape != (self.outputs,) or not bias.requires_grad or not bias.is_contiguous():
                return False
            given.append(bias)
        return numbers(*given)

    def run(self, x: Tensor, factors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        """x W + bias, (..., gates * N)."""
        rows = x if x.ndim == 2 else x.view(-1, self.width)
        y: Tensor = _Joined.apply(self, rows, bias, *[factors[name] for name in self.products.inputs])
        return y if x.ndim == 2 else y.view(*x.shape[:-1], self.outputs)

    def brought(self, z: Tensor) -> Tensor:
        """What the fold leaves of x as the last product wants it, (groups, rows, depth)."""
        a = self.end.bring(z)
        return a if a.stride(2) == 1 else a.contiguous()


def joined_of(products: Products | None, hot: Hot, shapes: Mapping[str, tuple[int, ...]], width: int) -> Joined | None:
    """Both as one operation, if they are of that kind; `shapes` are those of the parameters, `width` is that of x."""
    if products is None or hot.fold is None or not hot.straight or LANES == 4:
        return None
    if len(hot.ops) != 3 or len(products.hot) != 3 or any(name not in shapes for name in products.inputs):
        return None  # the last for constants, of which nobody wants a gradient
    fold, end = hot.fold, hot.ops[2]
    all_of_x = fold.places * fold.first.a.groups[1] == width  # and not one part of it after the other
    groups, _, depth = end.a.groups
    columns = end.b.groups[2]
    if not all_of_x or not fold.turns or depth > last.MOST_DEPTH_BACK or columns % LANES:
        return None
    return Joined(products, hot, fold, end, tuple(shapes[name] for name in products.inputs), width, groups * columns)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: Joined, x: Tensor, bias: Tensor | None, *given: Tensor) -> Tensor:
        small = joined.products.make(given)
        v = joined.fold.room(x, lender())
        y, z = joined.fold.run(x, small, True, v, lender())
        ctx.joined, ctx.has_bias = joined, bias is not None
        ctx.save_for_backward(x, *given, *small[1:], v, y, z)
        return last.product(joined.brought(z), small[2], bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        joined: Joined = ctx.joined
        x, *saved = ctx.saved_tensors
        count, upstream = len(joined.shapes), gradients[0]
        given, made = saved[:count], saved[count:]
        with autocast_off(upstream):  # the dtype was settled in the forward
            # Hooks of saved tensors may give back what is as good for torch, and not for the kernels.
            plain = not torch.is_grad_enabled() and ordinary(upstream) and numbers(upstream, *given, *made)
            if plain and compiled.library is not None and all(part.is_contiguous() for part in (*given, *made)):
                return _backward(joined, given, made, upstream.contiguous(), ctx.has_bias)

            def run(aliases: Sequence[Tensor]) -> list[Tensor]:
                return [run_hot(joined.hot, x, joined.products.differentiable(aliases), None)]

            found = differentiated(run, given, [True] * count, gradients)
            return None, None, upstream.sum(0) if ctx.has_bias else None, *found


def _backward(
    joined: Joined, given: Sequence[Tensor], made: Sequence[Tensor], upstream: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    """The kernels back: the last product, the fold, the products of weights."""
    factors, operand, v, y, z = made
    a = joined.brought(z)
    of_operand, of_a = operand.new_zeros(operand.shape), torch.empty_like(a)  # which lies as `a` does
    of_bias = upstream.new_zeros(joined.outputs) if has_bias else None
    last.gradients(a, operand, upstream, of_a, of_operand, of_bias)
    of_z = joined.end.a.undo(of_a).reshape(z.shape).contiguous()
    of_weight, of_factors = joined.fold.gradients(y, v, factors, of_z, (None, None))
    of_given = joined.products.gradients(given, [True] * len(given), (of_weight, of_factors, of_operand))
    return None, None, of_bias, *of_given
