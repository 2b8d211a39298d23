"""Folds for cross validation: no group in two folds, every class spread evenly; or the paper's random folds, by name.

The order is drawn from a hash of the seed and the names, not from a random generator: it does not depend on the order
of the clips, on the platform, or on a library version.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from kronecell.data.datasets import Clip
from kronecell.errors import DataError

REPETITION = re.compile(r"_(\d+)(\.[^./]*)?$")
METHODS = ("group", "random", "talker", "repetition")


def make_folds(clips: Sequence[Clip], k: int = 5, seed: int = 0, method: str = "group") -> tuple[int, ...]:
    """The fold, 0 to k-1, of every clip.

    ``group`` keeps all clips of a group in one fold (the default: clips of one source video look alike, splitting them
    leaks the answer). ``random`` ignores groups, as the paper seems to do; its accuracies are not comparable.
    ``talker`` keeps groups of the same name together in all classes: nobody is in two folds. All three spread every
    class over the folds as evenly as the groups allow. ``repetition`` makes one fold of each number that names of
    clips end in (Anya_1, Anya_2, ...): k is their count, and the seed is not used.
    """
    if method not in METHODS:
        raise DataError(f"unknown fold method '{method}'; use {', '.join(METHODS)}")
    if k < 2:
        raise DataError(f"cannot make {k} folds; give k >= 2")
    if method == "repetition":
        return _repetitions(clips, k)
    members: dict[str, list[int]] = defaultdict(list)
    for position, clip in enumerate(clips):
        name = {"group": clip.group, "talker": clip.group.partition("/")[2]}.get(method, clip.name)
        members[name].append(position)
    if len(members) < k:
        kind = {"group": "groups", "talker": "talkers"}.get(method, "clips")
        raise DataError(f"cannot make {k} folds of {len(members)} {kind}; give more videos or a smaller k")
    folds = [0] * len(clips)
    per_class = [Counter[int]() for _ in range(k)]  # clips of each class in each fold
    total = [0] * k
    # Largest group first, each to the fold with the fewest clips of its classes: the small groups even the folds out.
    for name in sorted(members, key=lambda name: (-len(members[name]), _draw(seed, name))):
        classes = Counter(clips[position].class_index for position in members[name])

        def crowd(fold: int, classes: Counter[int] = classes, name: str = name) -> tuple[int, int, bytes]:
            same_class = sum(per_class[fold][label] * size for label, size in classes.items())
            return same_class, total[fold], _draw(seed, f"{fold}/{name}")

        fold = min(range(k), key=crowd)
        per_class[fold].update(classes)
        total[fold] += len(members[name])
        for position in members[name]:
            folds[position] = fold
    return tuple(folds)


def _repetitions(clips: Sequence[Clip], k: int) -> tuple[int, ...]:
    numbers = []
    for clip in clips:
        match = REPETITION.search(clip.name)
        if match is None:
            raise DataError(f"folds by repetition need names that end in one, such as Anya_1.avi; got {clip.name}")
        numbers.append(int(match[1]))
    found = sorted({*numbers})
    if len(found) != k:
        shown = ", ".join(map(str, found[:8]))
        raise DataError(f"cannot make {k} folds of the repetitions {shown}; give k = {len(found)}")
    return tuple(found.index(number) for number in numbers)


def folds_record(clips: Sequence[Clip], k: int, seed: int, method: str) -> dict[str, Any] | None:
    """Folds as a manifest keeps them; None if there are too few groups, which is no reason to refuse a data set."""
    if method not in METHODS or k < 2:
        make_folds(clips, k, seed, method)  # raises: that is a mistake of the caller, not a small data set
    try:
        return {"k": k, "seed": seed, "method": method, "fold": list(make_folds(clips, k, seed, method))}
    except DataError:
        return None


def _draw(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}:{name}".encode("utf-8", "surrogateescape")).digest()
