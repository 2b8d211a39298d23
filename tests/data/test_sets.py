"""Data sets and folds: right classes and groups for the real layouts, and no group in two folds."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kronecell import data
from kronecell.errors import DataError


def touch(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


@pytest.fixture(scope="module")
def ucf11(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> data.Dataset:
    root = tmp_path_factory.mktemp("ucf11") / "UCF11_updated_mpg"
    names = (shared / "ucf11_paths.txt").read_text().split()
    touch(root, *names, "basketball/Annotation/v_shooting_01/v_shooting_01_01.mpg", "basketball/.DS_Store")
    return data.find_dataset(root)


def test_walker_on_the_real_ucf11_paths(ucf11: data.Dataset, shared: Path) -> None:
    assert ucf11.layout == "ucf11"
    assert len(ucf11.classes) == 11
    assert len(ucf11.clips) == 1600
    assert {clip.name for clip in ucf11.clips} == set((shared / "ucf11_paths.txt").read_text().split())
    groups = {clip.group: clip.label for clip in ucf11.clips}
    assert all((clip.label, groups[clip.group]) == (clip.label, clip.label) for clip in ucf11.clips)
    assert Counter(groups.values()) == dict.fromkeys(ucf11.classes, 25)
    assert all(clip.group == "/".join(clip.name.split("/")[:2]) for clip in ucf11.clips)
    assert all(ucf11.classes[clip.class_index] == clip.label for clip in ucf11.clips)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_group_of_ucf11_crosses_folds_and_classes_are_balanced(ucf11: data.Dataset, seed: int) -> None:
    folds = data.make_folds(ucf11.clips, 5, seed)
    fold_of: dict[str, set[int]] = {}
    for clip, fold in zip(ucf11.clips, folds, strict=True):
        fold_of.setdefault(clip.group, set()).add(fold)
    assert all(len(found) == 1 for found in fold_of.values())
    for label in ucf11.classes:
        counts = Counter(f for clip, f in zip(ucf11.clips, folds, strict=True) if clip.label == label)
        assert max(counts.values()) - min(counts.values()) <= 4
    assert max(Counter(folds).values()) - min(Counter(folds).values()) <= 20


def test_random_folds_do_cross_groups(ucf11: data.Dataset) -> None:
    folds = data.make_folds(ucf11.clips, method="random")
    assert len({(clip.group, fold) for clip, fold in zip(ucf11.clips, folds, strict=True)}) > 275
    counts = Counter(folds)
    assert max(counts.values()) - min(counts.values()) <= 3


def test_folds_depend_on_the_seed_and_on_nothing_else(ucf11: data.Dataset) -> None:
    folds = data.make_folds(ucf11.clips, 5, 7)
    backwards = data.make_folds(ucf11.clips[::-1], 5, 7)
    assert folds == data.make_folds(ucf11.clips, 5, 7) == backwards[::-1]
    assert folds != data.make_folds(ucf11.clips, 5, 8)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=8, max_size=60), st.integers(2, 4))
def test_no_data_set_has_a_group_in_two_folds(pairs: list[tuple[int, int]], k: int) -> None:
    clips = [
        data.Clip(Path(str(n)), str(label), f"{label}/{group}", label, str(n)) for n, (label, group) in enumerate(pairs)
    ]
    if len({clip.group for clip in clips}) < k:
        with pytest.raises(DataError, match="folds"):
            data.make_folds(clips, k)
        return
    folds = data.make_folds(clips, k)
    assert len({(clip.group, fold) for clip, fold in zip(clips, folds, strict=True)}) == len({c.group for c in clips})
    assert set(folds) <= set(range(k))


def test_ucf50_and_ucf101(tmp_path: Path) -> None:
    touch(tmp_path, "BaseballPitch/v_BaseballPitch_g01_c01.avi", "BaseballPitch/v_BaseballPitch_g01_c02.avi")
    touch(tmp_path, "Diving/v_Diving_g01_c01.avi", "Diving/v_Diving_g25_c07.avi")
    found = data.find_dataset(tmp_path)
    assert found.layout == "ucf50"
    assert [clip.group for clip in found.clips] == ["BaseballPitch/g01"] * 2 + ["Diving/g01", "Diving/g25"]


def test_youtube_celebrities(tmp_path: Path) -> None:
    touch(tmp_path, "0193_01_004_bill_clinton.avi", "0194_01_005_bill_clinton.avi", "0210_03_001_bill_clinton.avi")
    touch(tmp_path, "0001_01_001_al_gore.avi")
    found = data.find_dataset(tmp_path)
    assert found.layout == "ycf"
    assert found.classes == ("al_gore", "bill_clinton")
    assert [clip.group for clip in found.clips] == [
        "al_gore/01",
        "bill_clinton/01",
        "bill_clinton/01",
        "bill_clinton/03",
    ]


def test_folder_of_classes(shared: Path) -> None:
    found = data.find_dataset(shared / "surveillance")
    assert found.layout == "folder"
    assert found.classes == ("fight", "noFight")
    assert len(found.clips) == 300
    assert len({clip.group for clip in found.clips}) == 300


def test_folder_below_a_class_is_a_group(tmp_path: Path) -> None:
    touch(tmp_path, "a/p1/x.mp4", "a/p1/y.MP4", "a/z.mov", "b/p1/x.mp4", "notes.txt", "a/notes.txt", "docs/readme.md")
    assert [clip.group for clip in data.find_dataset(tmp_path).clips] == ["a/p1", "a/p1", "a/z.mov", "b/p1"]


def test_wrapper_folder_of_an_archive_is_entered(tmp_path: Path) -> None:
    touch(tmp_path, "UCF-101/A/v_A_g01_c01.avi", "UCF-101/B/v_B_g01_c01.avi")
    assert data.find_dataset(tmp_path).classes == ("A", "B")


def test_symlink_loop_ends_and_a_looping_file_is_still_a_clip(tmp_path: Path) -> None:
    touch(tmp_path, "a/x.mp4", "b/y.mp4")
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    (tmp_path / "b" / "self.mp4").symlink_to("self.mp4")
    names = [clip.name for clip in data.find_dataset(tmp_path).clips]
    assert names == ["a/x.mp4", "b/self.mp4", "b/y.mp4"]


def test_names_that_are_not_utf8_are_kept(tmp_path: Path) -> None:
    touch(tmp_path, "a/x.mp4")
    with open(os.fsencode(tmp_path) + b"/a/\xff\xfe.mp4", "wb"):
        pass
    assert [os.fsencode(clip.name) for clip in data.find_dataset(tmp_path).clips] == [b"a/x.mp4", b"a/\xff\xfe.mp4"]


@pytest.mark.parametrize("layout", ["ucf11", "ucf50", "ycf"])
def test_file_that_does_not_fit_its_layout_is_named(tmp_path: Path, layout: str) -> None:
    touch(tmp_path, "a/b/odd_one.mp4", "c/x.mp4")
    with pytest.raises(DataError, match=rf"odd_one.mp4: does not fit layout '{layout}'"):
        data.find_dataset(tmp_path, layout)


def test_wrong_use_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: is not a folder"):
        data.find_dataset(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no video"):
        data.find_dataset(tmp_path)
    with pytest.raises(DataError, match="unknown layout 'x'"):
        data.find_dataset(tmp_path, "x")
    with pytest.raises(DataError, match="kronecell data extract"):
        data.find_dataset(touch(tmp_path, "set.zip") / "set.zip")
    clips = data.find_dataset(touch(tmp_path, "a/1.mp4", "b/2.mp4")).clips
    with pytest.raises(DataError, match="unknown fold method 'x'"):
        data.make_folds(clips, method="x")
    with pytest.raises(DataError, match="cannot make 1 folds"):
        data.make_folds(clips, 1)
