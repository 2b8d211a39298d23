"""One decoded clip in one file: a header, then raw uint8 frames at a page boundary, so that they can be memory-mapped.

The file's name is a hash of the source's bytes and of the decode settings. A changed video or a changed setting is
another name, so nothing stale can be read and nothing else has to be decoded again.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kronecell.data.clips import stored_frames
from kronecell.data.frames import regular_file
from kronecell.data.stills import source_hash
from kronecell.data.video import Limits, decode
from kronecell.deploy.atomic import write_atomically
from kronecell.deploy.records import Wrong, check_regular, many, optional, parse_json, table, text, whole
from kronecell.errors import DataError, printable

MAGIC = b"KCCLIP1\n"
PAGE = 4096
SCHEMA = table(
    {
        "source_sha256": text(64),
        **dict.fromkeys(("source_size", "source_width", "source_height"), whole(0)),
        "num_frames": whole(1),
        "damage": optional(text(100_000)),
        **dict.fromkeys(("width", "height"), whole(1, 1 << 16)),
        "indices": many(whole(0), least=1),
        "crc32": whole(0, 2**32 - 1),
    },
    {"channels": whole(1, 4)},
    rest=None,
)


@dataclass(frozen=True)
class Settings:
    """What decides the bytes of a decoded clip. ``version`` changes when this code decodes differently."""

    width: int = 160
    height: int = 120
    max_frames: int = 120
    version: int = 1
    channels: int = 3

    def as_dict(self) -> dict[str, int]:
        """For a manifest and for names of files; colour is left out, as before there was grey."""
        return without_colour(asdict(self))


def without_colour(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without `channels` where that is 3: releases before grey wrote none and would not know it."""
    return {key: value for key, value in fields.items() if key != "channels" or value != 3}


@dataclass(frozen=True)
class Header:
    """What a clip file holds: ``indices[j]`` is the number in the video of the j-th stored frame."""

    source_sha256: str
    source_size: int
    num_frames: int
    source_width: int
    source_height: int
    damage: str | None
    width: int
    height: int
    indices: tuple[int, ...]
    crc32: int
    channels: int = 3

    @property
    def frame_bytes(self) -> int:
        return self.width * self.height * self.channels

    @property
    def data_bytes(self) -> int:
        return len(self.indices) * self.frame_bytes


def clip_file_name(source_sha256: str, settings: Settings) -> str:
    """The name of the file that holds this source decoded with these settings."""
    text = json.dumps([source_sha256, settings.as_dict()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40] + ".clip"


def store_clip(source: str, folder: Path, settings: Settings, limits: Limits) -> tuple[str, Header]:
    """Decode a video into ``folder``, or find that this was done before. Returns the file's name and its header."""
    try:
        if not os.path.isdir(source):
            regular_file(source)
        size, sha256 = source_hash(source)
    except DataError as error:
        raise DataError(f"{printable(source)}: {error}") from None
    except OSError as error:
        raise DataError(f"{printable(source)}: cannot be read: {error.strerror or error}") from None
    path = folder / clip_file_name(sha256, settings)
    if path.exists():
        try:
            header, offset = read_header(path)
            check_data(path, header, offset)
            return path.name, header
        except DataError:
            pass  # damaged on the disk: decode again, which replaces it
    video = decode(
        source,
        settings.width,
        settings.height,
        lambda count: stored_frames(count, settings.max_frames),
        limits,
        channels=settings.channels,
    )
    if source_hash(source)[1] != sha256:
        raise DataError(f"{printable(source)}: changed while it was being read; run again when it is complete")
    header = Header(
        sha256,
        size,
        video.num_frames,
        video.width,
        video.height,
        video.damage,
        settings.width,
        settings.height,
        tuple(map(int, video.indices)),
        zlib.crc32(video.frames.data),
        settings.channels,
    )
    write_atomically(path, lambda temporary: _write(temporary, header, video.frames))
    return path.name, header


def _write(path: Path, header: Header, frames: np.ndarray) -> None:
    text = json.dumps(without_colour(asdict(header))).encode()
    length = -(-(len(MAGIC) + 8 + len(text)) // PAGE) * PAGE
    with open(path, "wb") as file:
        file.write((MAGIC + b"%08d" % length + text).ljust(length))
        file.write(frames.data)


def read_header(path: str | os.PathLike[str]) -> tuple[Header, int]:
    """The header of a clip file and the offset of its frames; the file's length is checked, its frames are not."""
    name = printable(path)
    size = check_regular(path, DataError)
    try:
        with open(path, "rb") as file:
            start = file.read(len(MAGIC) + 8)
            if start[: len(MAGIC)] != MAGIC:
                raise DataError(f"{name}: is not a clip file; run kronecell data prepare again")
            digits = start[len(MAGIC) :]
            offset = int(digits) if digits.isdigit() else 0
            if offset < PAGE or offset % PAGE:
                raise DataError(f"{name}: has a damaged header; run kronecell data prepare again")
            content = file.read(min(offset, size) - len(start))
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror or error}") from None
    fields = parse_json(content, _header, DataError, name, "run kronecell data prepare again")
    header = Header(**{**fields, "indices": tuple(fields["indices"])})
    if size != offset + header.data_bytes:
        expected = offset + header.data_bytes
        raise DataError(f"{printable(path)}: has {size} bytes, expected {expected}; run kronecell data prepare again")
    return header, offset


def _header(value: dict[str, Any], place: str) -> None:
    SCHEMA(value, place)
    indices = value["indices"]
    if any(a >= b for a, b in pairwise([*indices, value["num_frames"]])):
        raise Wrong("the numbers of the stored frames do not ascend, or are beyond the video")


def check_data(path: str | os.PathLike[str], header: Header, offset: int) -> None:
    """Raise a DataError unless the frames on the disk are those that were written."""
    checksum = 0
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            while block := file.read(1 << 20):
                checksum = zlib.crc32(block, checksum)
    except OSError as error:
        raise DataError(f"{printable(path)}: cannot be read: {error.strerror or error}") from None
    if checksum != header.crc32:
        raise DataError(f"{printable(path)}: frames do not match their checksum; run kronecell data prepare again")
