"""The compiled kernels of native/few_columns.c: a tall x times a few columns, and its gradient.

They are built when the package is installed, if there is a C compiler; without them everything runs, more slowly.
KRONECELL_COMPILED=0 in the environment leaves them aside.
"""

from __future__ import annotations

import ctypes
import os
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIBRARY = Path(__file__).with_name(f"_few_columns{sysconfig.get_config_var('EXT_SUFFIX')}")
WORTH_THREADS = 2**24  # multiply-adds; to start a thread costs about as much as a million


def _load() -> Any:
    if os.environ.get("KRONECELL_COMPILED") == "0" or not LIBRARY.is_file():
        return None
    library = ctypes.CDLL(str(LIBRARY))  # which lets other threads of Python run during a call
    address, whole, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
    for function in (library.few_columns, library.column_sums):
        function.argtypes = (address, whole, address, address, size, size, size)
        function.restype = whole
    return library


library: Any = _load()
LEAST_DEPTH: int = library.least_depth() if library is not None else 0  # of column_sums


def few_columns(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x W^T for a contiguous x (rows, depth) of float32 or uint8 and W (columns, depth); bytes count as 0 to 255."""
    rows, depth = x.shape
    columns = len(weight)
    result = torch.empty(rows, columns) if out is None else out

    def part(start: int, stop: int) -> None:
        place, to = x.data_ptr() + start * depth * x.itemsize, result.data_ptr() + start * columns * 4
        _check(library.few_columns(place, x.itemsize == 1, weight.data_ptr(), to, stop - start, depth, columns))

    _in_parts(part, rows, x.numel() * columns)
    return result


def column_sums(x: Tensor, gradient: Tensor, total: Tensor | None = None) -> Tensor:
    """G^T x for such an x, LEAST_DEPTH or deeper, and G (rows, columns); added to `total`, in place, if given."""
    rows, depth = x.shape
    columns = gradient.shape[1]
    result = torch.zeros(columns, depth) if total is None else total
    others: dict[int, Tensor] = {}

    def part(start: int, stop: int) -> None:
        to = result
        if start:  # every thread has sums of its own
            to = others[start] = torch.zeros(columns, depth)
        place, weights = x.data_ptr() + start * depth * x.itemsize, gradient.data_ptr() + start * columns * 4
        _check(library.column_sums(place, x.itemsize == 1, weights, to.data_ptr(), stop - start, depth, columns))

    _in_parts(part, rows, x.numel() * columns)
    for start in sorted(others):
        result += others[start]
    return result


def _in_parts(part: Callable[[int, int], None], rows: int, macs: int) -> None:
    """The rows, divided among as many threads as torch uses."""
    parts = min(torch.get_num_threads(), macs // WORTH_THREADS, rows)
    if parts < 2:
        part(0, rows)
        return
    step = -(-rows // parts)
    with ThreadPoolExecutor(parts - 1) as pool:  # made anew: a pool that is kept does not survive fork()
        waiting = [pool.submit(part, start, min(rows, start + step)) for start in range(step, rows, step)]
        part(0, step)
        for future in waiting:
            future.result()


def _check(code: int) -> None:
    if code:
        raise MemoryError("a kernel for few columns found no memory for its buffers")
