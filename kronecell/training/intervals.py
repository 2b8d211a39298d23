"""How far an accuracy can be off: 95% intervals over the clips it was measured on, and over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

CERTAINTY = 1.959964  # standard deviations of a 95% interval
# Student's t for 95%, by degrees of freedom: a deviation that was itself estimated from few runs is uncertain.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def wilson(right: float, count: int) -> tuple[float, float]:
    """The 95% interval of a proportion (Wilson's score interval), for independent clips.

    >>> low, high = wilson(77, 88)
    >>> round(low, 3), round(high, 3)
    (0.79, 0.929)
    """
    if count == 0:
        return 0.0, 1.0
    z, p = CERTAINTY, right / count
    middle, spread = p + z * z / (2 * count), z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    whole = 1 + z * z / count
    # At 0 and 1 rounding would leave the interval a hair away from the proportion itself.
    low, high = (middle - spread) / whole, (middle + spread) / whole
    return 0.0 if right == 0 else low, 1.0 if right == count else high


def mean_margin(values: Sequence[float]) -> float:
    """Half of the 95% interval of the mean of some values (Student's t); infinite for one value.

    >>> round(mean_margin([0.5, 0.6, 0.7]), 3)
    0.248
    """
    if len(values) < 2:
        return math.inf
    degrees = len(values) - 1
    t = STUDENT[degrees - 1] if degrees <= len(STUDENT) else CERTAINTY + 2.4 / degrees
    return t * statistics.stdev(values) / math.sqrt(len(values))


def interval(scores: Mapping[tuple[int, int], tuple[float, int]]) -> tuple[float, float] | None:
    """The 95% interval of the mean accuracy of some runs: {(fold, seed): (accuracy, clips)}; None without clips.

    Folds test different clips, so their clips add up; seeds test the same clips again, which makes the accuracy of
    training steadier, and the set of clips no larger. Both uncertainties are added as squares.

    >>> interval({(0, 0): (0.8, 100)}) == wilson(80, 100)
    True
    """
    clips: dict[int, int] = {}
    seeds: dict[int, list[tuple[float, int]]] = {}
    for (fold, seed), (accuracy, count) in scores.items():
        clips[fold] = max(clips.get(fold, 0), count)
        seeds.setdefault(seed, []).append((accuracy, count))
    total = sum(clips.values())
    if total == 0:
        return None
    mean = statistics.fmean(accuracy for accuracy, _ in scores.values())
    low, high = wilson(mean * total, total)
    # Only seeds with the same folds differ by chance of training alone.
    whole = [statistics.fmean(a for a, _ in runs) for runs in seeds.values() if len(runs) == len(clips)]
    extra = mean_margin(whole) if len(whole) > 1 else 0.0
    return max(0.0, mean - math.hypot(mean - low, extra)), min(1.0, mean + math.hypot(high - mean, extra))
