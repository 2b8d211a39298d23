"""Real video files for the tests, written with PyAV."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import av
import numpy as np


def pictures(count: int, width: int = 64, height: int = 48, seed: int = 0) -> list[np.ndarray]:
    """Frames that differ: a bright bar at a place that depends on the frame's number."""
    noise = np.random.default_rng(seed).integers(0, 30, (height, width, 3))
    frames = []
    for number in range(count):
        frame = noise.astype(np.uint8)
        frame[:, number * 3 % width : number * 3 % width + 4] = 220
        frames.append(frame)
    return frames


def write_video(
    path: Path,
    frames: Iterable[np.ndarray],
    codec: str = "mpeg4",
    pix_fmt: str = "yuv420p",
    file_format: str | None = None,
    source: str = "rgb24",
) -> Path:
    """Encode frames to a real file."""
    frames = list(frames)
    with av.open(str(path), "w", format=file_format) as output:
        stream = output.add_stream(codec, rate=25)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pix_fmt
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format=source)):
                output.mux(packet)
        for packet in stream.encode(None):
            output.mux(packet)
    return path
