"""A matrix made by a format is found again by the same format and ranks."""

from __future__ import annotations

import pytest
import torch

import kronecell as kc
from tests.formats.fitting_cases import COMPRESSED, M3, M4, N3, N4

QUICK = [
    kc.KCP((8, 10), (6, 6), K=3, CA=2, CB=2),
    kc.KCP(M3, N3, K=3, CA=2, CB=2),
    kc.KCP(M3, N3, K=3, CA=2, CB=2, tie="all"),
    kc.HT(M4, N4, r=3),
    kc.HT((2, 3, 2, 2, 3), (2, 2, 3, 2, 2), r=2),
    kc.TR(M4, N4, r=2),
    kc.BT(M4, N4, r=2, P=2),
    kc.CP(M3, N3, r=6),
    kc.TT(M4, N4, r=3),
    kc.Tucker(M4, N4, r=3),
]
SLOW = [
    kc.KCP(M4, N4, K=2, CA=2, CB=2),
    kc.KCP(M4, N4, K=3, CA=2, CB=2),
    kc.KCP(M4, N4, K=2, CA=2, CB=2, tie="all"),
    kc.TR(M3, N3, r=3),
    kc.BT(M3, N3, r=3, P=2),
    kc.CP(M4, N4, r=5),
]
CASES = [*QUICK, *(pytest.param(fmt, marks=pytest.mark.slow) for fmt in SLOW)]


def made_by(fmt: kc.Format, seed: int) -> torch.Tensor:
    return fmt.to_dense(fmt.init(torch.Generator().manual_seed(seed), dtype=torch.float64))


@pytest.mark.parametrize("fmt", CASES, ids=str)
def test_nine_of_ten_matrices_made_by_a_format_are_recovered(fmt: kc.Format) -> None:
    errors = [fmt.from_dense(made_by(fmt, seed))[1] for seed in range(10)]
    assert sum(error < 1e-6 for error in errors) >= 9, errors


def test_random_starts_are_not_the_factors_a_user_drew_with_the_same_seed() -> None:
    fmt = COMPRESSED[5]
    W = made_by(fmt, 0)
    assert fmt.from_dense(W, seed=0, sweeps=0, starts=1)[1] > 1e-3
