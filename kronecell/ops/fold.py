"""The first two products in one kernel: what x makes of few columns is folded up while it is in the cache.

y (rows, places, columns) = x (rows, places, depth) W^T is by far the largest intermediate of most plans, and the second
product sums over its places: z[r, o, c] = sum over p of y[r, p, c] f[p, o, c]. Where gates have factors of their own, f
depends on c by its gate alone. As batches of small matrices, BLAS takes longer for this than its multiply-adds explain.

The gradient of f needs y, and that of W needs v = f x, which sums over the places first. Both are small beside x. In
training both are made while x is in the cache: then it is read once, and not again for the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from kronecell.ops import compiled
from kronecell.ops.narrow import COMPILED_COLUMNS, compiled_suits
from kronecell.ops.operation import Op
from kronecell.ops.space import Space
from kronecell.ops.watched import numbers, ordinary, plain

LEAST_ELEMENTS = 2**20  # of x; with fewer, it is in cache, and the factors take longer to lay out than the fold saves
MOST_OTHERS = 16  # with more, a batch of products is as fast
MOST_FACTORS = 2**15  # elements of f, which is read again for every row
TURNED_PART = 4  # v is made if it has at most 1 / TURNED_PART of the elements of x


@dataclass(frozen=True)
class Fold:
    """Two steps, and the sizes of their indices; columns count as (any, shared, inner)."""

    first: Op
    second: Op
    places: int
    columns: int
    shared: int
    inner: int
    others: int

    def suits(self, x: Tensor, small: Sequence[Tensor | None]) -> bool:
        """Whether the kernel takes these operands of the two steps."""
        weight, factors = small[0], small[1]
        assert weight is not None and factors is not None
        if not ordinary(x) or x.numel() < LEAST_ELEMENTS:  # first: a tracer would take a look at sizes for a condition
            return False
        depth = self.first.a.groups[1]
        fits = x.shape[1] == self.places * depth and compiled_suits(x, depth, self.columns)
        followed = torch.is_grad_enabled() and factors.requires_grad
        return fits and not followed and plain(x, weight) and numbers(factors) and factors.is_contiguous()

    def suits_backward(self, y: Tensor | None, v: Tensor | None, upstream: Tensor) -> bool:
        """The same for the gradients of both small operands."""
        if y is None or v is None or torch.is_grad_enabled() or not ordinary(upstream):
            return False
        return numbers(y, v, upstream) and all(part.is_contiguous() for part in (y, v, upstream))

    @property
    def turns(self) -> bool:
        """Whether v is made in training: unless it is large beside x, or x has sizes that no kernel takes."""
        small = TURNED_PART * self.shared * self.others <= self.places
        return small and self.first.a.groups[1] >= compiled.LEAST_DEPTH > 0

    def room(self, x: Tensor, space: Space | None) -> Tensor | None:
        """Memory for v, if it is made, of a space if there is one."""
        if not self.turns or x.dtype != torch.float32:
            return None
        shape = (len(x), self.shared * self.others, self.first.a.groups[1])
        return x.new_empty(shape) if space is None else space.take((self.first.out, "turned"), shape, x)

    def run(
        self, x: Tensor, small: Sequence[Tensor | None], keep: bool, v: Tensor | None, space: Space | None
    ) -> tuple[Tensor | None, Tensor]:
        """y, if it is to be kept, and z, both as the two steps make them; v is written where it belongs, if given."""
        weight, factors = small[0], small[1]
        assert weight is not None and factors is not None
        like, y = weight, None
        if keep:
            shape = (len(x) * self.places, self.columns)
            y = like.new_empty(shape) if space is None else space.take((self.first.out, "product"), shape, like)
        z = like.new_empty(len(x), self.others * self.columns)
        compiled.few_columns_folded(self.first.a(x), weight, factors, y, z, v, self.sizes)
        return y, z.view(self.second.shape)

    def turn(self, x: Tensor, factors: Tensor, v: Tensor) -> None:
        """v alone, where the kernel does not take the two products."""
        torch.matmul(factors, x.view(len(x), self.places, -1), out=v)

    def gradients(
        self, y: Tensor, v: Tensor, factors: Tensor, upstream: Tensor, totals: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Those of both small operands from that of z; added to `totals`, in place, if given."""
        of_weight, of_factors = totals
        if of_weight is None:
            of_weight = y.new_zeros(self.columns, v.shape[-1])
        if of_factors is None:
            of_factors = y.new_zeros(factors.shape)
        compiled.folded_gradients(y, v, upstream, of_weight, of_factors, self.sizes)
        return of_weight, of_factors

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """As the kernels take them."""
        return self.places, self.columns, self.shared, self.inner, self.others


def fold_of(ops: Sequence[Op]) -> Fold | None:
    """The first two steps as a fold, if they are one, whatever they are applied to."""
    if len(ops) < 2:
        return None
    first, second = ops[:2]
    as_it_lies = first.narrow and first.a.permutation is None and second.spread and second.b.permutation is None
    as_it_lies = as_it_lies and second.parts == 1
    if not as_it_lies:
        return None
    (_, places, columns), (others, summed) = second.b.groups, second.a.groups
    shared, inner = 1, columns
    if second.diagonal is not None:
        shape, pair, at = second.diagonal
        if pair != 1:  # more than the rows before the places
            return None
        shared, inner = shape[at], prod(shape[at + 1 :])
        others //= shared
    small = columns <= COMPILED_COLUMNS and others <= MOST_OTHERS and places * columns * others <= MOST_FACTORS
    if not small or summed != places or columns != first.b.groups[0]:
        return None
    return Fold(first, second, places, columns, shared, inner, others)
