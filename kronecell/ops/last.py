"""The last product of most plans by a compiled kernel: one for every gate, written where it belongs, with the bias.

y[r, g, n] = bias[g, n] + sum over k of a[g, r, k] w[g, k, n]; k is short, so that BLAS spends its time on its start.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kronecell.ops import compiled
from kronecell.ops.processor import LANES
from kronecell.ops.watched import numbers, ordinary

MOST_DEPTH, MOST_DEPTH_BACK = 32, 16  # with longer sums, BLAS is nearly as fast, or for the gradients faster
LEAST_ROWS = 4  # with fewer, to ask whether the kernel takes them costs more than it saves
WORTH_A_THREAD = 2**20  # multiply-adds


def suits(a: Tensor, w: Tensor, other: Tensor | None, most_depth: int = MOST_DEPTH) -> bool:
    """Whether the kernel takes a (groups, rows, k), w (groups, k, n) and the bias, or the gradient of y."""
    if compiled.library is None or LANES == 4 or not ordinary(a):  # a tracer would take a look at sizes for a condition
        return False
    if a.shape[2] > most_depth or a.shape[1] < LEAST_ROWS or w.shape[2] % LANES or a.stride(2) != 1:
        return False
    if other is None:
        return numbers(a, w) and w.is_contiguous()
    fits = other.shape[-1] == w.shape[0] * w.shape[2] and (other.ndim == 1 or len(other) == a.shape[1])
    return fits and numbers(a, w, other) and w.is_contiguous() and other.is_contiguous()


def product(a: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """y (rows, groups * n)."""
    groups, rows, depth = a.shape
    columns = w.shape[2]
    y = a.new_empty(rows, groups * columns)
    compiled.library.last_product(
        a.data_ptr(), a.stride(0), a.stride(1), w.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
        rows, groups, depth, columns, _threads(a, columns, rows),
    )  # fmt: skip
    return y


def gradients(
    a: Tensor, w: Tensor, upstream: Tensor, of_a: Tensor | None, of_w: Tensor | None, of_bias: Tensor | None
) -> None:
    """From that of y, into the last three where they are given: of_a lies as a does, the others are added to."""
    groups, rows, depth = a.shape
    columns = w.shape[2]
    failed = compiled.library.last_gradients(
        a.data_ptr(), a.stride(0), a.stride(1), w.data_ptr(), upstream.data_ptr(),
        *(None if tensor is None else tensor.data_ptr() for tensor in (of_a, of_w, of_bias)),
        rows, groups, depth, columns, _threads(a, columns, groups),
    )  # fmt: skip
    if failed:
        raise MemoryError("the kernel for the last product found no memory for its buffers")


def _threads(a: Tensor, columns: int, parts: int) -> int:
    return max(1, min(torch.get_num_threads(), parts, a.numel() * columns // WORTH_A_THREAD))
