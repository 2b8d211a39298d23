"""Weights rounded to integers: the scale of every row, or of every group of a row, is that of the least squared error.

A scale s stands for the weights s * q with q from -2^(bits - 1) to 2^(bits - 1) - 1. It may be negative: the largest
weight gets the side with one more level. Rounding cuts weights off where that makes the others more exact.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kronecell.errors import ShapeError

# Scales that are tried, times the one that cuts nothing off: first, last, how many.
CLIPS = {
    3: (0.4, 1.34, 24),
    4: (0.5, 1.15, 20),
    5: (0.55, 1.07, 16),
    6: (0.6, 1.04, 14),
    7: (0.7, 1.02, 12),
    8: (0.8, 1.01, 10),
}
GROUPS = (128, 64, 32, 16)  # what "chosen by error" tries beside one scale a row
CHUNK = 1 << 18  # weights that are searched together: they stay in cache
FEW = 0.9  # a line with fewer distinct weights than this share may have a scale that is exact for all of them


@torch.no_grad()
def rounded(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """int8 integers (rows, columns) and scales (rows, groups) of a matrix; group 0 is one scale for a whole row."""
    rows, columns = weight.shape
    wide = min(group, columns) or columns
    padded = F.pad(weight, (0, -columns % wide)) if wide else weight
    lines = padded.reshape(-1, wide) if wide else padded
    each = max(1, CHUNK // max(wide, 1))
    if not lines.numel():
        groups = -(-columns // group) if group else 1
        return weight.new_zeros(rows, columns, dtype=torch.int8), weight.new_ones(rows, groups)
    # Powers of two take the sizes away: squares of small weights would be zero.
    powers = torch.exp2(lines.abs().amax(1, keepdim=True).frexp().exponent.clamp(-100, 100).to(lines.dtype))
    parts = [_rounded_lines(part, bits) for part in (lines / powers).split(each)]
    integers = torch.cat([part[0] for part in parts]).reshape(rows, -1)[:, :columns].contiguous()
    return integers, (torch.cat([part[1] for part in parts]) * powers[:, 0]).reshape(rows, -1)


def _rounded_lines(w: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """One scale for each line of w."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    smallest, largest = w.amin(1), w.amax(1)
    top = torch.where(largest > -smallest, largest, smallest)  # the largest in size, with its sign
    best = torch.full_like(top, torch.inf), torch.ones_like(top)
    first, last, count = CLIPS[bits]
    clips = [clip / low for clip in torch.linspace(first, last, count).tolist()]
    for factor in (*clips, 1 / low, -1 / high):
        best = _better(best, w, top * factor, bits)
    for _ in range(2):  # the best scale for the integers that this scale gives
        q = integers_of(w, best[1], bits)
        norm = q.square().sum(1)
        best = _better(best, w, torch.where(norm > 0, (w * q).sum(1) / norm.clamp(min=1), best[1]), bits)
    few = _has_few_levels(w, 2**bits)
    if bool(few.any()):
        some, top = w[few], top[few]
        found = best[0][few], best[1][few]
        for level in (*range(low, 0), *range(1, high + 1)):
            found = _better(found, some, top / level, bits)
        best[1][few] = found[1]
    return integers_of(w, best[1], bits).to(torch.int8), best[1]


def integers_of(w: Tensor, scales: Tensor, bits: int) -> Tensor:
    """As floats."""
    return (w / scales[:, None]).round_().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _better(best: tuple[Tensor, Tensor], w: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The squared error and scale of every line, with those of these scales where they are better."""
    scales = torch.where(scales.abs() < torch.finfo(w.dtype).tiny, torch.ones_like(scales), scales)
    error = integers_of(w, scales, bits).mul_(scales[:, None]).sub_(w).square_().sum(1)
    better = error < best[0]
    return torch.where(better, error, best[0]), torch.where(better, scales, best[1])


def _has_few_levels(w: Tensor, most: int) -> Tensor:
    """Which lines may have weights that are whole multiples of one number."""
    ordered = w.sort(1).values
    distinct = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(1)
    return (distinct <= most) & (distinct <= max(2, int(FEW * w.shape[1])))


def squared_error(weight: Tensor, integers: Tensor, scales: Tensor, group: int) -> float:
    """Of all weights."""
    spread = scales if group == 0 else scales.repeat_interleave(group, 1)[:, : weight.shape[1]]
    return float((integers.to(weight.dtype) * spread - weight).double().square().sum())


def chosen_group(weight: Tensor, bits: int) -> int:
    """The group of least error for its size: scales that cost one more bit a weight must halve the error."""
    columns = weight.shape[1]
    found: list[tuple[float, int]] = []
    for group in (0, *(group for group in GROUPS if 2 * group <= columns)):
        integers, scales = rounded(weight, bits, group)
        cost = 8 * weight.element_size() * scales.numel() / max(weight.numel(), 1)
        found.append((squared_error(weight, integers, scales, group) ** 0.5 * 2**cost, group))
    return min(found)[1]  # of equal ones, the row


def check_finite(weight: Tensor, name: str) -> None:
    """Integers stand for finite weights only."""
    if not torch.isfinite(weight).all():
        raise ShapeError(f"{name} has weights that are not finite: they cannot be rounded to integers")
