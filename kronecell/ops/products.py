"""One step of a program on tensors: the product of its operands, and its gradients.

With `plain` all are operations of torch, differentiable any number of times: the reference. Without, kernels of this
package run the products they gain on, and nothing may be recorded for differentiation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kronecell.ops.kernels import bmm, column_sums, few_columns
from kronecell.ops.program import Op

# Where a kernel of our own may gain: fewer multiply-adds cost less in torch than a second way through the dispatcher.
WORTH_A_KERNEL = 2**16
MANY = 2**19  # elements of gradients, one per leading index, from which they are summed as they are made


Multiply = Callable[[Tensor, Tensor], Tensor]


def product(op: Op, left: Tensor, small: Tensor, plain: bool = False) -> Tensor:
    """The contraction of the left, big operand and the right one, laid out; `plain` uses operations of torch alone."""
    times: Multiply = torch.matmul if plain else multiply
    big = op.left_view(left)
    a, b = (small, big) if op.swapped else (big, small)
    if op.parts > 1:
        pieces = [times(piece.expand(b.shape[0], -1, -1), b) for piece in a.chunk(op.parts)]
        return torch.stack(pieces)
    if op.spread:
        a = a.expand(b.shape[0], -1, -1)
    if op.narrow:
        return a @ b.mT if plain else narrow(a, b)
    result = times(a, b)
    if op.diagonal is not None:
        shape, *pair = op.diagonal
        result = torch.diagonal(result.reshape(shape), 0, *pair).movedim(-1, pair[0]).contiguous()
    return result


def product_gradient(op: Op, gradient: Tensor) -> Tensor:
    """Gradient of the matrix product from that of the result: what the two functions below take."""
    if op.diagonal is None:
        return gradient
    shape, *pair = op.diagonal
    sizes = [*gradient.shape]
    sizes.insert(pair[1], shape[pair[1]])
    whole = torch.diag_embed(gradient.movedim(pair[0], -1), 0, *pair)  # zeros for pairs that differ
    return whole.reshape(op.b.groups[0], op.a.groups[0], op.b.groups[2])


def small_gradient(op: Op, left: Tensor, gradient: Tensor, plain: bool = False) -> Tensor:
    """Gradient of the right operand as laid out."""
    big = op.left_view(left)
    times: Multiply = torch.matmul if plain else multiply
    if op.parts > 1:
        return torch.cat([_spread_gradient(big, piece, times) for piece in gradient])
    if op.spread:
        return _spread_gradient(big, gradient, times)
    if op.narrow:
        return gradient.mT @ big if plain else column_sums.kernel(big, gradient)
    return times(gradient, big.mT) if op.swapped else times(big.mT, gradient)


def big_gradient(op: Op, small: Tensor, gradient: Tensor, plain: bool = False) -> Tensor:
    """Gradient of the left operand, with its legs in their order but in any grouping."""
    times: Multiply = torch.matmul if plain else multiply
    if op.transposed:  # so is its gradient made
        if op.swapped:
            return times(gradient.mT, small)
        return times(small.mT if op.narrow else small, gradient.mT)
    if not op.swapped:
        return op.a.undo(times(gradient, small if op.narrow else small.mT))
    a = small.mT
    if op.parts > 1:
        pieces = [piece.expand(gradient.shape[1], -1, -1) for piece in a.chunk(op.parts, -1)]
        products = [times(piece, of) for piece, of in zip(pieces, gradient, strict=True)]
        return op.b.undo(torch.stack(products).sum(0))
    return op.b.undo(times(a.expand(gradient.shape[0], -1, -1) if op.spread else a, gradient))


def narrow(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T for a weight of few columns."""
    if x.numel() * len(weight) < WORTH_A_KERNEL or (not x.is_floating_point() and not x.is_contiguous()):
        return torch.nn.functional.linear(x if x.dtype == weight.dtype else x.to(weight.dtype), weight)
    return few_columns.kernel(x, weight)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices or of two batches of them."""
    if a.shape[-2] * a.shape[-1] * b.shape[-1] * (a.shape[0] if a.ndim == 3 else 1) >= WORTH_A_KERNEL:
        return bmm.kernel(a, b)
    return torch.mm(a, b) if a.ndim == 2 else torch.bmm(a, b)


def _spread_gradient(b: Tensor, gradient: Tensor, times: Multiply) -> Tensor:
    """The gradient of a where out[i] = a b[i]."""
    rows, summed = gradient.shape[1], b.shape[1]
    if b.shape[0] * rows * summed > MANY:  # a gradient for every i would be large
        return torch.addbmm(gradient.new_zeros(rows, summed), gradient, b.mT)
    return times(b, gradient.mT).sum(0).t().contiguous()  # transposing the gradient costs less than transposing b
