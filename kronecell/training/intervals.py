"""How far an accuracy can be off: 95% intervals over the clips it was measured on, and over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

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


def student(degrees: float) -> float:
    """Student's t of a 95% interval; for broken degrees of freedom between those of its neighbours.

    >>> student(3), round(student(3.5), 2), round(student(200), 3)
    (3.182, 2.95, 1.972)
    """
    if degrees >= len(STUDENT):
        return CERTAINTY + 2.4 / degrees
    low = max(1, int(degrees))
    share = (1 / low - 1 / max(1.0, degrees)) / (1 / low - 1 / (low + 1))
    return STUDENT[low - 1] + share * (STUDENT[low] - STUDENT[low - 1])


def mean_margin(values: Sequence[float]) -> float:
    """Half of the 95% interval of the mean of some values (Student's t); infinite for one value.

    >>> round(mean_margin([0.5, 0.6, 0.7]), 3)
    0.248
    """
    if len(values) < 2:
        return math.inf
    return student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def margin(parts: Sequence[tuple[float, float]]) -> float:
    """Half of the 95% interval of a mean whose variance has several parts: (variance, its degrees of freedom).

    Welch and Satterthwaite: few seeds make the interval wide only as far as seeds matter beside clips.

    >>> round(margin([(0.0009, 259), (0.0003, 1)]), 3) == round(student(16) * 0.0012**0.5, 3)
    True
    """
    total = sum(variance for variance, _ in parts)
    if total <= 0:
        return 0.0
    degrees = total**2 / sum(variance**2 / known for variance, known in parts)
    return student(degrees) * math.sqrt(total)


Variance = tuple[float, float]  # and its degrees of freedom


def seed_variance(tables: Iterable[Sequence[Sequence[float]]]) -> Variance | None:
    """How much the mean of one seed varies by chance of training, pooled over networks; None without two seeds.

    A table has a row for each clip and a column for each seed. Two or three seeds of one network say nearly nothing of
    their variance; those of all networks of a study, taken as equally variable, say enough.
    """
    found = []
    for table in tables:
        if len(table) > 1 and len(table[0]) > 1:
            _, seeds, rest = mean_squares(table)
            found.append(((seeds - rest) / len(table), len(table[0]) - 1.0))
    degrees = sum(known for _, known in found)
    return (max(0.0, sum(value * known for value, known in found) / degrees), degrees) if found else None


def crossed_margin(answers: Sequence[Sequence[float]], noise: Variance | None = None) -> float:
    """Half of the 95% interval of the mean of a table with a row for each clip and a column for each seed.

    Clips and seeds are both drawn at random: the variance of the mean is that of clips over their number and that of
    seeds over theirs (two-way analysis of variance). The entries are answers (0 or 1) or differences of the answers of
    two networks. `noise` is the variance of one seed as known from more networks, see `seed_variance`; without it the
    table's own is taken, which for two seeds makes a very wide interval, and for one seed there is none.
    """
    rows, columns = len(answers), len(answers[0])
    if rows < 2:
        return math.inf
    clips, seeds, rest = mean_squares(answers)
    parts = [(max(clips, rest) / (rows * columns), rows - 1.0)]
    if noise is not None:
        parts.append((noise[0] / columns, noise[1]))
    elif seeds > rest:
        parts.append(((seeds - rest) / (rows * columns), (columns - 1) * ((seeds - rest) / seeds) ** 2))
    return margin([part for part in parts if part[0] > 0])


def mean_squares(answers: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Of clips (rows), of seeds (columns), and of what is left; the last two are 0 for one seed."""
    rows, columns = len(answers), len(answers[0])
    by_clip = [statistics.fmean(row) for row in answers]
    clips = columns * statistics.variance(by_clip)
    if columns == 1:
        return clips, 0.0, 0.0
    by_seed = [statistics.fmean(column) for column in zip(*answers, strict=True)]
    middle = statistics.fmean(by_clip)
    rest = sum(
        (value - clip - seed + middle) ** 2
        for row, clip in zip(answers, by_clip, strict=True)
        for value, seed in zip(row, by_seed, strict=True)
    ) / ((rows - 1) * (columns - 1))
    return clips, rows * statistics.variance(by_seed), rest


def interval(scores: Mapping[tuple[int, int], tuple[float, int]]) -> tuple[float, float] | None:
    """The 95% interval of the mean accuracy of some runs: {(fold, seed): (accuracy, clips)}; None without clips.

    Folds test different clips, so their clips add up; seeds test the same clips again, which makes the accuracy of
    training steadier, and the set of clips no larger. Both variances add up, see `margin`; as the answers for single
    clips are not known here, that of seeds counts a part of the clips' twice, and the interval is a little too wide.

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
    if len(whole) > 1 and statistics.variance(whole) > 0:
        extra = (statistics.variance(whole) / len(whole), len(whole) - 1.0)
        low, high = (
            mean + side * margin([((mean - end) ** 2 / CERTAINTY**2, total), extra])
            for side, end in ((-1, low), (1, high))
        )
    return max(0.0, low), min(1.0, high)
