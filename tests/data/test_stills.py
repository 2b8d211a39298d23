"""Clips that are not videos, and lists of clips: folders of pictures, arrays, CSV, grey."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from kronecell.data import decode, find_dataset, open_store, prepare
from kronecell.data.datasets import clips_in
from kronecell.errors import DataError

av = pytest.importorskip("av")

FRAMES = np.random.default_rng(0).integers(0, 256, (12, 24, 32, 3), dtype=np.uint8)


def write_pictures(folder: Path, frames: np.ndarray = FRAMES, codec: str = "png") -> Path:
    """frame1.png, frame2.png, ... without leading zeros."""
    folder.mkdir(parents=True)
    for number, picture in enumerate(frames, 1):
        context = av.CodecContext.create(codec, "w")
        context.width, context.height, context.pix_fmt = picture.shape[1], picture.shape[0], "rgb24"
        context.time_base = Fraction(1, 25)
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
        packets = [*context.encode(frame), *context.encode(None)]
        (folder / f"frame{number}.{codec}").write_bytes(b"".join(bytes(packet) for packet in packets))
    return folder


def test_a_folder_of_pictures_is_a_clip_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    video = decode(write_pictures(tmp_path / "clip"), 32, 24)
    np.testing.assert_array_equal(video.frames, FRAMES)  # frame2 before frame10
    assert (video.num_frames, video.width, video.height, video.damage) == (12, 32, 24, None)
    some = decode(tmp_path / "clip", 32, 24, choose=lambda count: [0, count - 1])
    np.testing.assert_array_equal(some.frames, FRAMES[[0, 11]])


def test_a_picture_that_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "clip")
    (folder / "frame3.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    (folder / "frame5.png").write_bytes(b"")
    video = decode(folder, 32, 24)
    assert video.num_frames == 10 and video.damage is not None and "2 of 12 pictures left out" in video.damage
    for path in folder.iterdir():
        path.write_bytes(b"text")
    with pytest.raises(DataError, match="not one of 12 pictures"):
        decode(folder, 32, 24)


@pytest.mark.parametrize(
    "made",
    [
        lambda x: x,
        lambda x: x / np.float32(255),
        lambda x: np.moveaxis(x, -1, 1),
        lambda x: np.concatenate([x, x[..., :1]], -1),  # with an alpha channel
    ],
)
def test_arrays_are_clips_in_the_usual_forms(tmp_path: Path, made: Callable[[np.ndarray], np.ndarray]) -> None:
    np.save(tmp_path / "clip.npy", made(FRAMES))
    np.savez_compressed(tmp_path / "clip.npz", frames=made(FRAMES), other=np.zeros(3))
    for name in ("clip.npy", "clip.npz"):
        np.testing.assert_array_equal(decode(tmp_path / name, 32, 24).frames, FRAMES)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 4)), "has shape (3, 4)"),
        (np.zeros((0, 4, 4)), "has shape (0, 4, 4)"),
        (np.zeros((2, 4, 4), np.int32), "numbers of type int32"),
        (np.full((2, 4, 4), 7.0), "floats outside 0 to 1"),
        (np.full((2, 4, 4), np.nan), "floats outside 0 to 1"),
    ],
)
def test_arrays_that_are_no_frames_are_refused(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "clip.npy", array)
    with pytest.raises(DataError, match=rf"clip.npy.*{re.escape(message)}"):
        decode(tmp_path / "clip.npy", 4, 4)


def test_grey_is_one_channel_of_a_third_of_the_size(tmp_path: Path) -> None:
    grey = np.repeat(FRAMES[..., :1], 3, axis=-1)
    for label in ("a", "b"):
        for number in range(3):
            write_pictures(tmp_path / "set" / label / f"{number}", grey[number:])
    store = prepare(find_dataset(tmp_path / "set"), tmp_path / "grey", 32, 24, 1, False, channels=1)
    np.testing.assert_array_equal(store.frames(0), grey[..., :1])
    assert store.channels == 1 and open_store(tmp_path / "grey").channels == 1
    np.save(tmp_path / "clip.npy", grey[..., 0])
    np.testing.assert_array_equal(decode(tmp_path / "clip.npy", 32, 24, channels=1).frames, grey[..., :1])
    np.testing.assert_array_equal(decode(tmp_path / "clip.npy", 32, 24).frames, grey)


def test_a_data_set_mixes_kinds_and_names_folders_without_a_clip(tmp_path: Path) -> None:
    root = tmp_path / "set"
    write_pictures(root / "run" / "one")
    (root / "walk").mkdir()
    np.save(root / "walk" / "two.npy", FRAMES)
    (root / "swim").mkdir()
    (root / "swim" / "clip.doc").write_text("")
    dataset = find_dataset(root)
    assert [clip.name for clip in dataset.clips] == ["run/one", "walk/two.npy"] and dataset.classes == ("run", "walk")
    assert dataset.skipped == ("swim: no clip inside; it holds 1 .doc",)
    store = prepare(dataset, tmp_path / "store", 32, 24, 1, False)
    np.testing.assert_array_equal(store.frames(0), store.frames(1))
    assert clips_in(root / "run" / "one") == [root / "run" / "one"] and len(clips_in(root)) == 2


def test_pictures_directly_in_a_class_are_refused_with_the_layout_that_is_needed(tmp_path: Path) -> None:
    write_pictures(tmp_path / "set" / "run")
    write_pictures(tmp_path / "set" / "walk")
    with pytest.raises(DataError, match="one folder is one clip: class/clip/picture"):
        find_dataset(tmp_path / "set")


@pytest.mark.parametrize(
    "text",
    [
        "path,class,group\nb.npy,run,g1\na.npy,walk,g1\n",
        "a.npy,walk,g1\nb.npy,run,g1\n",
        "label;recording;file\nwalk;g1;a.npy\nrun;g1;b.npy\n",
    ],
)
def test_a_list_names_paths_classes_and_groups(tmp_path: Path, text: str) -> None:
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", FRAMES)
    (tmp_path / "list.csv").write_text(text)
    dataset = find_dataset(tmp_path / "list.csv")
    assert [(c.name, c.label, c.group) for c in dataset.clips] == [
        ("a.npy", "walk", "walk/g1"),
        ("b.npy", "run", "run/g1"),
    ]
    assert dataset.name == "list" and prepare(dataset, tmp_path / "store", 8, 8, 1, False).classes == ("run", "walk")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a.npy\n", "line 1: expected a path and a class"),
        ("path\na.npy\n", "has no column 'class'"),
        ("a.npy,x\na.npy,y\n", "line 2: a.npy is listed twice"),
        ("b.npy,x\n", "line 1: .*b.npy does not exist"),
    ],
)
def test_mistakes_in_a_list_name_their_line(tmp_path: Path, text: str, message: str) -> None:
    np.save(tmp_path / "a.npy", FRAMES)
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        find_dataset(tmp_path / "list.csv")
