"""x W^T for a tall x and few columns, the first product of most plans and nearly all of their time, and its gradient.

BLAS repacks x before it multiplies, which costs as much as the product when W is one or two registers wide. oneDNN
reads x where it lies, and the compiled kernels of this package also ask the memory for x before they need it. Which is
faster where was measured on one core (benchmarks/results/kernels.md).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kronecell.ops import compiled
from kronecell.ops.matrices import add_product, instead_of_blas, multiply, suits
from kronecell.ops.processor import LANES
from kronecell.ops.watched import numbers, ordinary, plain

COMPILED_COLUMNS = 2 * LANES  # at most
DEEP, DEEP_COLUMNS = 256, {8: 256}  # from this depth on, so many, by lanes; measured with AVX2 only
GRADIENT_COLUMNS = max(64, COMPILED_COLUMNS)  # for more, BLAS is as good at G^T x
COMPILED_DEPTH = 4096  # less than this
COMPILED_ELEMENTS = {16: 2**17, 8: 2**20}  # of x, at least, by lanes; a quarter of it for half as many columns
SHORT, SHORT_ELEMENTS = 64, 2**18  # rows shorter than this have as much to write as to read: at least so many
GRADIENT_ELEMENTS = 2**20  # for the gradient; with fewer, BLAS is as good
SPREAD_ELEMENTS, SPREAD_RESULTS = 2**14, 2**13  # of x, at least, and of a sum of small products, at most
ROW_CONFLICT, CONFLICT_DEPTH = 256, 512  # rows of a multiple of this length compete for lines of the cache; at most
FEWEST_COLUMNS = 4  # up to so many are made as sums along rows, where rows do not compete
MOST_COLUMNS = {16: 64, 8: 64}  # by lanes; with more columns BLAS is as good or better
LEAST_ELEMENTS = {16: 2**21, 8: 2**20}  # of x; with fewer, there is little to gain and the start of a kernel to lose
COLUMNS, ELEMENTS = MOST_COLUMNS.get(LANES, 16), LEAST_ELEMENTS.get(LANES, 2**20)  # what lies as W does, and large
ENOUGH = COMPILED_ELEMENTS.get(LANES, 2**20)
# Depth from which oneDNN is faster than what takes the place of BLAS; with less, that is as fast, and writes where it
# is told to.
LONG = 2**13
FEWEST_ELEMENTS = min(ELEMENTS, ENOUGH) // 4  # with fewer, BLAS is taken whatever the rest

_kernel: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # absent where torch is built without oneDNN


def narrow(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """F.linear(x, weight) by the fastest kernel; in the memory of `out`, if that is given and the kernel can do it."""
    kind = kernel(x, weight)
    if kind == "compiled":
        return compiled.few_columns(x, weight, out)
    if kind == "oneDNN":
        return _kernel(x, weight, None, "none", [], "")
    if out is not None or (instead_of_blas() and suits(x, weight.t(), out)):
        return multiply(x, weight.t(), out)
    return F.linear(x, weight)


def kernel(x: Tensor, weight: Tensor) -> str:
    """Which one makes x W^T: compiled, oneDNN or BLAS."""
    # A step of a stream has few rows, and must not pay for questions whose answer is known.
    if ordinary(x) and x.numel() >= FEWEST_ELEMENTS and plain(x, weight) and x.shape[1] == weight.shape[1]:
        if compiled_suits(x, x.shape[1], len(weight)):
            return "compiled"
        if _onednn_suits(x, weight):
            return "oneDNN"
    return "BLAS"


def narrow_gradient(x: Tensor, gradient: Tensor, total: Tensor | None = None) -> Tensor:
    """The gradient of W, G^T x, from that of the product; added to `total`, in place, if that is given."""
    if both_compiled(x, gradient, gradient.shape[1]) and len(x) == len(gradient):
        return compiled.column_sums(x, gradient, total)
    return multiply(gradient.t(), x) if total is None else add_product(total, gradient.t(), x)


def onednn_faster(elements: int, depth: int, columns: int) -> bool:
    """Whether oneDNN is the faster for x of so many elements and sums of so many; not where nobody has measured."""
    if LANES not in MOST_COLUMNS or not 1 < columns <= COLUMNS:
        return False
    if LANES == 16:
        return depth >= 128 and elements >= ELEMENTS
    if columns <= LANES:
        # Half a register is worth it for short sums only: long ones BLAS makes as dot products, at full speed.
        return (columns > LANES // 2 or depth <= 64) and depth >= 8 and elements >= ELEMENTS // 4
    return depth >= 8 and elements >= ELEMENTS


def compiled_faster(elements: int, depth: int, columns: int) -> bool:
    """The same for the compiled kernels."""
    alone = depth % ROW_CONFLICT != 0 or depth <= CONFLICT_DEPTH or columns <= FEWEST_COLUMNS
    return depth < COMPILED_DEPTH and alone and compiled_faster_for_bytes(elements, depth, columns)


def compiled_faster_for_bytes(elements: int, depth: int, columns: int) -> bool:
    """The same for bytes, which the other kernels cannot read: how long rows are does not matter."""
    enough = ENOUGH if columns > COMPILED_COLUMNS // 2 else ENOUGH // 4
    if depth < SHORT:
        enough = max(enough, SHORT_ELEMENTS)
    most = DEEP_COLUMNS.get(LANES, COMPILED_COLUMNS) if depth >= DEEP else COMPILED_COLUMNS
    return LANES != 4 and 1 < columns <= most and depth >= 8 and elements >= enough


def _onednn_suits(x: Tensor, weight: Tensor) -> bool:
    return (
        _kernel is not None
        and (x.shape[1] >= LONG or not instead_of_blas())
        and x.dtype == torch.float32
        and onednn_faster(x.numel(), *reversed(weight.shape))
        and bool(torch.backends.mkldnn.enabled)
    )


def compiled_suits(x: Tensor, depth: int, columns: int) -> bool:
    """Whether the compiled kernels are the faster for x in rows of this depth."""
    faster = {torch.float32: compiled_faster, torch.uint8: compiled_faster_for_bytes}.get(x.dtype)
    return compiled.library is not None and faster is not None and faster(x.numel(), depth, columns)


def both_compiled(x: Tensor, small: Tensor, columns: int) -> bool:
    """Whether the compiled kernels take both x W^T and G^T x; `small` is W or G. The second wants rows that are neither
    short nor too long, and not too many columns."""
    fits = columns <= GRADIENT_COLUMNS and compiled.LEAST_DEPTH <= x.shape[1] < COMPILED_DEPTH
    enough = GRADIENT_ELEMENTS if columns > COMPILED_COLUMNS // 2 else GRADIENT_ELEMENTS // 4
    return fits and x.numel() >= enough and plain(x, small) and compiled_suits(x, x.shape[1], columns)


def spread_compiled(x: Tensor, gradient: Tensor, total: Tensor | None) -> bool:
    """Whether the compiled kernel takes x (batch, places, depth) and G (batch, lines, depth) for the sum of G x^T."""
    if not ordinary(x) or compiled.library is None or LANES == 4 or x.numel() < SPREAD_ELEMENTS:
        return False
    fits = x.shape[2] >= compiled.LEAST_DEPTH and x.shape[1] * gradient.shape[1] <= SPREAD_RESULTS
    return fits and plain(x, gradient) and numbers(x) and (total is None or (numbers(total) and total.is_contiguous()))
