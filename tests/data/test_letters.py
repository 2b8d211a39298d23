"""AVLetters: its layout, folds by talker and by repetition, and whole clips as batches of unequal length."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kronecell import data
from kronecell.errors import DataError
from tests.data.test_sets import touch

NAMES = [f"{letter}/{talker}_{n}.mkv" for letter in "AB" for talker in ("Ann", "Bea", "Cid") for n in (1, 2, 3)]


def fold_sets(clips: tuple[data.Clip, ...], **settings: object) -> list[set[str]]:
    folds = data.make_folds(clips, **settings)  # type: ignore[arg-type]
    return [{clip.name for clip, f in zip(clips, folds, strict=True) if f == fold} for fold in range(max(folds) + 1)]


def test_the_layout_is_found_and_its_groups_are_talkers(tmp_path: Path) -> None:
    found = data.find_dataset(touch(tmp_path / "av", *NAMES))
    assert found.layout == "avletters" and found.classes == ("A", "B")
    assert {clip.group for clip in found.clips} == {f"{letter}/{t}" for letter in "AB" for t in ("Ann", "Bea", "Cid")}
    other = data.find_dataset(touch(tmp_path / "own", "walk/clip_1.avi", "walk/clip_2.avi", "run/clip_1.avi"))
    assert other.layout == "folder" and len({clip.group for clip in other.clips}) == 3


def test_the_real_set_has_its_published_size(shared: Path) -> None:
    found = data.find_dataset(shared / "avletters")
    assert (found.layout, len(found.classes), len(found.clips)) == ("avletters", 26, 780)
    assert Counter(data.make_folds(found.clips, 3, method="repetition")) == {0: 260, 1: 260, 2: 260}
    assert Counter(data.make_folds(found.clips, 5, method="talker")) == dict.fromkeys(range(5), 156)


def test_a_fold_by_repetition_is_one_repetition(tmp_path: Path) -> None:
    clips = data.find_dataset(touch(tmp_path / "av", *NAMES)).clips
    for number, names in enumerate(fold_sets(clips, k=3, method="repetition"), 1):
        assert len(names) == 6 and all(f"_{number}." in name for name in names)


def test_a_fold_by_talker_has_all_of_a_talker(tmp_path: Path) -> None:
    clips = data.find_dataset(touch(tmp_path / "av", *NAMES)).clips
    for seed in range(3):
        talkers = [
            {name.split("/")[1].split("_")[0] for name in names}
            for names in fold_sets(clips, k=3, seed=seed, method="talker")
        ]
        assert sorted(map(tuple, talkers)) == [("Ann",), ("Bea",), ("Cid",)]


def test_folds_that_cannot_be_are_refused(tmp_path: Path) -> None:
    clips = data.find_dataset(touch(tmp_path / "av", *NAMES)).clips
    with pytest.raises(DataError, match="give k = 3"):
        data.make_folds(clips, 5, method="repetition")
    with pytest.raises(DataError, match="4 folds of 3 talkers"):
        data.make_folds(clips, 4, method="talker")
    plain = data.find_dataset(touch(tmp_path / "plain", "walk/a.avi", "run/b.avi")).clips
    with pytest.raises(DataError, match=r"names that end in one, such as Anya_1\.avi; got"):
        data.make_folds(plain, 2, method="repetition")


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> data.Store:
    """Six clips of 3 to 8 grey frames of 8 x 6."""
    root = tmp_path_factory.mktemp("letters")
    generator = np.random.default_rng(0)
    for i, name in enumerate(name for name in NAMES if "Cid" not in name and "_3" not in name):
        path = root / "videos" / name.replace(".mkv", ".npy")
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, generator.integers(0, 256, (3 + i % 6, 6, 8), dtype=np.uint8))
    found = data.find_dataset(root / "videos")
    return data.prepare(
        found, root / "store", 8, 6, workers=1, progress=False, folds=2, fold_method="repetition", channels=1
    )


@pytest.mark.parametrize("train", [True, False])
def test_whole_clips_are_all_their_frames_and_zeros_behind(letters: data.Store, train: bool) -> None:
    loader = data.Loader(letters, range(len(letters)), 4, 0, train=train, frames=0)
    seen = []
    for batch in loader:
        assert batch.lengths is not None and batch.lengths.max() == batch.x.shape[-2]
        assert batch.x.ndim == (3 if train else 4)
        for x, name, length in zip(batch.x.flatten(0, -3), batch.names, batch.lengths, strict=True):
            i = next(i for i, clip in enumerate(letters.clips) if clip.name == name)
            assert np.array_equal(x[:length].numpy(), letters.frames(i).reshape(int(length), -1))
            assert not x[length:].any() and int(length) == letters.num_frames(i)
            seen.append(name)
    assert sorted(seen) == [clip.name for clip in letters.clips]


def test_whole_grey_clips_are_mirrored_as_a_whole(letters: data.Store) -> None:
    plain, flipped = (next(iter(data.Loader(letters, range(8), 8, 3, frames=0, flip=flip))) for flip in (False, True))
    turned = 0
    assert plain.lengths is not None
    for a, b, length in zip(plain.x.numpy(), flipped.x.numpy(), plain.lengths, strict=True):
        picture = a[:length].reshape(-1, 6, 8)
        mirrored = np.array_equal(b[:length].reshape(-1, 6, 8), picture[:, :, ::-1])
        assert mirrored or np.array_equal(a, b)
        turned += mirrored
    assert 0 < turned < 8


def test_ranks_share_whole_clips_out_as_one_process_sees_them(letters: data.Store) -> None:
    one = [*data.Loader(letters, range(8), 4, 5, frames=0)]
    two = [[*data.Loader(letters, range(8), 4, 5, frames=0, rank=rank, world_size=2)] for rank in range(2)]
    for whole, *parts in zip(one, *two, strict=True):
        assert whole.names == parts[0].names + parts[1].names
        assert whole.lengths is not None
        assert whole.lengths.tolist() == [int(n) for part in parts if part.lengths is not None for n in part.lengths]
