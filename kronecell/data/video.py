"""One video file to uint8 RGB frames of one size; every failure is a DataError that names the file and the reason.

Headers are unreliable (UCF11's say 0 frames, a truncated AVI still declares all of them), so frames are counted by
decoding them. The header is only used to refuse a file early: too many pixels, too long.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from kronecell.errors import DataError, KronecellError, printable

# Containers of moving pictures only. Without the list a text file named clip.mp4 can be a playlist that opens other
# files, goes to the network, or waits for ever for its next entry.
CONTAINERS = (
    "avi,mpeg,mpegvideo,mpegts,mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,flv,asf,ogg,m4v,h264,hevc,dv,mxf,nut,rm,gif,ivf"
)


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

    ``frames`` is uint8 (n, height, width, 3); ``indices[j]`` is the number in the file of ``frames[j]``; ``num_frames``
    counts all frames that decode; ``damage`` is the error that ended the file early, or None.
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


def decode(
    path: str | os.PathLike[str],
    width: int = 160,
    height: int = 120,
    choose: Callable[[int], Sequence[int] | np.ndarray] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    threads: int = 1,
) -> Video:
    """Decode a file and resize the frames that are needed to ``width`` x ``height``.

    ``choose(n)`` gives the frame numbers to keep of a file with n frames; None means all. A file that breaks off in the
    middle keeps the frames before the break (see ``Video.damage``); a file without a single frame is a DataError.
    The time limit is checked between packets; a decoder stuck inside one packet can only be ended by ending its
    process, which is what ``workers`` does.
    """
    name = printable(path)
    if width < 1 or height < 1:
        raise DataError(f"{name}: cannot resize to {width} x {height}; give a width and a height of at least 1")
    deadline = time.monotonic() + limits.time
    try:
        before = regular_file(path)
        video = _decode_chosen(os.path.abspath(path), width, height, choose, limits, threads, deadline)
        after = os.stat(path)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    except KronecellError:
        raise
    except Exception as error:  # any failure inside the decoder library is the file's
        raise DataError(f"{name}: cannot be decoded: {_reason(error)}") from None
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(f"{name}: changed while it was being read; run again when it is complete")
    return video


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


def _decode_chosen(
    path: str,
    width: int,
    height: int,
    choose: Callable[[int], Sequence[int] | np.ndarray] | None,
    limits: Limits,
    threads: int,
    deadline: float,
) -> Video:
    """Convert the frames chosen for a guessed length in one pass; a second pass only if the guess was wrong.

    The guess is the number of packets: reading them costs little, and it is right for all but damaged files.
    """
    chosen: set[int] | None = None
    if choose is not None:
        with _open(path, limits, threads, deadline) as (container, stream):
            guess = sum(1 for packet in container.demux(stream) if packet.size and _in_time(deadline, limits))
        chosen = {int(index) for index in choose(max(guess, 1))}
    kept, count, size, damage = _decode_pass(path, width, height, chosen, limits, threads, deadline)
    if count == 0:
        raise DataError(f"no frame can be decoded{': ' + damage if damage else ''}")
    if choose is not None:
        chosen = {int(index) for index in choose(count)}
        if any(index < 0 or index >= count for index in chosen):
            raise DataError(f"frames were chosen outside 0 to {count - 1}")
        if not chosen <= kept.keys():
            kept, again, size, damage = _decode_pass(path, width, height, chosen, limits, threads, deadline)
            if again != count:
                raise DataError(f"decodes to {count} frames, then to {again}; is it being written?")
        kept = {index: kept[index] for index in chosen}
    indices = np.array(sorted(kept), dtype=np.int64)
    frames = np.empty((len(indices), height, width, 3), dtype=np.uint8)
    for position, index in enumerate(indices):
        frames[position] = kept.pop(int(index))
    return Video(frames, indices, count, size[0], size[1], damage)


def _decode_pass(
    path: str, width: int, height: int, chosen: set[int] | None, limits: Limits, threads: int, deadline: float
) -> tuple[dict[int, np.ndarray], int, tuple[int, int], str | None]:
    """Decode from start to end; convert the chosen frames only. Returns them, the count, the size, the damage."""
    av = import_av()
    reformatter = av.video.reformatter.VideoReformatter()  # one per file: it keeps its scaler between frames
    kept: dict[int, np.ndarray] = {}
    count, size, damage = 0, (0, 0), None
    with _open(path, limits, threads, deadline) as (container, stream):
        try:
            for frame in container.decode(stream):
                _in_time(deadline, limits)
                _check_pixels(frame.width, frame.height, limits)  # the size may change in the middle of a file
                if count >= limits.frames:
                    raise DataError(f"has more than {limits.frames} frames; raise Limits.frames to allow it")
                if chosen is None or count in chosen:
                    kept[count] = _convert(reformatter, frame, width, height)
                size = size if count else (frame.width, frame.height)
                count += 1
        except DataError:
            raise
        except Exception as error:  # what decoded until here is good
            _in_time(deadline, limits)
            damage = _reason(error)
    return kept, count, size, damage


class _open:
    """A container and its video stream, checked against the limits before anything is decoded."""

    def __init__(self, path: str, limits: Limits, threads: int, deadline: float) -> None:
        self.path, self.limits, self.threads, self.deadline = path, limits, threads, deadline

    def __enter__(self) -> tuple[Any, Any]:
        av = import_av()
        patience = max(self.deadline - time.monotonic(), 0.001)
        self.container = av.open(
            self.path,
            # Frames larger than the cap are also refused inside the decoder, which allocates before we see a frame.
            options={"max_pixels": str(self.limits.pixels)},
            container_options={"format_whitelist": CONTAINERS, "protocol_whitelist": "file"},
            metadata_errors="replace",
            timeout=(patience, patience),
        )
        try:
            return self.container, self._stream()
        except BaseException:
            self.container.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.container.close()

    def _stream(self) -> Any:
        # A cover picture is a video stream of one frame; it is not a video.
        pictures = [stream for stream in self.container.streams.video if not _is_cover(stream)]
        if not pictures:
            raise DataError("has no video stream (is it audio only?)")
        stream = pictures[0]
        if stream.codec_context is None:
            raise DataError("uses a codec that this build of PyAV cannot decode")
        _check_pixels(stream.codec_context.width, stream.codec_context.height, self.limits)
        lengths = []
        if self.container.duration:
            lengths.append(self.container.duration / 1e6)
        if stream.duration and stream.time_base:
            lengths.append(float(stream.duration * stream.time_base))
        if lengths and min(lengths) > self.limits.seconds:  # the shorter: one of the two is often nonsense
            raise DataError(f"plays {min(lengths):.0f} s, the limit is {self.limits.seconds:.0f} s (Limits.seconds)")
        # Slice threads: frame threads deadlock in a process that was forked.
        stream.codec_context.thread_type = "SLICE"
        stream.codec_context.thread_count = self.threads
        return stream


def _is_cover(stream: Any) -> bool:
    disposition = getattr(stream, "disposition", None)
    return disposition is not None and "attached_pic" in str(disposition)


def _check_pixels(width: int, height: int, limits: Limits) -> None:
    if width * height > limits.pixels:
        raise DataError(f"has frames of {width} x {height}, over the limit of {limits.pixels} pixels (Limits.pixels)")


def _in_time(deadline: float, limits: Limits) -> bool:
    if time.monotonic() > deadline:
        raise DataError(f"takes longer than the time limit of {limits.time:g} s (Limits.time)")
    return True


def _convert(reformatter: Any, frame: Any, width: int, height: int) -> np.ndarray:
    """One frame as uint8 (height, width, 3), upright; swscale does the resize and the change of colour space."""
    quarter_turns = round(getattr(frame, "rotation", 0) / 90) % 4  # counter-clockwise, from the display matrix
    if quarter_turns % 2:
        width, height = height, width
    small = reformatter.reformat(frame, width, height, "rgb24", interpolation="BILINEAR", threads=1)
    plane = small.planes[0]
    rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[:height, : width * 3]  # rows are padded
    picture = rows.reshape(height, width, 3)
    return np.rot90(picture, quarter_turns).copy()


def _reason(error: BaseException) -> str:
    """A short text on one line; PyAV's own messages repeat the path and the error number."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())
