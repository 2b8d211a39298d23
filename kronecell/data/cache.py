"""The store: every clip decoded once, then read as memory-mapped uint8 frames by any number of trainers at once.

    OUT/manifest.json    what is in the store; written last, in one piece
    OUT/clips/*.clip     one file per clip (see clipfile), each written in one piece
    OUT/lock             held by the one process that may write

There is no other state. After a kill at any moment the next ``prepare`` finds the finished clip files by their
names and decodes the rest; the result is the same bytes as those of a run that was never interrupted.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kronecell.data.clipfile import Header, Settings, check_data, read_header
from kronecell.data.datasets import Clip, Dataset
from kronecell.data.folds import folds_record
from kronecell.data.manifest import BadFile, build_manifest, manifest_hash, read_manifest, write_manifest
from kronecell.data.progress import track
from kronecell.data.video import DEFAULT_LIMITS, Limits
from kronecell.data.workers import run_jobs
from kronecell.deploy.atomic import LockedError, exclusive, remove_temporaries
from kronecell.deploy.records import is_there
from kronecell.errors import DataError, printable

MANIFEST = "manifest.json"
OPEN_MAPS = 64  # each holds a file descriptor; systems allow as few as 1024


def prepare(
    dataset: Dataset,
    out: str | os.PathLike[str],
    width: int = 160,
    height: int = 120,
    workers: int | None = None,
    progress: bool = True,
    max_frames: int = 120,
    limits: Limits = DEFAULT_LIMITS,
    folds: int = 5,
    fold_seed: int = 0,
    fold_method: str = "group",
    prune: bool = False,
    channels: int = 3,
) -> Store:
    """Decode a data set into a store at ``out``, or bring an existing store up to date; only what changed is decoded.

    ``channels=1`` stores grey frames, a third of the size. A clip of more than ``max_frames`` frames keeps those of the
    10 validation clips and an even spread of the rest. Bad files are listed in ``Store.bad`` and left out. ``prune``
    deletes clip files that the new manifest does not name; not by default, because another trainer may still be reading
    them.
    """
    for name, value in (("width", width), ("height", height), ("max_frames", max_frames)):
        if value < 1:
            raise DataError(f"{name} must be at least 1, got {value}")
    if channels not in (1, 3):
        raise DataError(f"channels must be 1 (grey) or 3 (colour), got {channels}")
    root = Path(out)
    settings = Settings(width, height, max_frames, channels=channels)
    folder = root / "clips"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{printable(folder)}: cannot be made: {error.strerror or error}") from None
    with _only_writer(root):
        remove_temporaries(root)
        remove_temporaries(folder)
        jobs = [
            {"task": "store", "path": str(clip.path), "folder": str(folder), "settings": asdict(settings)}
            for clip in dataset.clips
        ]
        answers: dict[int, dict[str, Any]] = {}
        for position, answer in track(run_jobs(jobs, workers, limits), len(jobs), "decoding", progress):
            answers[position] = answer
        manifest = build_manifest(dataset, answers, settings.as_dict())
        good = [clip for position, clip in enumerate(dataset.clips) if "ok" in answers[position]]
        if not good:
            reason = answers[0]["error"]
            raise DataError(f"{printable(dataset.root)}: not one of {len(jobs)} files can be decoded; first: {reason}")
        manifest["folds"] = folds_record(good, folds, fold_seed, fold_method)
        write_manifest(root / MANIFEST, manifest)
        if prune:
            keep = {record["file"] for record in manifest["clips"]}
            for path in folder.glob("*.clip"):
                if path.name not in keep:
                    path.unlink(missing_ok=True)
    return open_store(root)


def open_store(path: str | os.PathLike[str], check: bool = True) -> Store:
    """The store at ``path``. With ``check`` each clip's checksum is verified when it is first read."""
    root = Path(path)
    if not is_there(root / MANIFEST):
        raise DataError(
            f"{printable(root)}: is not a finished store (no {MANIFEST}); make it: kronecell data prepare VIDEOS STORE"
        )
    return Store(root, read_manifest(root / MANIFEST), check)


class Store:
    """Decoded clips, in the order of their names. Safe to read from many processes, and to pickle to workers."""

    def __init__(self, root: Path, manifest: dict[str, Any], check: bool = True) -> None:
        self.root, self.manifest, self.check = root, manifest, check
        try:
            source = Path(manifest["root"])
            self.classes: tuple[str, ...] = tuple(manifest["classes"])
            self.clips: tuple[Clip, ...] = tuple(
                Clip(source / c["path"], c["class"], c["group"], self.classes.index(c["class"]), c["path"])
                for c in manifest["clips"]
            )
            self.bad: tuple[BadFile, ...] = tuple(BadFile(b["path"], b["reason"]) for b in manifest["bad"])
            self.files: tuple[str, ...] = tuple(c["file"] for c in manifest["clips"])
            self._checksums = tuple(c["crc32"] for c in manifest["clips"])
            self.width, self.height = int(manifest["settings"]["width"]), int(manifest["settings"]["height"])
            self.channels = int(manifest["settings"].get("channels", 3))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{printable(root / MANIFEST)}: does not describe a store ({error}); run kronecell data prepare again"
            ) from None
        self.manifest_hash: str = manifest_hash(manifest)
        self._headers: dict[int, tuple[Header, int, np.ndarray]] = {}
        self._folder = str(root / "clips")
        self._maps: OrderedDict[int, np.memmap] = OrderedDict()

    def __len__(self) -> int:
        return len(self.clips)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": OrderedDict()}  # a pickled map would be a copy of all its frames

    @property
    def folds(self) -> tuple[int, ...]:
        """The fold of every clip as stored in the manifest; ``manifest["folds"]`` says with which seed and method."""
        return tuple(self.manifest["folds"]["fold"])

    def num_frames(self, i: int) -> int:
        """How many frames the video has; ``len(frames(i))`` are stored."""
        return int(self.manifest["clips"][i]["frames"])

    def indices(self, i: int) -> np.ndarray:
        """The number in the video of each stored frame, ascending."""
        return self._header(i)[2]

    def frames(self, i: int) -> np.memmap:
        """The stored frames of clip i, uint8 (T, height, width, channels), mapped from the disk and read-only."""
        if i in self._maps:
            self._maps.move_to_end(i)
            return self._maps[i]
        header, offset, _ = self._header(i)
        path = self._path(i)
        try:
            shape = (len(header.indices), header.height, header.width, header.channels)
            frames = np.memmap(path, np.uint8, "r", offset, shape)
        except (OSError, ValueError) as error:
            raise DataError(f"{printable(path)}: cannot be mapped: {error}; run kronecell data prepare again") from None
        self._maps[i] = frames
        if len(self._maps) > OPEN_MAPS:
            self._maps.popitem(last=False)
        return frames

    def read(self, i: int, positions: Sequence[int] | np.ndarray, out: np.ndarray) -> None:
        """Copy stored frames ``positions`` of clip i into ``out``, uint8 (len(positions), height * width * channels).

        Reads instead of mapping: the page cache is the same, an open file costs less than a new mapping, and a file
        that was cut short is a DataError here where touching a mapping would kill the process.
        """
        header, offset, _ = self._header(i)
        path = self._path(i)
        size = header.frame_bytes
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{printable(path)}: cannot be read: {error.strerror or error}") from None
        try:
            row = 0
            while row < len(positions):
                first, end = int(positions[row]), row + 1
                while end < len(positions) and positions[end] == first + end - row:
                    end += 1  # frames in a row are one read
                if os.preadv(descriptor, [out[row:end].data], offset + first * size) != (end - row) * size:
                    raise DataError(f"{printable(path)}: ends early; run kronecell data prepare again")
                row = end
        except OSError as error:
            raise DataError(f"{printable(path)}: cannot be read: {error.strerror or error}") from None
        finally:
            os.close(descriptor)

    def verify(self) -> list[BadFile]:
        """Check every clip file against its checksum; returns those that fail."""
        failed = []
        for i, clip in enumerate(self.clips):
            try:
                header, offset = read_header(self._path(i))
                check_data(self._path(i), header, offset)
            except DataError as error:
                failed.append(BadFile(clip.name, str(error)))
        return failed

    def _path(self, i: int) -> str:
        return f"{self._folder}/{self.files[i]}"  # joining Path objects would take a sixth of the time of a batch

    def _header(self, i: int) -> tuple[Header, int, np.ndarray]:
        if i not in self._headers:
            path = self._path(i)
            header, offset = read_header(path)
            record = self.manifest["clips"][i]
            expected = self._checksums[i], record["frames"], self.width, self.height
            if (header.crc32, header.num_frames, header.width, header.height) != expected:
                raise DataError(
                    f"{printable(path)}: is not the file its manifest names; run kronecell data prepare again"
                )
            if self.check:
                check_data(path, header, offset)
            self._headers[i] = header, offset, np.array(header.indices, dtype=np.int64)
        return self._headers[i]


@contextmanager
def _only_writer(root: Path) -> Iterator[None]:
    """Hold the store's lock."""
    try:
        with exclusive(root / "lock"):
            yield
    except LockedError:
        raise DataError(f"{printable(root)}: another prepare is writing this store; wait for it to end") from None
