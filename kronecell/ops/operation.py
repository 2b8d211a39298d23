"""One step of a plan as operations of torch: both operands brought to matrices, their product, and its gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from kronecell.ops import compiled
from kronecell.ops.matrices import add_product, multiply
from kronecell.ops.narrow import narrow, narrow_gradient, spread_compiled
from kronecell.ops.space import Slot, Space
from kronecell.ops.watched import ordinary

MANY = 2**19  # elements of gradients, one per leading index, from which they are summed as they are made


class Merged(NamedTuple):
    """A permutation of legs of which those that stay together are one; -1 stands for the number of rows.

    Every call of torch counts where x is small, or has just pushed everything else out of the cache.
    """

    legs: tuple[int, ...]
    permutation: tuple[int, ...]
    back: tuple[int, ...]  # the inverse
    permuted: tuple[int, ...]  # the legs after it


@dataclass(frozen=True)
class View:
    """How an operand becomes a matrix or a batch of matrices: split into legs, permute, merge into groups."""

    legs: tuple[int, ...]
    permutation: tuple[int, ...] | None  # None: already in order
    groups: tuple[int, ...]
    _merged: Merged | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.permutation is not None:  # at once: a tracer must find it ready
            object.__setattr__(self, "_merged", _merged(self.legs, self.permutation))

    def __call__(self, tensor: Tensor) -> Tensor:
        if self.permutation is None or self._merged is None:
            return tensor.reshape(self.groups)
        if torch.compiler.is_compiling():  # with legs in one, a graph for every number of rows cannot be proved
            return tensor.reshape(self.legs).permute(self.permutation).reshape(self.groups)
        tensor = tensor.reshape(self._merged.legs).permute(self._merged.permutation)
        return tensor if self._merged.permuted == self.groups else tensor.reshape(self.groups)

    def undo(self, tensor: Tensor) -> Tensor:
        """From the groups back to the order the operand had; in what grouping is left to the caller."""
        if self._merged is None:
            return tensor
        permuted = self._merged.permuted
        return (tensor if permuted == self.groups else tensor.reshape(permuted)).permute(self._merged.back)


def _merged(legs: tuple[int, ...], permutation: tuple[int, ...]) -> Merged:
    runs: list[list[int]] = []
    for leg in permutation:
        if runs and runs[-1][-1] + 1 == leg:
            runs[-1].append(leg)
        else:
            runs.append([leg])
    sizes = [[legs[leg] for leg in run] for run in runs]
    permuted = tuple(-1 if -1 in together else prod(together) for together in sizes)
    back = sorted(range(len(runs)), key=runs.__getitem__)
    return Merged(tuple(permuted[i] for i in back), _inverse(back), tuple(back), permuted)


def _inverse(permutation: list[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(permutation)), key=permutation.__getitem__))


@dataclass(frozen=True)
class Op:
    """out = a @ b, with both operands brought to (batch,) rows x columns; `spread` repeats a over the batch of b.

    With `parts`, a spread product is made for one part of the rows of a after the other, and these are the leading
    index of the result: as the next product wants it, if that is a batch over them.

    `diagonal` is for the wide form: the product was taken for all pairs of a shared leg, and only the equal ones count.
    """

    left: str
    right: str
    out: str
    a: View
    b: View
    legs: tuple[str, ...]
    swapped: bool = False  # a is the view of the right operand
    spread: bool = False
    diagonal: tuple[tuple[int, ...], int, int] | None = None  # shape of the wide result, the two positions of the leg
    narrow: bool = False  # b is brought to columns x summed, the layout in which few columns are multiplied fastest
    copied: int = 0  # elements copied to bring x into place, for the plan's number of rows
    matrices: int = 1  # matrix products started
    parts: int = 1
    turned: bool = False  # the big operand lies with its two matrix dimensions the other way round

    @property
    def left_view(self) -> View:
        """How the left operand becomes a matrix."""
        return self.b if self.swapped else self.a

    @property
    def right_view(self) -> View:
        """How the right one does."""
        return self.a if self.swapped else self.b

    def run(self, tensors: dict[str, Tensor]) -> None:
        """Compute `out` from `left` and `right`."""
        tensors[self.out] = self.product(tensors[self.left], self.lay_out(tensors[self.right]))

    def lay_out(self, right: Tensor) -> Tensor:
        """The right, small operand as the product wants it."""
        small = self.right_view(right)
        return small.contiguous() if self.narrow else small

    def bring(self, left: Tensor, space: Space | None = None) -> Tensor:
        """The left, big operand as the product wants it."""
        view = self.left_view
        if space is None or not self.copied or view.permutation is None:
            return view(left)
        if self.out not in space.brought:
            permuted = left.reshape(view.legs).permute(view.permutation)
            space.brought[self.out] = space.copy((self.out, "brought"), permuted).view(view.groups)
        return space.brought[self.out]

    def product(self, left: Tensor, small: Tensor, space: Space | None = None) -> Tensor:
        """The contraction of the left operand and the right one, laid out; with a `space` it is not differentiable."""
        big = self.bring(left, space)
        a, b = (small, big) if self.swapped else (big, small)
        slot = (self.out, "product")
        if self.parts > 1:
            return self._in_parts(a, b, space, slot)
        if self.spread:
            a = a.unsqueeze(0).expand(b.shape[0], -1, -1)
        if self.narrow:
            return narrow(a, b, None if space is None else space.take(slot, (len(a), len(b)), a))
        result = matmul(a, b, space, slot)
        if self.diagonal is not None:
            shape, *pair = self.diagonal
            result = torch.diagonal(result.reshape(shape), 0, *pair).movedim(-1, pair[0]).contiguous()
        return result

    def _in_parts(self, a: Tensor, b: Tensor, space: Space | None, slot: Slot) -> Tensor:
        """out[p, i] = a[p] b[i] for the parts p of a."""
        pieces = [piece.unsqueeze(0).expand(len(b), -1, -1) for piece in a.chunk(self.parts)]
        shape = (self.parts, len(b), len(a) // self.parts, b.shape[2])
        if space is not None:
            result = space.take(slot, shape, b)
        elif torch.is_grad_enabled() or not ordinary(b):
            return torch.stack([torch.bmm(piece, b) for piece in pieces])
        else:
            result = b.new_empty(shape)
        for piece, place in zip(pieces, result, strict=True):
            multiply(piece, b, place)
        return result

    def product_into(self, left: Tensor, small: Tensor, result: Tensor) -> None:
        """The same, written into `result`; not differentiable."""
        made = narrow(self.a(left), small, result) if self.narrow else self.product(left, small)
        if made is not result:
            result.copy_(made)

    @property
    def moves_gradient(self) -> bool:
        """Whether the gradient of the big operand is copied to where that lies."""
        return self.left_view.permutation is not None and not self.turned

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result, with -1 where the rows are."""
        if self.diagonal is not None:
            shape, _, second = self.diagonal
            return (*shape[:second], *shape[second + 1 :])
        if self.narrow:
            return (self.a.groups[0], self.b.groups[0])
        if self.parts > 1:
            return (self.parts, self.b.groups[0], self.a.groups[0] // self.parts, self.b.groups[2])
        return (*(self.b.groups[:1] if self.spread else ()), *self.a.groups[:-1], self.b.groups[-1])

    def product_gradient(self, gradient: Tensor) -> Tensor:
        """Gradient of the matrix product from that of the result: what the two below take."""
        if self.diagonal is None:
            return gradient
        shape, *pair = self.diagonal
        sizes = [*gradient.shape]
        sizes.insert(pair[1], shape[pair[1]])
        whole = gradient.new_zeros(sizes)
        torch.diagonal(whole, 0, *pair).movedim(-1, pair[0]).copy_(gradient)
        return whole.reshape(self.b.groups[0], self.a.groups[0], self.b.groups[2])

    def small_gradient(
        self, left: Tensor, gradient: Tensor, total: Tensor | None = None, space: Space | None = None
    ) -> Tensor:
        """Gradient of the right operand as laid out; added to `total`, in place, if that is given."""
        big = self.bring(left, space)
        if self.parts > 1:
            totals = [None] * self.parts if total is None else total.chunk(self.parts)
            slot = (self.out, "parts")
            found = [
                self._spread_gradient(big, of, whole, space, slot) for of, whole in zip(gradient, totals, strict=True)
            ]
            return torch.cat(found) if total is None else total
        if self.spread:
            return self._spread_gradient(big, gradient, total, space, (self.out, "parts"))
        if self.narrow:
            return narrow_gradient(big, gradient, total)
        a, b = (gradient, big.mT) if self.swapped else (big.mT, gradient)
        return multiply(a, b) if total is None else add_product(total, a, b)

    @staticmethod
    def _spread_gradient(b: Tensor, gradient: Tensor, total: Tensor | None, space: Space | None, slot: Slot) -> Tensor:
        """The same where out[i] = a b[i]."""
        rows, summed = gradient.shape[1], b.shape[1]
        if spread_compiled(b, gradient, total):
            total = gradient.new_zeros(rows, summed) if total is None else total
            compiled.spread_gradient(b, gradient, total)
            return total
        if len(b) * rows * summed > MANY:  # a gradient for every i would be large
            total = gradient.new_zeros(rows, summed) if total is None else total
            return total.addbmm_(gradient, b.mT)
        part = matmul(b, gradient.mT, space, slot).sum(0).t()  # transposing the gradient costs less than transposing b
        return part.contiguous() if total is None else total.add_(part)

    def big_gradient(self, small: Tensor, gradient: Tensor, space: Space | None = None) -> Tensor:
        """Gradient of the left operand, with its legs in their order but in any grouping."""
        slot = (self.out, "gradient")
        if self.turned:  # so is its gradient made
            factors = (gradient.mT, small) if self.swapped else (small.mT if self.narrow else small, gradient.mT)
            return matmul(*factors, space, slot)
        if not self.swapped:
            return self.a.undo(matmul(gradient, small if self.narrow else small.mT, space, slot))
        a = small.mT
        if self.parts > 1:
            pieces = [piece.expand(gradient.shape[1], -1, -1) for piece in a.chunk(self.parts, -1)]
            products = [multiply(piece, of) for piece, of in zip(pieces, gradient, strict=True)]
            return self.b.undo(torch.stack(products).sum(0))
        return self.b.undo(matmul(a.expand(len(gradient), -1, -1) if self.spread else a, gradient, space, slot))


def matmul(a: Tensor, b: Tensor, space: Space | None, slot: Slot) -> Tensor:
    """The product of two matrices or of two batches of them, in the memory of a slot if there is a space."""
    return multiply(a, b, None if space is None else space.take(slot, (*a.shape[:-1], b.shape[-1]), a))
