"""The paper's data sets: modes, ranks, hidden size, classes and epochs of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """Shapes and epochs of one of the paper's data sets."""

    m: tuple[int, ...]
    n: tuple[int, ...]
    tr_n: tuple[int, ...]
    rank: int
    tr_rank: int
    hidden: int
    classes: int
    epochs: int


TR_M = (4, 2, 5, 8, 6, 5, 3, 2)  # TR has input modes of its own, the same for all data sets
# Some classes by which a data set is recognised, in small letters and without separators.
CLASSES: dict[str, tuple[str, ...]] = {
    "UCF11": ("basketball", "biking", "diving", "swing", "tennisswing"),
    "YCF": (),  # names of people, written in several ways
    "UCF50": ("baseballpitch", "basketball", "biking", "yoyo"),
}
# How many clips their releases have, and how many fewer can be read of a copy that is whole otherwise.
CLIPS = {"UCF11": (1560, 1600), "YCF": (1860, 1910), "UCF50": (6580, 6681)}
SETTINGS = {
    "UCF11": Setting((8, 20, 20, 18), (4, 4, 4, 4), (4, 4, 2, 4, 2), 4, 5, 256, 11, 400),
    "YCF": Setting((4, 20, 20, 36), (4, 4, 4, 4), (4, 4, 2, 4, 2), 4, 5, 256, 47, 400),
    "UCF50": Setting((15, 16, 16, 15), (8, 6, 6, 8), (4, 4, 6, 4, 6), 6, 6, 2304, 50, 200),
}
