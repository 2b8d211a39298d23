"""Intervals of accuracies: against simulation, and against what clips and seeds can and cannot add."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kronecell.training.intervals import crossed_margin, interval, margin, mean_margin, seed_variance, student, wilson


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


@pytest.mark.parametrize(("clips", "seeds", "clip", "seed"), [(100, 2, 1.0, 0.3), (100, 5, 1.0, 0.3), (60, 3, 1.0, 0.0),
                                                              (60, 5, 0.0, 0.6), (200, 3, 2.0, 0.8)])  # fmt: skip
def test_the_mean_over_clips_and_seeds_is_inside_in_95_of_100_cases(
    clips: int, seeds: int, clip: float, seed: float
) -> None:
    """Answers of networks whose clips are harder or easier, and whose seeds are better or worse."""
    draw, inside, wide = np.random.default_rng(0), [], []
    truth = np.mean(1 / (1 + np.exp(-draw.normal(0, np.hypot(clip, seed), 200000))))
    for _ in range(500):
        chance = 1 / (1 + np.exp(-(draw.normal(0, clip, (clips, 1)) + draw.normal(0, seed, (1, seeds)))))
        answers = (draw.random((clips, seeds)) < chance).astype(float)
        half = crossed_margin(answers.tolist())
        inside.append(abs(answers.mean() - truth) <= half)
        wide.append(half)
    assert 0.90 <= np.mean(inside) <= 0.99  # least where few seeds matter most: 91 of 100
    assert np.median(wide) < 0.25


def test_two_seeds_make_no_interval_of_a_mile() -> None:
    """Student's t of one degree of freedom, 12.7, counts only as far as seeds matter beside clips."""
    low, high = interval({(2, 0): (0.365, 260), (2, 1): (0.400, 260)}) or (0.0, 1.0)
    assert 0.12 < high - low < 0.20
    one = wilson(0.3825 * 260, 260)
    assert low < one[0] and high > one[1]


def test_one_seed_is_known_by_its_clips_alone() -> None:
    values = [0.0, 1.0, 1.0, -1.0, 0.0, 1.0]
    assert crossed_margin([[value] for value in values]) == pytest.approx(mean_margin(values))
    assert crossed_margin([[value, value, value] for value in values]) == pytest.approx(mean_margin(values))


def test_the_margin_of_one_variance_is_students() -> None:
    assert margin([(0.04, 3.0)]) == pytest.approx(0.2 * student(3))
    assert margin([]) == 0.0
    found = [student(degrees) for degrees in (1, 1.5, 2, 4.5, 9.9, 10, 11, 1000)]
    assert found == sorted(found, reverse=True)


def test_a_seed_variance_of_many_networks_makes_intervals_of_two_seeds_useful() -> None:
    """Twelve networks, two seeds each: intervals of differences hold, far narrower than by their own seeds."""
    draw, inside, pooled, alone = np.random.default_rng(1), [], [], []
    for _ in range(150):
        hard = draw.normal(0, 1.5, (120, 1))
        chance = [
            1 / (1 + np.exp(-(hard + draw.normal(0, 0.3, (120, 1)) + draw.normal(0, 0.2, (1, 2))))) for _ in range(12)
        ]
        tables = [(draw.random((120, 2)) < c).astype(float) for c in chance]
        known = seed_variance([table.tolist() for table in tables])
        assert known is not None and known[1] == 12
        for a, b in zip(tables[::2], tables[1::2], strict=True):
            gap = a - b
            pooled.append(crossed_margin(gap.tolist(), (2 * known[0], known[1])))
            alone.append(crossed_margin(gap.tolist()))
            inside.append(abs(gap.mean()) <= pooled[-1])
    assert 0.92 <= np.mean(inside) <= 0.98
    assert max(pooled) < 0.2 < np.quantile(alone, 0.9)
    assert seed_variance([[[1.0], [0.0]]]) is None
