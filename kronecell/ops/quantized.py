"""Products with weights that are stored as integers: kronecell::quantized_linear, quantized_lstm and quantized_gru.

    weight[i, k] = scales[i, k // group] * integer[i, k]        (group 0: one scale for a whole row)

Only weights are integers: they are converted in registers, and everything is computed in the dtype of the scales.

Integers of 8 bits are an int8 matrix (rows, columns). Fewer bits are packed into bytes (rows, bytes), in blocks of 32
columns; the last block of a row is filled up to a multiple of 8. A block of m columns is planes of 4, 2 and 1 bits,
those whose sum is `bits`, the low bits first. A plane of p bits is m p / 8 bytes; byte j holds columns j, j + m p / 8,
j + 2 m p / 8, ..., the first one in its low bits. Columns that a kernel reads into one register thus lie together.

The compiled kernels are in csrc/quantized.cpp and beside the recurrences of floats. There is one gradient, that of the
reference; weights as integers have none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kronecell.errors import ShapeError
from kronecell.ops.recurrence import gru_reference, lstm_reference
from kronecell.ops.recurrence_steps import Optional
from kronecell.ops.registration import operator

BITS = (3, 4, 5, 6, 7, 8)
BLOCK = 32  # columns whose planes lie together


# Storage ----------------------------------------------------------------------------------------------------------


def row_bytes(columns: int, bits: int) -> int:
    """Bytes of a row of integers."""
    return columns if bits == 8 else -(-columns // 8) * bits


def planes(bits: int) -> list[int]:
    """The sizes of the planes of a block, low bits first."""
    return [bits] if bits == 8 else [size for size in (4, 2, 1) if bits & size]


def pack(integers: Tensor, bits: int) -> Tensor:
    """int8 numbers (rows, columns) from -2^(bits - 1) to 2^(bits - 1) - 1 as they are stored."""
    if bits == 8:
        return integers.contiguous()
    rows, columns = integers.shape
    numbers = F.pad(integers.to(torch.int32) & (2**bits - 1), (0, -columns % 8))
    parts: list[Tensor] = []
    for block in numbers.split(BLOCK, 1):
        low = 0
        for size in planes(bits):
            plane = (block >> low) & (2**size - 1)
            shifts = torch.arange(0, 8, size, dtype=torch.int32, device=integers.device)
            parts.append((plane.reshape(rows, 8 // size, block.shape[1] * size // 8) << shifts[:, None]).sum(1))
            low += size
    if not parts:
        return integers.new_empty(rows, 0, dtype=torch.uint8)
    return torch.cat(parts, 1).to(torch.uint8)


def unpack(stored: Tensor, bits: int, columns: int) -> Tensor:
    """The int8 numbers (rows, columns) that were packed."""
    if bits == 8:
        return stored
    rows, padded = stored.shape[0], -(-columns // 8) * 8
    whole = padded // BLOCK * BLOCK
    at = whole * bits // 8
    parts = [_unpacked(stored[:, :at].reshape(-1, BLOCK * bits // 8), bits, BLOCK).reshape(rows, whole)]
    if whole < padded:
        parts.append(_unpacked(stored[:, at:], bits, padded - whole))
    return torch.cat(parts, 1)[:, :columns]


def _unpacked(stored: Tensor, bits: int, block: int) -> Tensor:
    """Blocks (blocks, bytes) as numbers (blocks, block)."""
    numbers = torch.zeros(len(stored), block, dtype=torch.int32, device=stored.device)
    low, at = 0, 0
    for size in planes(bits):
        wide = block * size // 8
        shifts = torch.arange(0, 8, size, dtype=torch.int32, device=stored.device)
        plane = (stored[:, None, at : at + wide].to(torch.int32) >> shifts[:, None]) & (2**size - 1)
        numbers = numbers | (plane.reshape(len(stored), block) << low)
        low, at = low + size, at + wide
    half = 2 ** (bits - 1)
    return ((numbers ^ half) - half).to(torch.int8)  # two's complement


def dequantized(stored: Tensor, scales: Tensor, bits: int, group: int, columns: int) -> Tensor:
    """The weights (rows, columns) in the dtype of the scales."""
    integers = unpack(stored, bits, columns).to(scales.dtype)
    return integers * (scales if group == 0 else scales.repeat_interleave(min(group, columns), 1)[:, :columns])


def check_storage(stored: Tensor, scales: Tensor, bits: int, group: int, columns: int) -> None:
    """Refuse integers or scales of another shape or dtype than a matrix with so many columns has."""
    if bits not in BITS:
        raise ShapeError(f"bits must be one of {', '.join(map(str, BITS))}, got {bits}")
    if group < 0:
        raise ShapeError(f"group must be 0 (one scale a row) or a number of columns, got {group}")
    dtype, shape = torch.int8 if bits == 8 else torch.uint8, (scales.shape[0], row_bytes(columns, bits))
    if stored.dtype != dtype or tuple(stored.shape) != shape:
        raise ShapeError(
            f"integers of {bits} bits for {columns} columns must be {dtype} of shape {shape}, "
            f"got {stored.dtype} of shape {tuple(stored.shape)}"
        )
    groups = 1 if group == 0 else -(-columns // group)
    if scales.ndim != 2 or scales.shape[1] != groups:
        raise ShapeError(f"scales must have shape ({shape[0]}, {groups}), got {tuple(scales.shape)}")


# References -------------------------------------------------------------------------------------------------------


def _linear_reference(x: Tensor, weight: Tensor, scales: Tensor, bias: Optional, bits: int, group: int) -> Tensor:
    """x (..., columns) times the transposed weight (rows, columns), plus bias."""
    check_storage(weight, scales, bits, group, x.shape[-1])
    return F.linear(x, dequantized(weight, scales, bits, group, x.shape[-1]), bias)


def _linear_fake(x: Tensor, weight: Tensor, scales: Tensor, bias: Optional, bits: int, group: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], scales.shape[0]))


def _lstm_reference(
    gates: Tensor,
    weight: Tensor,
    scales: Tensor,
    bits: int,
    group: int,
    h: Tensor,
    c: Tensor,
    project: Optional,
    batch_sizes: Optional,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """output, last h, last c of kronecell::lstm without what a gradient needs."""
    check_storage(weight, scales, bits, group, h.shape[1])
    U = dequantized(weight, scales, bits, group, h.shape[1])
    output, h, c, _, _ = lstm_reference(gates, [U], h, c, project, batch_sizes, reverse, False)
    return output, h, c


def _lstm_fake(
    gates: Tensor,
    weight: Tensor,
    scales: Tensor,
    bits: int,
    group: int,
    h: Tensor,
    c: Tensor,
    project: Optional,
    batch_sizes: Optional,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return gates.new_empty((*gates.shape[:-1], h.shape[1])), gates.new_empty(h.shape), gates.new_empty(c.shape)


def _gru_reference(
    gates: Tensor,
    weight: Tensor,
    scales: Tensor,
    bits: int,
    group: int,
    bias_n: Optional,
    h: Tensor,
    batch_sizes: Optional,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """output and last h of kronecell::gru without what a gradient needs."""
    check_storage(weight, scales, bits, group, h.shape[1])
    U = dequantized(weight, scales, bits, group, h.shape[1])
    output, h, _ = gru_reference(gates, [U], bias_n, h, batch_sizes, reverse, False)
    return output, h


def _gru_fake(
    gates: Tensor,
    weight: Tensor,
    scales: Tensor,
    bits: int,
    group: int,
    bias_n: Optional,
    h: Tensor,
    batch_sizes: Optional,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    return gates.new_empty((*gates.shape[:-1], h.shape[1])), gates.new_empty(h.shape)


# The operators ----------------------------------------------------------------------------------------------------

quantized_linear = operator(
    "quantized_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int bits, int group) -> Tensor",
    _linear_reference,
    _linear_fake,
)
quantized_lstm = operator(
    "quantized_lstm(Tensor gates, Tensor weight, Tensor scales, int bits, int group, Tensor h, Tensor c, "
    "Tensor? project, Tensor? batch_sizes, bool reverse) -> (Tensor, Tensor, Tensor)",
    _lstm_reference,
    _lstm_fake,
)
quantized_gru = operator(
    "quantized_gru(Tensor gates, Tensor weight, Tensor scales, int bits, int group, Tensor? bias_n, Tensor h, "
    "Tensor? batch_sizes, bool reverse) -> (Tensor, Tensor)",
    _gru_reference,
    _gru_fake,
)
