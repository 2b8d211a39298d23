"""Clips that are not videos: folders of pictures, one a frame, and arrays in .npy or .npz files."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kronecell.data.frames import PIXELS, Limits, Video, check_pixels, convert, import_av, in_time, short_reason
from kronecell.errors import DataError, printable

PICTURE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
ARRAY_SUFFIXES = frozenset({".npy", ".npz"})
# By content, not by name. The picture goes straight to its decoder: no demuxer, which could open other files.
CODECS = {b"\x89PNG": "png", b"\xff\xd8": "mjpeg", b"BM": "bmp", b"RIFF": "webp", b"P6": "ppm", b"P5": "pgm"}
CODECS |= {b"II*\0": "tiff", b"MM\0*": "tiff"}

Choose = Callable[[int], "Sequence[int] | np.ndarray"]


def is_picture(name: str) -> bool:
    """Whether a file name is that of a picture."""
    return os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES


def is_array(path: str | os.PathLike[str]) -> bool:
    """Whether a file name is that of an array."""
    return os.path.splitext(os.fspath(path))[1].lower() in ARRAY_SUFFIXES


def natural(name: str) -> list[Any]:
    """The key that sorts frame2 before frame10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def picture_names(folder: str | os.PathLike[str]) -> list[str]:
    """The pictures of a folder in the order of their names, numbers counted as numbers."""
    names = [name for name in os.listdir(folder) if is_picture(name) and not name.startswith(".")]
    return sorted(names, key=lambda name: (natural(name), name))


def source_status(path: str | os.PathLike[str]) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of every file of a clip: whether it changed while it was read."""
    try:
        if not os.path.isdir(path):
            status = os.stat(path)
            return (("", status.st_size, status.st_mtime_ns),)
        found = [(name, os.stat(os.path.join(path, name))) for name in picture_names(path)]
    except OSError as error:
        raise DataError(f"cannot be opened: {error.strerror or error}") from None
    return tuple((name, status.st_size, status.st_mtime_ns) for name, status in found)


def source_hash(path: str | os.PathLike[str]) -> tuple[int, str]:
    """Bytes and SHA-256 of a clip; a folder's is over the names and the bytes of its pictures."""
    if not os.path.isdir(path):
        return os.path.getsize(path), _hash_file(path)
    digest, size = hashlib.sha256(), 0
    for name in picture_names(path):
        file = os.path.join(path, name)
        digest.update(f"{name}\0{_hash_file(file)}\n".encode("utf-8", "surrogateescape"))
        size += os.path.getsize(file)
    return size, digest.hexdigest()


def _hash_file(path: str | os.PathLike[str]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_pictures(
    folder: str | os.PathLike[str], size: tuple[int, int, int], choose: Choose | None, limits: Limits, deadline: float
) -> Video:
    """The pictures of a folder as frames; one that cannot be read is left out and named in ``damage``."""
    names = picture_names(folder)
    if not names:
        raise DataError(f"holds no picture ({', '.join(sorted(PICTURE_SUFFIXES))})")
    if len(names) > limits.frames:
        raise DataError(f"has more than {limits.frames} frames; raise Limits.frames to allow it")
    reformatter = import_av().video.reformatter.VideoReformatter()
    small: list[np.ndarray] = []
    bad, source = [], (0, 0)
    for name in names:
        in_time(deadline, limits)
        try:
            frame = _picture(os.path.join(folder, name), limits)
        except DataError as error:
            bad.append(f"{printable(name)} {error}")
            continue
        source = source if small else (frame.width, frame.height)
        small.append(convert(reformatter, frame, *size))
    if not small:
        raise DataError(f"not one of {len(names)} pictures can be read; first: {bad[0]}")
    damage = f"{len(bad)} of {len(names)} pictures left out; first: {bad[0]}" if bad else None
    return _chosen(small, choose, source, damage)


def _picture(path: str, limits: Limits) -> Any:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would block for ever
            raise DataError("is not a regular file")
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise DataError(f"cannot be opened: {error.strerror or error}") from None
    codec = next((name for magic, name in CODECS.items() if content.startswith(magic)), None)
    if codec is None:
        raise DataError("is empty (0 bytes)" if not content else "is not a picture that can be read here")
    av = import_av()
    try:
        context = av.CodecContext.create(codec, "r")
        context.options = {"max_pixels": str(limits.pixels)}
        context.thread_count = 1
        frames = context.decode(av.Packet(content)) or context.decode(None)
    except Exception as error:  # any failure inside the decoder is the file's
        raise DataError(f"cannot be decoded: {short_reason(error)}") from None
    if not frames:
        raise DataError("cannot be decoded: it ends early")
    check_pixels(frames[0].width, frames[0].height, limits)
    return frames[0]


def read_array(
    path: str | os.PathLike[str], size: tuple[int, int, int], choose: Choose | None, limits: Limits, deadline: float
) -> Video:
    """The frames of an array (time, height, width[, channels])."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if isinstance(array, np.lib.npyio.NpzFile):
            names = array.files
            if len(names) != 1 and "frames" not in names:
                raise DataError(f"holds the arrays {', '.join(names) or 'none'}; name the frames 'frames'")
            array = array["frames" if "frames" in names else names[0]]
    except DataError:
        raise
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"cannot be read: {short_reason(error)}") from None
    except Exception as error:  # zipfile has errors of its own
        raise DataError(f"cannot be read: {short_reason(error)}") from None
    array = _time_first(array)
    check_pixels(array.shape[2], array.shape[1], limits)
    if len(array) > limits.frames:
        raise DataError(f"has more than {limits.frames} frames; raise Limits.frames to allow it")
    numbers = np.arange(len(array)) if choose is None else np.unique(np.asarray(choose(len(array)), dtype=np.int64))
    small = []
    for number in numbers:
        in_time(deadline, limits)
        small.append(resize(to_bytes(array[number : number + 1])[0], *size))
    height, width = array.shape[1:3]
    return Video(np.stack(small), numbers, len(array), width, height, None)


def to_bytes(array: np.ndarray) -> np.ndarray:
    """Frames as uint8 (time, height, width, 1 or 3), from bytes or from floats between 0 and 1."""
    array = _time_first(array)
    if array.ndim == 3:
        array = array[..., None]
    array = array[..., :3] if array.shape[-1] == 4 else array[..., :1] if array.shape[-1] == 2 else array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if array.dtype.kind == "f":
        if not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
            raise DataError("has floats outside 0 to 1; give bytes (uint8, 0 to 255) or floats from 0 to 1")
        return np.rint(array * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise DataError(f"has numbers of type {array.dtype}; give bytes (uint8, 0 to 255) or floats from 0 to 1")
    return np.ascontiguousarray(array)


def _time_first(array: np.ndarray) -> np.ndarray:
    """(time, height, width[, channels]); channels before the height, as torch has them, are moved to the end."""
    if array.ndim == 4 and array.shape[-1] not in (1, 2, 3, 4) and array.shape[1] in (1, 3):
        array = np.moveaxis(array, 1, -1)
    if array.ndim not in (3, 4) or 0 in array.shape or (array.ndim == 4 and array.shape[-1] not in (1, 2, 3, 4)):
        raise DataError(f"has shape {tuple(array.shape)}; expected (time, height, width) or (time, height, width, 3)")
    return array


def resize(picture: np.ndarray, width: int, height: int, channels: int) -> np.ndarray:
    """A uint8 picture (height, width, 1 or 3) of another size and number of channels, by the scaler of videos."""
    given = picture.shape[-1]
    if picture.shape[:2] == (height, width) and given == channels:
        return picture
    if picture.shape[:2] == (height, width) and given == 1:
        return np.repeat(picture, channels, axis=-1)
    av = import_av()
    source = np.ascontiguousarray(picture[..., 0] if given == 1 else picture)
    frame = av.VideoFrame.from_ndarray(source, format=PIXELS[given])
    return convert(av.video.reformatter.VideoReformatter(), frame, width, height, channels)


def _chosen(small: Sequence[np.ndarray], choose: Choose | None, source: tuple[int, int], damage: str | None) -> Video:
    count = len(small)
    numbers = np.arange(count) if choose is None else np.unique(np.asarray(choose(count), dtype=np.int64))
    if len(numbers) and (numbers[0] < 0 or numbers[-1] >= count):
        raise DataError(f"frames were chosen outside 0 to {count - 1}")
    return Video(np.stack([small[i] for i in numbers]), numbers, count, source[0], source[1], damage)
