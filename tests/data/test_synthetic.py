"""The embedded set: UCF11's layout, the same files for the same seed, and a class that no single frame gives away."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from kronecell import data
from kronecell.errors import DataError


def test_it_is_a_ucf11_folder_like_any_other(motions: Path) -> None:
    found = data.find_dataset(motions)
    assert found.layout == "ucf11"
    assert found.classes == data.MOTIONS and len(data.MOTIONS) == 11
    assert len(found.clips) == 44
    assert len({clip.group for clip in found.clips}) == 22
    assert found.clips[0].name == "blink/v_blink_01/v_blink_01_01.avi"


@pytest.mark.parametrize("container,codec", [("avi", "mpeg4"), ("mpg", "mpeg1video")])
def test_files_are_real_videos_and_the_same_for_the_same_seed(tmp_path: Path, container: str, codec: str) -> None:
    import av

    def digest(root: Path) -> list[str]:
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(root.rglob(f"*.{container}"))]

    options = {"frames": 8, "size": (32, 24), "container": container, "progress": False}
    first = data.write_synthetic(tmp_path / "one", 2, 1, seed=3, **options)  # type: ignore[arg-type]
    second = data.write_synthetic(tmp_path / "two", 2, 1, seed=3, **options)  # type: ignore[arg-type]
    other = data.write_synthetic(tmp_path / "three", 2, 1, seed=4, **options)  # type: ignore[arg-type]
    assert len(digest(first)) == 22
    assert digest(first) == digest(second) != digest(other)
    path = next(first.rglob(f"*.{container}"))
    assert data.decode(path).num_frames == 8
    with av.open(str(path)) as opened:
        assert opened.streams.video[0].codec_context.name == codec


def test_interrupted_set_is_completed_and_a_complete_one_is_kept(tmp_path: Path) -> None:
    root = tmp_path / "set"
    arguments = (1, 1, (32, 24), 6)
    data.write_synthetic(root, *arguments, progress=False)
    times = {path: path.stat().st_mtime_ns for path in root.rglob("*.avi")}
    data.write_synthetic(root, *arguments, progress=False)
    assert times == {path: path.stat().st_mtime_ns for path in root.rglob("*.avi")}
    record = root / "synthetic.json"
    record.write_text(record.read_text().replace("true", "false"))
    next(iter(times)).unlink()
    data.write_synthetic(root, *arguments, progress=False)
    assert len(list(root.rglob("*.avi"))) == 11


def test_somebody_elses_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("dear")
    with pytest.raises(DataError, match="holds something else"):
        data.write_synthetic(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    for options, message in (
        ({"container": "mov"}, "container 'mov'"),
        ({"size": (33, 24)}, "even"),
        ({"frames": 0}, "0 frames"),
    ):
        with pytest.raises(DataError, match=message):
            data.write_synthetic(tmp_path / "new", **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(clips, 60 frames, pixels) in [0, 1] at 20 x 15, labels, folds."""
    root = data.write_synthetic(tmp_path_factory.mktemp("full") / "set", 20, 5, (80, 60), 60, progress=False)
    store = data.prepare(data.find_dataset(root), root.parent / "store", 20, 15, workers=2, progress=False)
    frames = np.stack([store.frames(i).reshape(60, -1) for i in range(len(store))]).astype(np.float32) / 255
    return frames, np.array([clip.class_index for clip in store.clips]), np.array(store.folds)


def linear_accuracy(x: np.ndarray, y: np.ndarray, held_out: np.ndarray) -> float:
    """Top-1 of a linear classifier (ridge regression, the best of several strengths) on examples it has not seen."""
    mean, std = x[~held_out].mean(0), x[~held_out].std(0) + 1e-3
    z = torch.from_numpy((x - mean) / std).double()
    z = torch.cat([z, torch.ones(len(z), 1)], 1)
    train, target = z[~held_out], torch.nn.functional.one_hot(torch.from_numpy(y[~held_out]), 11).double()
    scores = []
    for strength in (1e1, 1e2, 1e3, 1e4):
        gram = train.T @ train + strength * torch.eye(z.shape[1])
        guess = (z[held_out] @ torch.linalg.solve(gram, train.T @ target)).argmax(1).numpy()
        scores.append((guess == y[held_out]).mean())
    return float(max(scores))


def test_linear_classifier_on_one_frame_stays_below_20_percent(
    samples: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    frames, labels, folds = samples
    for fold in range(2):
        every_frame = frames.reshape(-1, frames.shape[-1])
        accuracy = linear_accuracy(every_frame, np.repeat(labels, 60), np.repeat(folds == fold, 60))
        assert accuracy < 0.2
        for number in (0, 3, 30, 59):
            assert linear_accuracy(frames[:, number], labels, folds == fold) < 0.2


def test_linear_classifier_on_frame_differences_is_clearly_above_chance(
    samples: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    frames, labels, folds = samples
    differences = np.abs(np.diff(frames, axis=1)).mean(1)
    accuracies = [linear_accuracy(differences, labels, folds == fold) for fold in range(2)]
    assert min(accuracies) > 0.35


def test_every_frame_number_has_the_same_statistics_in_every_class(
    samples: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    frames, labels, _ = samples
    light = frames.mean(-1)
    means = np.array([light[labels == label].mean() for label in range(11)])
    assert means.std() < 0.25 * light.std()
