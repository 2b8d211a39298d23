"""A product that is a fold of x and a last product, with its products of weights, as one operation for autograd.

That is KCP in the separable order. As an operation for the products of weights and another for the steps with x, a
training step spent a tenth of its time in Python: on nodes, views, lists and questions that are asked once here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kronecell import compiled, last
from kronecell.fold import LEAST_ELEMENTS, Fold
from kronecell.hot import Hot, lender, run_hot
from kronecell.narrow import compiled_suits
from kronecell.processor import LANES
from kronecell.products import Products, differentiated
from kronecell.watched import autocast_off, numbers, ordinary


@dataclass(frozen=True)
class Joined:
    """Products of weights, and the three steps with x whose small operands they make."""

    products: Products
    hot: Hot
    fold: Fold

    def suits(self, x: Tensor, factors: Mapping[str, Tensor], bias: Tensor | None) -> bool:
        """Whether the kernels take x (rows, M) and the rest, of which everything but x wants a gradient."""
        if not ordinary(x) or not torch.is_grad_enabled():  # first: a tracer would take a look at sizes for a condition
            return False
        enough = x.numel() >= LEAST_ELEMENTS and len(x) >= last.LEAST_ROWS
        if not enough or x.requires_grad or not compiled_suits(x, self.fold.first.a.groups[1], self.fold.columns):
            return False
        learning = [factors[name] for name in self.products.inputs]
        if bias is not None:
            learning.append(bias)
        for tensor in learning:
            if not tensor.requires_grad or not tensor.is_contiguous():
                return False
        return x.is_contiguous() and numbers(x, *learning)

    def run(self, x: Tensor, factors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        """x W + bias."""
        y: Tensor = _Joined.apply(self, x, bias, *[factors[name] for name in self.products.inputs])
        return y

    def differentiable(self, x: Tensor, given: Sequence[Tensor]) -> list[Tensor]:
        """The same by operations that can be differentiated again; the bias comes last."""
        count = len(self.products.inputs)
        bias = given[count] if len(given) > count else None
        return [run_hot(self.hot, x, self.products.differentiable(given[:count]), bias)]


def joined_of(products: Products | None, hot: Hot) -> Joined | None:
    """Both as one operation, if they are of that kind."""
    if products is None or hot.fold is None or not hot.straight or hot.chunk is not None or LANES == 4:
        return None
    if len(hot.ops) != 3 or len(products.hot) != 3 or not hot.fold.turns:
        return None
    end = hot.ops[2]
    as_it_lies = end.a.permutation is None or end.a.permutation[-1] == len(end.a.permutation) - 1
    fits = end.a.groups[2] <= last.MOST_DEPTH_BACK and end.b.groups[2] % LANES == 0
    return Joined(products, hot, hot.fold) if as_it_lies and fits else None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: Joined, x: Tensor, bias: Tensor | None, *given: Tensor) -> Tensor:
        fold, end = joined.fold, joined.hot.ops[2]
        small = joined.products.make(given)
        v = fold.room(x, lender())
        y, z = fold.run(x, small, True, v, lender())
        ctx.joined, ctx.has_bias = joined, bias is not None
        ctx.save_for_backward(x, *given, bias, *small[1:], v, y, z)
        return last.product(end.bring(z), small[2], bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        joined: Joined = ctx.joined
        x, *saved = ctx.saved_tensors
        count = len(joined.products.inputs)
        given, bias, made = saved[:count], saved[count], saved[count + 1 :]
        upstream = gradients[0]
        with autocast_off(upstream):  # the dtype was settled in the forward
            # Hooks of saved tensors may give back what is as good for torch, and not for the kernels.
            plain = not torch.is_grad_enabled() and ordinary(upstream) and numbers(upstream, *given, *made)
            if plain and compiled.library is not None and all(part.is_contiguous() for part in (*given, *made)):
                return _backward(joined, given, made, upstream.contiguous(), ctx.has_bias)
            learning = given if bias is None else [*given, bias]

            def run(aliases: Sequence[Tensor]) -> list[Tensor]:
                return joined.differentiable(x, aliases)

            found = differentiated(run, learning, [True] * len(learning), gradients)
            return None, None, None if bias is None else found.pop(), *found


def _backward(
    joined: Joined, given: Sequence[Tensor], made: Sequence[Tensor], upstream: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    """The kernels back: the last product, the fold, the products of weights."""
    factors, operand, v, y, z = made
    fold, end = joined.fold, joined.hot.ops[2]
    a = end.bring(z)
    of_operand, of_a = operand.new_zeros(operand.shape), torch.empty_like(a)  # which lies as `a` does
    of_bias = upstream.new_zeros(upstream.shape[1]) if has_bias else None
    last.gradients(a, operand, upstream, of_a, of_operand, of_bias)
    of_z = end.a.undo(of_a).reshape(z.shape).contiguous()
    of_weight, of_factors = fold.gradients(y, v, factors, of_z, (None, None))
    of_given = joined.products.gradients(given, [True] * len(given), (of_weight, of_factors, of_operand))
    return None, None, of_bias, *of_given
