"""A small real data set and a small experiment that the training tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kronecell.data import Store, find_dataset, prepare, write_synthetic
from kronecell.training.run import Experiment, make_experiment

KCP = "kcp:m=6x8x6x8,n=2x2x2x2,K=2,CA=2,CB=2"
SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "format": KCP,
    "width": 32,
    "height": 24,
    "hidden": 16,
    "folds": 2,
    "batch_size": 8,
    "epochs": 3,
    "dropout": 0.25,
    "checkpoint_seconds": 0.0,
    "workers": 0,
}


def tiny(**changes: Any) -> Experiment:
    """The small experiment, with changes."""
    return make_experiment(SETTINGS | changes)


def make_store(folder: Path) -> Store:
    """44 clips of 11 motions in two groups, 32 x 24."""
    videos = write_synthetic(folder / "videos", 4, 2, (32, 24), 12, progress=False)
    return prepare(find_dataset(videos), folder / "store", 32, 24, workers=1, progress=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    yield make_store(tmp_path_factory.mktemp("motions"))


def toml_file(folder: Path, **changes: Any) -> Path:
    """The small experiment as a file."""
    path = folder / "tiny.toml"
    path.write_text(tiny(**changes).to_toml())
    return path
