"""AVLetters for benchmarks.letters: the whole set with folds by repetition, and the two that train alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kronecell.data import Dataset, Store, find_dataset, prepare

REPETITIONS = (1, 2, 3)
TEST = 3  # the repetition that the usual protocol never trains on, nor uses for a choice


def stores(data: Path, out: Path, width: int, height: int) -> tuple[dict[int, Store], Store]:
    """Grey clips: for each repetition the store of the two others, and the store of all three."""
    dataset, inner = find_dataset(data, "avletters"), {}
    for test in REPETITIONS:
        others = replace(dataset, clips=tuple(clip for clip in dataset.clips if _repetition(clip.name) != test))
        name = "store-inner" if test == TEST else f"store-inner-{test}"
        inner[test] = _prepare(others, out / name, width, height, 2)
    return inner, _prepare(dataset, out / "store", width, height, 3)


def talkers_of(store: Store, folds: Sequence[int]) -> dict[str, list[str]]:
    """Fold -> who speaks in its clips, in the order of their names."""
    found: dict[str, list[str]] = {}
    for clip, fold in sorted(zip(store.clips, folds, strict=True), key=lambda pair: pair[0].name):
        found.setdefault(str(fold), []).append(clip.name.rpartition("/")[2].rpartition("_")[0])
    return found


def _prepare(dataset: Dataset, out: Path, width: int, height: int, folds: int) -> Store:
    return prepare(
        dataset, out, width, height, workers=1, progress=False, folds=folds, fold_method="repetition", channels=1
    )


def _repetition(name: str) -> int:
    return int(name.rpartition("_")[2].partition(".")[0])


def quick_data(out: Path) -> tuple[dict[int, Store], Store]:
    """Noise in the layout of AVLetters: three letters, five talkers, three repetitions, clips of unequal length."""
    folder, generator = out / "noise", np.random.default_rng(0)
    for letter in "ABC":
        (folder / letter).mkdir(parents=True, exist_ok=True)
        for talker in ("Ann", "Bea", "Cid", "Dan", "Eve"):
            for repetition in (1, 2, 3):
                frames = generator.integers(0, 256, (int(generator.integers(3, 7)), 30, 40), dtype=np.uint8)
                path = folder / letter / f"{talker}_{repetition}.npy"
                if not path.exists():
                    np.save(path, frames)
    return stores(folder, out, 40, 30)
