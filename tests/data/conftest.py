"""Small real videos, written once, and the shared data if it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from kronecell import data
from tests.data.videos import pictures, write_video

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip("the shared test data (../shared/data) is not here")
    return SHARED


@pytest.fixture(scope="session")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy video of 30 frames."""
    return write_video(tmp_path_factory.mktemp("video") / "good.avi", pictures(30))


@pytest.fixture(scope="session")
def motions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small embedded data set: 11 classes, 4 clips in 2 groups each."""
    return data.write_synthetic(tmp_path_factory.mktemp("motions") / "set", 4, 2, (32, 24), 12, progress=False)


@pytest.fixture(scope="session")
def store(motions: Path, tmp_path_factory: pytest.TempPathFactory) -> data.Store:
    """The small data set, decoded."""
    out = tmp_path_factory.mktemp("store") / "store"
    return data.prepare(data.find_dataset(motions), out, 32, 24, workers=2, progress=False, folds=2)
