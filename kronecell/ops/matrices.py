"""Products of matrices and of batches of them, by BLAS or by the compiled kernel of native/matrices.c.

torch's BLAS on x86-64 is Intel's, which on AMD processors with AVX-512 fills half of a register: there the compiled
kernel makes more than twice as many multiply-adds a second. Elsewhere it is not used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kronecell.ops import compiled
from kronecell.ops.processor import LANES
from kronecell.ops.watched import numbers, ordinary

# Whether BLAS leaves half of the processor idle.
HALF_BLAS: bool = (
    LANES == 16 and torch.backends.mkl.is_available() and compiled.library is not None and bool(compiled.library.amd())
)
LEAST_ROWS, LEAST_COLUMNS = 8, 8  # with fewer, what is packed is used too seldom, or most of a register is empty
LEAST_WORK = 2**16  # multiply-adds of a batch; with fewer, a call costs more than it saves
WORTH_A_THREAD = 2**20  # multiply-adds


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b for two matrices or two batches of them, in the memory of `out`, if that is given."""
    if suits(a, b, out):
        if out is None:
            out = a.new_empty(*a.shape[:-1], b.shape[-1])
        _run(a, b, out, add=False)
        return out
    product = torch.mm if a.ndim == 2 else torch.bmm
    return product(a, b) if out is None else product(a, b, out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b, in place."""
    if suits(a, b, total):
        _run(a, b, total, add=True)
        return total
    return total.addmm_(a, b) if a.ndim == 2 else total.baddbmm_(a, b)


def instead_of_blas() -> bool:
    """Whether the kernel takes the place of BLAS here."""
    return HALF_BLAS and compiled.library is not None


def suits(a: Tensor, b: Tensor, out: Tensor | None) -> bool:
    """Whether the kernel takes these, and is the faster one."""
    if not instead_of_blas() or not ordinary(a):  # a tracer would take a look at sizes for a condition
        return False
    rows, columns = a.shape[-2], b.shape[-1]
    if rows < LEAST_ROWS or columns < LEAST_COLUMNS or a.numel() * columns < LEAST_WORK:
        return False
    given = (a, b) if out is None else (a, b, out)
    followed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    fit = a.shape[-1] == b.shape[-2] and a.shape[:-2] == b.shape[:-2]  # else torch says what is wrong
    if out is not None:
        fit = fit and out.shape == (*a.shape[:-1], columns) and out.stride(-1) == 1 and out.stride(-2) >= columns
        fit = fit and 0 not in out.stride()
    return fit and not followed and numbers(*given)


def _run(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    *batch, rows, depth = a.shape
    count, columns = batch[0] if batch else 1, b.shape[-1]
    steps = [(0, *tensor.stride()) if tensor.ndim == 2 else tensor.stride() for tensor in (a, b, out)]
    threads = max(1, min(torch.get_num_threads(), count * rows * depth * columns // WORTH_A_THREAD))
    failed = compiled.library.matrix_products(
        a.data_ptr(), *steps[0], b.data_ptr(), *steps[1], out.data_ptr(), *steps[2][:2], add, count, rows, depth,
        columns, threads,
    )  # fmt: skip
    if failed:
        raise MemoryError("the kernel for products of matrices found no memory for its buffers")
