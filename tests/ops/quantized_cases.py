"""Integers with scales, drawn for the operators that multiply by them; the numbers themselves are the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kronecell.ops.quantized import BITS, pack

# Rows and columns of a matrix: less than a register, tails of every kind, one block and several, more than a tile.
SIZES = [(1, 1), (3, 7), (8, 8), (8, 32), (9, 33), (7, 63), (16, 64), (33, 70), (40, 129), (5, 300), (67, 516)]
GROUPS = (0, 1, 7, 16, 32, 48, 10**6, 2**62)


@dataclass(frozen=True)
class Case:
    """A matrix of integers."""

    rows: int
    columns: int
    bits: int
    group: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}-{self.bits}bits-{self.group}"


@dataclass(frozen=True)
class Matrix:
    """What the operators take of it, and its weights in float64."""

    stored: Tensor
    scales: Tensor
    weights: Tensor


def draw(case: Case, seed: int = 0, scale: float = 1.0) -> Matrix:
    """Every integer of the range is drawn; scales of either sign."""
    generator = torch.Generator().manual_seed(seed)
    half = 2 ** (case.bits - 1)
    integers = torch.randint(-half, half, (case.rows, case.columns), generator=generator).to(torch.int8)
    groups = -(-case.columns // case.group) if case.group else 1
    scales = scale * torch.randn(case.rows, groups, generator=generator)
    wide = min(case.group, case.columns) or case.columns
    spread = scales.double().repeat_interleave(wide, 1)[:, : case.columns]
    return Matrix(pack(integers, case.bits), scales, integers.double() * spread)


def cases() -> list[Case]:
    """Every number of bits with every size; groups in turn, so that each of them meets each number of bits."""
    found = []
    for bits in BITS:
        for place, (rows, columns) in enumerate(SIZES):
            for group in {0, GROUPS[(place + bits) % len(GROUPS)], GROUPS[(place + bits + 3) % len(GROUPS)]}:
                found.append(Case(rows, columns, bits, group))
    return found
