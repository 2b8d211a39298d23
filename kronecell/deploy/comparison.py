"""Whether an exported file computes what its module does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDING = 4.0  # where float32 is too coarse for a tolerance: how many times the module's own error the file's may be


def distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Largest difference, relative to the largest value of each output; a NaN stays one."""
    distances = [(a - b).abs().max() / max(1.0, b.abs().max().item()) for a, b in zip(some, others, strict=True)]
    return float(torch.stack(distances).max())


def is_rounding(results: Sequence[Tensor], expected: Sequence[Tensor], exact: Sequence[Tensor]) -> bool:
    """Whether the file is about as near to the result in double precision as the module is.

    A layer with 57,600 inputs of rms 1 starts with gates of rms 9; there float32 itself is no better than 1e-5.
    """
    return distance(results, exact) <= ROUNDING * distance(expected, exact)
