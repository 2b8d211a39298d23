"""Intervals of accuracies: against simulation, and against what clips and seeds can and cannot add."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kronecell.training.intervals import interval, mean_margin, wilson


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(77, 88, 0.7899, 0.9287), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (0, 0, 0, 1)],
)
def test_the_interval_of_one_run_is_wilsons(right: int, count: int, low: float, high: float) -> None:
    assert wilson(right, count) == pytest.approx((low, high), abs=1e-4)
    if count:
        assert interval({(0, 0): (right / count, count)}) == pytest.approx((low, high), abs=1e-4)


def test_folds_add_clips_and_seeds_do_not() -> None:
    folds = interval({(fold, 0): (0.7, 50) for fold in range(4)})
    assert folds == pytest.approx(wilson(140, 200))
    seeds = interval({(0, seed): (0.7, 50) for seed in range(4)})
    assert seeds == pytest.approx(wilson(35, 50))  # equal seeds: nothing to add, and no more clips either
    uneven = interval({(0, seed): (0.7 + 0.1 * (-1) ** seed, 50) for seed in range(4)})
    assert seeds is not None and uneven is not None and uneven[0] < seeds[0] and uneven[1] > seeds[1]


def test_a_seed_without_all_folds_does_not_count_as_spread_of_seeds() -> None:
    runs = {(0, 0): (0.9, 50), (1, 0): (0.5, 50), (0, 1): (0.9, 50)}
    low, high = interval(runs) or (0.0, 1.0)
    mean = 2.3 / 3
    assert (low, high) == pytest.approx(wilson(mean * 100, 100))


def test_without_clips_there_is_no_interval() -> None:
    assert interval({(0, 0): (0.7, 0)}) is None and interval({}) is None
    assert mean_margin([0.5]) == math.inf


@pytest.mark.parametrize("count", [2, 5, 30])
def test_the_mean_of_draws_is_inside_in_95_of_100_cases(count: int) -> None:
    draws = np.random.default_rng(0).normal(0.3, 0.1, (4000, count))
    inside = np.mean([abs(row.mean() - 0.3) <= mean_margin(row.tolist()) for row in draws])
    assert inside == pytest.approx(0.95, abs=0.015)
