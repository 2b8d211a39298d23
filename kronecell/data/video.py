"""One clip to uint8 frames of one size; every failure is a DataError that names the file and the reason.

A clip is a video file; folders of pictures and arrays are read by ``stills``.

Headers are unreliable (UCF11's say 0 frames, a truncated AVI still declares all of them), so frames are counted by
decoding them. The header is only used to refuse a file early: too many pixels, too long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kronecell.data.frames import (
    DEFAULT_LIMITS,
    PIXELS,
    Limits,
    Video,
    check_pixels,
    convert,
    import_av,
    in_time,
    regular_file,
    short_reason,
)
from kronecell.data.stills import is_array, read_array, read_pictures, source_status
from kronecell.errors import DataError, KronecellError, printable

__all__ = ["DEFAULT_LIMITS", "Limits", "Video", "decode", "import_av"]

# Containers of moving pictures only. Without the list a text file named clip.mp4 can be a playlist that opens other
# files, goes to the network, or waits for ever for its next entry.
CONTAINERS = (
    "avi,mpeg,mpegvideo,mpegts,mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,flv,asf,ogg,m4v,h264,hevc,dv,mxf,nut,rm,gif,ivf"
)


def decode(
    path: str | os.PathLike[str],
    width: int = 160,
    height: int = 120,
    choose: Callable[[int], Sequence[int] | np.ndarray] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    threads: int = 1,
    channels: int = 3,
) -> Video:
    """Decode a clip and resize the frames that are needed to ``width`` x ``height``; one channel is grey.

    ``path`` is a video, a folder of pictures in the order of their names, or a .npy or .npz file.

    ``choose(n)`` gives the frame numbers to keep of a file with n frames; None means all. A file that breaks off in the
    middle keeps the frames before the break (see ``Video.damage``); a file without a single frame is a DataError.
    The time limit is checked between packets; a decoder stuck inside one packet can only be ended by ending its
    process, which is what ``workers`` does.
    """
    name = printable(path)
    if width < 1 or height < 1:
        raise DataError(f"{name}: cannot resize to {width} x {height}; give a width and a height of at least 1")
    if channels not in PIXELS:
        raise DataError(f"channels must be 1 (grey) or 3 (colour), got {channels}")
    deadline = time.monotonic() + limits.time
    try:
        before = source_status(path)
        size = width, height, channels
        if os.path.isdir(path):
            video = read_pictures(path, size, choose, limits, deadline)
        elif is_array(path):
            video = read_array(path, size, choose, limits, deadline)
        else:
            regular_file(path)
            video = _decode_chosen(os.path.abspath(path), size, choose, limits, threads, deadline)
        after = source_status(path)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    except KronecellError:
        raise
    except Exception as error:  # any failure inside the decoder library is the file's
        raise DataError(f"{name}: cannot be decoded: {short_reason(error)}") from None
    if before != after:
        raise DataError(f"{name}: changed while it was being read; run again when it is complete")
    return video


def _decode_chosen(
    path: str,
    size: tuple[int, int, int],
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
            guess = sum(1 for packet in container.demux(stream) if packet.size and in_time(deadline, limits))
        chosen = {int(index) for index in choose(max(guess, 1))}
    kept, count, source, damage = _decode_pass(path, size, chosen, limits, threads, deadline)
    if count == 0:
        raise DataError(f"no frame can be decoded{': ' + damage if damage else ''}")
    if choose is not None:
        chosen = {int(index) for index in choose(count)}
        if any(index < 0 or index >= count for index in chosen):
            raise DataError(f"frames were chosen outside 0 to {count - 1}")
        if not chosen <= kept.keys():
            kept, again, source, damage = _decode_pass(path, size, chosen, limits, threads, deadline)
            if again != count:
                raise DataError(f"decodes to {count} frames, then to {again}; is it being written?")
        kept = {index: kept[index] for index in chosen}
    indices = np.array(sorted(kept), dtype=np.int64)
    width, height, channels = size
    frames = np.empty((len(indices), height, width, channels), dtype=np.uint8)
    for position, index in enumerate(indices):
        frames[position] = kept.pop(int(index))
    return Video(frames, indices, count, source[0], source[1], damage)


def _decode_pass(
    path: str, size: tuple[int, int, int], chosen: set[int] | None, limits: Limits, threads: int, deadline: float
) -> tuple[dict[int, np.ndarray], int, tuple[int, int], str | None]:
    """Decode from start to end; convert the chosen frames only. Returns them, the count, the size, the damage."""
    av = import_av()
    reformatter = av.video.reformatter.VideoReformatter()  # one per file: it keeps its scaler between frames
    kept: dict[int, np.ndarray] = {}
    count, source, damage = 0, (0, 0), None
    with _open(path, limits, threads, deadline) as (container, stream):
        try:
            for frame in container.decode(stream):
                in_time(deadline, limits)
                check_pixels(frame.width, frame.height, limits)  # the size may change in the middle of a file
                if count >= limits.frames:
                    raise DataError(f"has more than {limits.frames} frames; raise Limits.frames to allow it")
                if chosen is None or count in chosen:
                    kept[count] = convert(reformatter, frame, *size)
                source = source if count else (frame.width, frame.height)
                count += 1
        except DataError:
            raise
        except Exception as error:  # what decoded until here is good
            in_time(deadline, limits)
            damage = short_reason(error)
    return kept, count, source, damage


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
        check_pixels(stream.codec_context.width, stream.codec_context.height, self.limits)
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
