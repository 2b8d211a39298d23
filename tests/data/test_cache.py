"""The store: whole or not there, the same bytes after any number of kills, and only what changed is decoded again."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kronecell import data
from kronecell.errors import DataError
from tests.data.videos import pictures, write_video


def digest(root: Path) -> dict[str, str]:
    """Every file of a store and its hash."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def small_set(root: Path, clips: int = 3) -> Path:
    for label in ("a", "b"):
        (root / label).mkdir(parents=True)
        for number in range(clips):
            write_video(root / label / f"{number}.avi", pictures(8 + number, seed=number + ord(label)))
    return root


def prepare(root: Path, out: Path, **options: object) -> data.Store:
    return data.prepare(data.find_dataset(root), out, 16, 12, workers=2, progress=False, **options)  # type: ignore[arg-type]


def test_stored_frames_are_the_decoded_frames(store: data.Store) -> None:
    assert len(store) == 44
    for i in (0, 17, 43):
        decoded = data.decode(store.clips[i].path, 32, 24)
        assert np.array_equal(store.frames(i), decoded.frames)
        assert store.num_frames(i) == decoded.num_frames
        assert not store.frames(i).flags.writeable
        assert isinstance(store.frames(i), np.memmap)


def test_store_knows_its_clips_classes_folds_and_hash(store: data.Store, motions: Path) -> None:
    dataset = data.find_dataset(motions)
    assert store.classes == dataset.classes == data.MOTIONS
    assert [clip.name for clip in store.clips] == [clip.name for clip in dataset.clips]
    assert store.folds == data.make_folds(store.clips, 2)
    assert store.manifest_hash == data.open_store(store.root).manifest_hash
    assert store.bad == () and store.verify() == []
    for record in store.manifest["clips"]:
        assert {"path", "class", "group", "frames", "size", "sha256"} <= record.keys()


def test_long_clip_keeps_its_validation_frames(tmp_path: Path) -> None:
    root = small_set(tmp_path / "set")
    write_video(root / "a" / "long.avi", pictures(200))
    store = prepare(root, tmp_path / "store", max_frames=80)
    i = next(i for i, clip in enumerate(store.clips) if clip.name == "a/long.avi")
    everything = data.decode(root / "a" / "long.avi", 16, 12).frames
    assert len(store.frames(i)) == 80
    assert np.array_equal(store.frames(i), everything[store.indices(i)])
    loader = data.Loader(store, [i], 1, 0, train=False)
    expected = everything[data.validation_frames(200)].reshape(10, 6, -1)
    assert np.array_equal(next(iter(loader)).x[0].numpy(), expected)


def test_bad_files_are_left_out_and_named(tmp_path: Path) -> None:
    root = small_set(tmp_path / "set")
    (root / "a" / "bad.avi").write_bytes(b"nothing")
    os.mkfifo(root / "b" / "pipe.avi")
    store = prepare(root, tmp_path / "store")
    assert len(store) == 6
    assert [file.name for file in store.bad] == ["a/bad.avi", "b/pipe.avi"]
    assert all(Path(file.name).name in file.reason for file in store.bad)


def test_only_what_changed_is_decoded_again(tmp_path: Path) -> None:
    root, out = small_set(tmp_path / "set"), tmp_path / "store"
    prepare(root, out)
    times = {path.name: path.stat().st_mtime_ns for path in (out / "clips").iterdir()}
    write_video(root / "a" / "1.avi", pictures(9, seed=1000))
    (root / "b" / "2.avi").unlink()
    write_video(root / "b" / "new.avi", pictures(5, seed=1001))
    os.utime(root / "a" / "0.avi")  # touched, not changed
    store = prepare(root, out)
    after = {path.name: path.stat().st_mtime_ns for path in (out / "clips").iterdir()}
    assert {name: after[name] for name in times} == times
    assert len(after) == len(times) + 2
    store = prepare(root, out, prune=True)
    assert digest(out) == digest(prepare(root, tmp_path / "fresh").root)
    assert [clip.name for clip in store.clips] == ["a/0.avi", "a/1.avi", "a/2.avi", "b/0.avi", "b/1.avi", "b/new.avi"]


def test_changed_setting_makes_new_frames(tmp_path: Path) -> None:
    root, out = small_set(tmp_path / "set"), tmp_path / "store"
    first = prepare(root, out)
    second = data.prepare(data.find_dataset(root), out, 20, 12, workers=1, progress=False)
    assert second.frames(0).shape[1:] == (12, 20, 3)
    assert first.manifest_hash != second.manifest_hash
    assert first.frames(0).shape[1:] == (12, 16, 3)  # a reader of the old manifest goes on


def test_damaged_store_is_noticed_and_repaired(tmp_path: Path) -> None:
    root, out = small_set(tmp_path / "set"), tmp_path / "store"
    whole = digest(prepare(root, out).root)
    paths = sorted((out / "clips").iterdir())
    content = bytearray(paths[0].read_bytes())
    content[-5] ^= 1
    paths[0].write_bytes(content)
    os.truncate(paths[1], 5000)
    paths[2].unlink()
    paths[3].write_bytes(b"KCCLIP1\n99999999{")
    store = data.open_store(out)
    assert len(store.verify()) == 4
    for i in range(len(store)):
        if store.files[i] in {path.name for path in paths[:4]}:
            with pytest.raises(DataError, match=r"\.clip"):
                store.frames(i)
            with pytest.raises(DataError, match=r"\.clip"):
                store.read(i, [0], np.empty((1, 16 * 12 * 3), np.uint8))
    assert digest(prepare(root, out).root) == whole


KILLER = """
import os, random, shutil, signal, sys, time
from kronecell import data
root, out, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3])
def run():
    data.prepare(data.find_dataset(root), out, workers=2, progress=False)
start = time.monotonic()
run()
usual = time.monotonic() - start
shutil.rmtree(out)
chance = random.Random(0)
kills = 0
while kills < wanted:
    child = os.fork()
    if child == 0:
        run()
        os._exit(0)
    time.sleep(chance.uniform(0, usual))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        kills += 1
    if os.path.exists(os.path.join(out, "manifest.json")):
        shutil.rmtree(out)  # it had finished: start again, so that every kill hits work under way
print(kills)
time.sleep(0.5)
run()
"""


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_at_random_moments_change_no_bit(tmp_path: Path, kills: int) -> None:
    root = data.write_synthetic(tmp_path / "set", 6, 2, (160, 120), 40, progress=False)
    whole = digest(data.prepare(data.find_dataset(root), tmp_path / "whole", workers=2, progress=False).root)
    out = tmp_path / "killed"
    command = [sys.executable, "-c", KILLER, str(root), str(out), str(kills)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout.split() == [str(kills)], result.stderr
    assert digest(out) == whole


def test_only_one_prepare_writes_at_a_time(tmp_path: Path) -> None:
    import fcntl

    root, out = small_set(tmp_path / "set"), tmp_path / "store"
    prepare(root, out)
    with open(out / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another prepare is writing"):
            prepare(root, out)
    prepare(root, out)


READER = """
import hashlib, sys, torch
from kronecell import data
store = data.open_store(sys.argv[1])
total = hashlib.sha256()
loader = data.Loader(store, range(len(store)), 8, 3, workers=1)
for epoch in range(3):
    loader.set_epoch(epoch)
    for batch in loader:
        total.update(batch.x.numpy().tobytes())
print(total.hexdigest())
"""


def test_two_trainers_read_one_store_at_once(store: data.Store) -> None:
    command = [sys.executable, "-c", READER, str(store.root)]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (reader.communicate()[0] for reader in readers)
    assert first == second and len(first.strip()) == 64


def test_store_can_be_pickled_without_its_frames(store: data.Store) -> None:
    store.frames(0)
    content = pickle.dumps(store)
    assert len(content) < 200_000
    assert np.array_equal(pickle.loads(content).frames(0), store.frames(0))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "other"}', b'{"format": "kronecell manifest 1"}'])
def test_manifest_that_is_none_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=r"manifest\.json"):
        data.open_store(tmp_path)


def test_unfinished_or_missing_store_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="kronecell data prepare"):
        data.open_store(tmp_path / "nothing")


def test_output_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    root = small_set(tmp_path / "set", 1)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be made"):
        prepare(root, tmp_path / "file" / "store")


FULL_DISK = """
import resource, sys
from kronecell import data
from kronecell.errors import DataError
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
try:
    data.prepare(data.find_dataset(sys.argv[1]), sys.argv[2], workers=1, progress=False)
except DataError as error:
    print(error)
"""


def test_full_disk_ends_prepare_and_blames_no_video(tmp_path: Path) -> None:
    root, out = small_set(tmp_path / "set"), tmp_path / "store"
    command = [sys.executable, "-c", FULL_DISK, str(root), str(out)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert ".clip: File too large" in result.stdout, result.stderr
    assert not (out / "manifest.json").exists() and list((out / "clips").iterdir()) == []
    assert len(prepare(root, out)) == 6


def test_set_without_one_good_file_is_an_error(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / "set" / label).mkdir(parents=True)
        (tmp_path / "set" / label / "x.avi").touch()
    with pytest.raises(DataError, match="not one of 2 files"):
        prepare(tmp_path / "set", tmp_path / "store")


def test_names_that_are_not_utf8_survive_the_manifest(tmp_path: Path) -> None:
    root = small_set(tmp_path / "set", 1)
    shutil.copy(root / "a" / "0.avi", os.fsencode(root) + b"/a/\xff.avi")
    store = prepare(root, tmp_path / "store")
    assert os.fsencode(data.open_store(store.root).clips[1].name) == b"a/\xff.avi"
    assert json.loads((store.root / "manifest.json").read_text())["bad"] == []
