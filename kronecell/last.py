"""The last product of most plans by a compiled kernel: one for every gate, written where it belongs, with the bias.

y[r, g, n] = bias[g, n] + sum over k of a[g, r, k] w[g, k, n]; k is short, so that BLAS spends its time on its start.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kronecell import compiled
from kronecell.narrow import numbers, ordinary
from kronecell.processor import LANES

MOST_DEPTH = 32  # with longer sums, BLAS is nearly as fast
LEAST_ROWS = 4  # with fewer, to ask whether the kernel takes them costs more than it saves
WORTH_A_THREAD = 2**20  # multiply-adds


def suits(a: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel takes a (groups, rows, k), w (groups, k, n) and the bias."""
    if compiled.library is None or LANES == 4 or not ordinary(a):  # a tracer would take a look at sizes for a condition
        return False
    if a.shape[2] > MOST_DEPTH or a.shape[1] < LEAST_ROWS or w.shape[2] % LANES or a.stride(2) != 1:
        return False
    given = [w] if bias is None else [w, bias]
    return numbers(a, *given) and all(tensor.is_contiguous() for tensor in given)


def product(a: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """y (rows, groups * n)."""
    groups, rows, depth = a.shape
    columns = w.shape[2]
    y = a.new_empty(rows, groups * columns)
    threads = max(1, min(torch.get_num_threads(), rows, a.numel() * columns // WORTH_A_THREAD))
    compiled.library.last_product(
        a.data_ptr(), a.stride(0), a.stride(1), w.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
        rows, groups, depth, columns, threads,
    )  # fmt: skip
    return y
