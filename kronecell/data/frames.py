"""What every kind of clip has in common: limits, the result, one frame made small, a reason on one line."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from kronecell.errors import DataError, KronecellError

PIXELS = {1: "gray", 3: "rgb24"}  # channels -> what swscale makes of a frame


@dataclass(frozen=True)
class Limits:
    """What one file may cost at most; a file past a limit is refused with a DataError.

    ``pixels`` of one frame, ``seconds`` of play time, ``frames`` that decode, ``time`` in seconds of wall clock.
    """

    pixels: int = 4096 * 4096
    seconds: float = 1800.0
    frames: int = 60_000
    time: float = 120.0


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Video:
    """The chosen frames, and what decoding the whole file showed.

    ``frames`` is uint8 (n, height, width, channels); ``indices[j]`` is the number in the file of ``frames[j]``;
    ``num_frames`` counts all frames that decode; ``damage`` is the error that ended the file early, or None.
    """

    frames: np.ndarray
    indices: np.ndarray
    num_frames: int
    width: int
    height: int
    damage: str | None


def import_av() -> ModuleType:
    """PyAV, or an error that says how to get it."""
    try:
        import av
    except ImportError:
        raise KronecellError("reading and writing video needs PyAV: pip install kronecell[video]") from None
    return av


def regular_file(path: str | os.PathLike[str]) -> os.stat_result:
    """The status of a readable file with something in it. Opening a pipe would block for ever, so look first."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise DataError("is not a regular file (a folder, pipe, socket or device)")
        if status.st_size == 0:
            raise DataError("is empty (0 bytes)")
        with open(path, "rb"):
            return status
    except OSError as error:
        raise DataError(f"cannot be opened: {error.strerror or error}") from None


def check_pixels(width: int, height: int, limits: Limits) -> None:
    if width * height > limits.pixels:
        raise DataError(f"has frames of {width} x {height}, over the limit of {limits.pixels} pixels (Limits.pixels)")


def in_time(deadline: float, limits: Limits) -> bool:
    if time.monotonic() > deadline:
        raise DataError(f"takes longer than the time limit of {limits.time:g} s (Limits.time)")
    return True


def convert(reformatter: Any, frame: Any, width: int, height: int, channels: int = 3) -> np.ndarray:
    """One frame as uint8 (height, width, channels), upright; swscale does the resize and the change of colours."""
    quarter_turns = round(getattr(frame, "rotation", 0) / 90) % 4  # counter-clockwise, from the display matrix
    if quarter_turns % 2:
        width, height = height, width
    small = reformatter.reformat(frame, width, height, PIXELS[channels], interpolation="BILINEAR", threads=1)
    plane = small.planes[0]
    rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[:height, : width * channels]  # rows are padded
    picture = rows.reshape(height, width, channels)
    return np.rot90(picture, quarter_turns).copy()


def short_reason(error: BaseException) -> str:
    """A short text on one line; PyAV's own messages repeat the path and the error number."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())
