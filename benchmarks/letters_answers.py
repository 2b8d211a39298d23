"""Accuracies and differences of benchmarks.letters with their 95% intervals, over clips and seeds; and as text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kronecell.training.intervals import Variance, crossed_margin, wilson

DENSE = "dense"
LEAST_RATIO = 300  # how much smaller W must be for a format to count as compressed in a verdict
Triple = list[float]


def by_seed(runs: Sequence[Mapping[str, Any]]) -> dict[int, dict[tuple[int, int], int]]:
    """{seed: {(fold, clip): 1 if answered correctly}}."""
    found: dict[int, dict[tuple[int, int], int]] = {}
    for run in runs:
        for clip, right in enumerate(run.get("right", "")):
            found.setdefault(run["seed"], {})[run["fold"], clip] = int(right)
    return found


def answers_of(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]] | None = None) -> list[list[int]]:
    """A row for each clip, a column for each seed: answers, or those of ours minus theirs where both have them."""
    a, b = by_seed(ours), None if theirs is None else by_seed(theirs)
    seeds = sorted(a if b is None else set(a) & set(b))
    if not seeds:
        return []
    clips = sorted(set.intersection(*(set(one[seed]) for one in (a, a if b is None else b) for seed in seeds)))
    return [[a[seed][clip] - (0 if b is None else b[seed][clip]) for seed in seeds] for clip in clips]


def noise_of(runs: Sequence[Mapping[str, Any]], noise: Variance | None) -> float:
    """The variance of a seed of a network; 0 for what has no chance in its training."""
    return 0.0 if noise is None or "learning_rate" not in runs[0]["settings"] else noise[0]


def accuracy_interval(runs: Sequence[Mapping[str, Any]], noise: Variance | None) -> list[float] | None:
    """Of the mean accuracy, over clips and seeds; Wilson's where training has no chance in it, or is not known."""
    answers = answers_of(runs)
    if not answers:
        return None
    middle, chance = statistics.fmean(map(statistics.fmean, answers)), noise_of(runs, noise)
    if len(answers[0]) == 1 and chance == 0:
        return [*wilson(middle * len(answers), len(answers))]
    margin = crossed_margin(answers, None if noise is None else (chance, noise[1]))
    return [max(0.0, middle - margin), min(1.0, middle + margin)]


def difference(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], noise: Variance | None
) -> Triple | None:
    """Ours minus theirs with its 95% interval, answer by answer: over the clips and seeds that both have."""
    gaps = answers_of(ours, theirs)
    if len(gaps) < 2:
        return None
    known = None if noise is None else (noise_of(ours, noise) + noise_of(theirs, noise), noise[1])
    middle, margin = statistics.fmean(map(statistics.fmean, gaps)), crossed_margin(gaps, known)
    return [middle, middle - margin, middle + margin]


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def span(pair: Sequence[float] | None) -> str:
    return "" if pair is None else f"{100 * pair[0]:.1f} to {100 * pair[1]:.1f}"


def gap(triple: Sequence[float] | None) -> str:
    return "" if triple is None else f"{100 * triple[0]:+.1f} ({100 * triple[1]:+.1f} to {100 * triple[2]:+.1f})"


def ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} ms"
