"""The compiled kernels of native/: a tall x times a few columns and its gradient, products of matrices, and the rest.

They are built when the package is installed, if there is a C compiler; without them everything runs, more slowly.
KRONECELL_COMPILED=0 in the environment leaves them aside.
"""

from __future__ import annotations

import ctypes
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIBRARY = Path(__file__).resolve().parent.parent.joinpath(f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}")
WORTH_A_THREAD = 2**20  # multiply-adds

_address, _whole, _size = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
_PRODUCT = (_whole, _address, _whole, _address, _address, _size, _size, _size, _whole)
SIGNATURES: dict[str, tuple[Any, ...]] = {  # the result, then the arguments
    "few_columns": _PRODUCT,
    "column_sums": _PRODUCT,
    "few_columns_folded": (_whole, _address, _whole, *[_address] * 5, *[_size] * 7, _whole),
    "folded_gradients": (_whole, *[_address] * 5, *[_size] * 7),
    "spread_gradient": (_whole, *[_address] * 3, *[_size] * 4, _whole),
    "least_depth": (_whole,),
    "last_product": (None, _address, _size, _size, *[_address] * 3, *[_size] * 4, _whole),
    "last_gradients": (_whole, _address, _size, _size, *[_address] * 5, *[_size] * 4, _whole),
    "lstm_packed": (_size, _size, _whole),
    "lstm_pack": (None, _address, _address, _size, _whole),
    "lstm_forward": (None, *[_address] * 9, _whole, *[_size] * 3, _whole),
    "lstm_backward": (None, *[_address] * 8, _whole, *[_size] * 3, _whole),
    "products": (_whole, _address, _size, _address, _address, _address, _size, _address),
    "matrix_products": (
        _whole,
        *(_address, *[_size] * 3) * 2,
        _address,
        _size,
        _size,
        _whole,
        *[_size] * 4,
        _whole,
    ),
    "amd": (_whole,),
    "lstm_weight_gradient": (_whole, *[_address] * 4, *[_size] * 3, _whole),
}


def _load() -> Any:
    if os.environ.get("KRONECELL_COMPILED") == "0" or not LIBRARY.is_file():
        return None
    try:
        library = ctypes.CDLL(str(LIBRARY))  # which lets other threads of Python run during a call
        for name, (result, *arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):  # built for another system, or from another version of the source
        return None
    return library


library: Any = _load()
LEAST_DEPTH: int = library.least_depth() if library is not None else 0  # of column_sums


def few_columns(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x W^T for a contiguous x (rows, depth) of float32 or uint8 and W (columns, depth); bytes count as 0 to 255."""
    result = weight.new_empty(len(x), len(weight)) if out is None else out
    _run(library.few_columns, x, weight, result, len(weight))
    return result


def column_sums(x: Tensor, gradient: Tensor, total: Tensor | None = None) -> Tensor:
    """G^T x for such an x, LEAST_DEPTH or deeper, and G (rows, columns); added to `total`, in place, if given."""
    result = gradient.new_zeros(gradient.shape[1], x.shape[1]) if total is None else total
    _run(library.column_sums, x, gradient, result, gradient.shape[1])
    return result


Sizes = tuple[int, int, int, int, int]  # places, columns, shared, inner, others: see fold.py


def few_columns_folded(
    x: Tensor, weight: Tensor, factors: Tensor, y: Tensor | None, z: Tensor, v: Tensor | None, sizes: Sizes
) -> None:
    """x W^T, into `y` if that is given, folded up into `z`, and the factors times x, if `v` is; see native/folded.h."""
    places, columns, shared, inner, others = sizes
    _check(
        library.few_columns_folded(
            x.data_ptr(), x.dtype == torch.uint8, weight.data_ptr(), factors.data_ptr(),
            None if y is None else y.data_ptr(), z.data_ptr(), None if v is None else v.data_ptr(),
            len(x) // places, places, x.shape[1], columns, shared, inner, others, _threads(x, columns),
        )
    )  # fmt: skip


def folded_gradients(
    y: Tensor, v: Tensor, upstream: Tensor, of_weight: Tensor, of_factors: Tensor, sizes: Sizes
) -> None:
    """The gradients of W and of the factors, added to the last two, from that of z."""
    addresses = (part.data_ptr() for part in (y, v, upstream, of_weight, of_factors))
    rows, depth = len(y) // sizes[0], v.shape[-1]
    places, *others = sizes
    _check(library.folded_gradients(*addresses, rows, places, depth, *others))


def spread_gradient(x: Tensor, upstream: Tensor, total: Tensor) -> None:
    """The gradient of a matrix (lines, places) that multiplies every x[i] (places, depth), added to `total`."""
    (batch, places, depth), lines = x.shape, upstream.shape[1]
    threads = max(1, min(torch.get_num_threads(), lines, x.numel() * lines // WORTH_A_THREAD))
    addresses = (part.data_ptr() for part in (x, upstream, total))
    _check(library.spread_gradient(*addresses, batch, places, depth, lines, threads))


def _run(kernel: Callable[..., int], x: Tensor, small: Tensor, result: Tensor, columns: int) -> None:
    rows, depth = x.shape
    addresses = (x.data_ptr(), x.dtype == torch.uint8, small.data_ptr(), result.data_ptr())
    _check(kernel(*addresses, rows, depth, columns, _threads(x, columns)))


def _threads(x: Tensor, columns: int) -> int:
    return max(1, min(torch.get_num_threads(), x.numel() * columns // WORTH_A_THREAD))


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("a kernel for few columns found no memory for its buffers")
