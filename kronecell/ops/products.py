"""One step of a program on tensors: the product of its operands, and its gradients.

With `plain` all are operations of torch, differentiable any number of times: the reference. Without, kernels of this
package run the products they gain on, and nothing may be recorded for differentiation.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from kronecell.ops.kernels import bmm, bmm_out, column_sums, few_columns
from kronecell.ops.program import Op, View

# Where a kernel of our own may gain: fewer multiply-adds cost less in torch than a second way through the dispatcher.
WORTH_A_KERNEL = 2**16
MANY = 2**19  # elements of gradients, one per leading index, from which they are summed as they are made


class Room:
    """Memory for the intermediates of one chunk of rows, which the next chunk of the same call uses again.

    Freed and allocated for every chunk, it would go back to the system each time, and come back page by page, which
    takes longer than the product that is written there.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], Tensor] = {}

    def take(self, step: str, part: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory of this shape, with anything in it, until it is taken again."""
        size, held = prod(shape), self._held.get((step, part))
        if held is None or held.numel() < size or held.dtype != like.dtype:
            held = self._held[step, part] = like.new_empty(size)
        return held[:size].view(shape)


class Plain:
    """Products by operations of torch alone."""

    def times(self, a: Tensor, b: Tensor, step: str = "", part: str = "") -> Tensor:
        return torch.matmul(a, b)

    def narrow(self, x: Tensor, weight: Tensor) -> Tensor:
        return (x if x.dtype == weight.dtype else x.to(weight.dtype)) @ weight.mT

    def sums(self, x: Tensor, gradient: Tensor) -> Tensor:
        return gradient.mT @ (x if x.dtype == gradient.dtype else x.to(gradient.dtype))

    def arrange(self, view: View, tensor: Tensor, step: str = "", part: str = "") -> Tensor:
        return view(tensor)

    def regroup(self, tensor: Tensor, shape: tuple[int, ...], step: str) -> Tensor:
        return tensor.reshape(shape)


class Kernels(Plain):
    """Products by the kernels, in fresh memory or in that of a room."""

    def __init__(self, room: Room | None = None) -> None:
        self.room = room

    def times(self, a: Tensor, b: Tensor, step: str = "", part: str = "product") -> Tensor:
        work = a.shape[-2] * a.shape[-1] * b.shape[-1] * (a.shape[0] if a.ndim == 3 else 1)
        if work < WORTH_A_KERNEL:
            return torch.mm(a, b) if a.ndim == 2 else torch.bmm(a, b)
        if self.room is None or not step:
            return bmm.kernel(a, b)
        out = self.room.take(step, part, (*a.shape[:-1], b.shape[-1]), a)
        bmm_out.kernel(out, a, b)
        return out

    def narrow(self, x: Tensor, weight: Tensor) -> Tensor:
        return few_columns.kernel(x, weight) if x.numel() * len(weight) >= WORTH_A_KERNEL else super().narrow(x, weight)

    def sums(self, x: Tensor, gradient: Tensor) -> Tensor:
        return column_sums.kernel(x, gradient)

    def arrange(self, view: View, tensor: Tensor, step: str = "", part: str = "") -> Tensor:
        if self.room is None or view.permutation is None:
            return view(tensor)
        arranged = view.permuted(tensor)
        if not arranged.is_contiguous():
            arranged = self.room.take(step, part, tuple(arranged.shape), tensor).copy_(arranged)
        return arranged.reshape(view.groups)

    def regroup(self, tensor: Tensor, shape: tuple[int, ...], step: str) -> Tensor:
        if self.room is not None and not tensor.is_contiguous():
            tensor = self.room.take(step, "regrouped", tuple(tensor.shape), tensor).copy_(tensor)
        return tensor.reshape(shape)


def product(op: Op, left: Tensor, small: Tensor, by: Plain) -> Tensor:
    """The contraction of the left, big operand and the right one, laid out."""
    big = by.arrange(op.left_view, left, op.out, "left")
    a, b = (small, big) if op.swapped else (big, small)
    if op.parts > 1:
        pieces = [piece.expand(b.shape[0], -1, -1) for piece in a.chunk(op.parts)]
        if not isinstance(by, Kernels):
            return torch.stack([by.times(piece, b) for piece in pieces])
        made = (op.parts, b.shape[0], pieces[0].shape[1], b.shape[2])
        result = b.new_empty(made) if by.room is None else by.room.take(op.out, "product", made, b)
        for piece, place in zip(pieces, result, strict=True):
            bmm_out.kernel(place, piece, b)
        return result
    if op.narrow:
        return by.narrow(a, b)
    result = by.times(a.expand(b.shape[0], -1, -1) if op.spread else a, b, op.out)
    if op.diagonal is not None:
        shape, *pair = op.diagonal
        result = torch.diagonal(result.reshape(shape), 0, *pair).movedim(-1, pair[0]).contiguous()
    return result


def product_gradient(op: Op, gradient: Tensor) -> Tensor:
    """Gradient of the matrix product from that of the result: what the two functions below take."""
    if op.diagonal is None:
        return gradient
    pair = op.diagonal[1:]
    whole = torch.diag_embed(gradient.movedim(pair[0], -1), 0, *pair)  # zeros for pairs that differ
    return whole.reshape(op.b.groups[0], op.a.groups[0], op.b.groups[2])


def small_gradient(op: Op, left: Tensor, gradient: Tensor, by: Plain) -> Tensor:
    """Gradient of the right operand as laid out."""
    big = by.arrange(op.left_view, left, op.out, "left")
    if op.parts > 1:
        return torch.cat([_spread_gradient(big, piece, by, op.out) for piece in gradient])
    if op.spread:
        return _spread_gradient(big, gradient, by, op.out)
    if op.narrow:
        return by.sums(big, gradient)
    a, b = (gradient, big.mT) if op.swapped else (big.mT, gradient)
    return by.times(a, b)  # in fresh memory: it is added up over chunks


def _spread_gradient(b: Tensor, gradient: Tensor, by: Plain, step: str) -> Tensor:
    """The gradient of a where out[i] = a b[i]."""
    rows, summed = gradient.shape[1], b.shape[1]
    if b.shape[0] * rows * summed > MANY:  # a gradient for every i would be large
        return torch.addbmm(gradient.new_zeros(rows, summed), gradient, b.mT)
    # Transposing the gradient costs less than transposing b.
    return by.times(b, gradient.mT, step, "spread").sum(0).t().contiguous()


def big_gradient(op: Op, small: Tensor, gradient: Tensor, by: Plain) -> Tensor:
    """Gradient of the left operand, with its legs in their order but in any grouping."""
    part = "big gradient"
    if op.transposed:  # its gradient is computed in the same layout
        if op.swapped:
            return by.times(gradient.mT, small, op.out, part)
        return by.times(small.mT if op.narrow else small, gradient.mT, op.out, part)
    if not op.swapped:
        return op.a.undo(by.times(gradient, small if op.narrow else small.mT, op.out, part))
    a = small.mT
    if op.parts > 1:
        pieces = [piece.expand(gradient.shape[1], -1, -1) for piece in a.chunk(op.parts, -1)]
        products = [
            by.times(piece, of, op.out, f"{part} {i}")
            for i, (piece, of) in enumerate(zip(pieces, gradient, strict=True))
        ]
        total = products[0]
        for more in products[1:]:
            total = total + more if not isinstance(by, Kernels) else total.add_(more)
        return op.b.undo(total)
    return op.b.undo(by.times(a.expand(gradient.shape[0], -1, -1) if op.spread else a, gradient, op.out, part))
