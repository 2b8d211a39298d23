"""A data set that needs no download: real video files of moving shapes, eleven motions, in UCF11's own layout.

The class is in the motion alone. Position, size and light each come from one distribution that is the same for all
classes and all frames; a motion moves one of them in a saw-tooth, which has the same uniform distribution as standing
still. So no single frame says more than chance, while six frames in order do. A clip repeats its motion with a
new shape at a new place for every tenth of the clip: many different examples at the cost of few files.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kronecell.data.progress import track
from kronecell.data.video import import_av
from kronecell.data.workers import available_cores
from kronecell.deploy.atomic import write_atomically
from kronecell.deploy.records import read_json, table, truth
from kronecell.errors import DataError, printable

MOTIONS = (
    "blink",
    "bounce",
    "clockwise",
    "counter_clockwise",
    "down",
    "grow",
    "left",
    "right",
    "shrink",
    "still",
    "up",
)
CONTAINERS = {"avi": ("avi", "mpeg4"), "mpg": ("mpeg", "mpeg1video")}  # extension: container, codec
COLOURS = np.array([[255, 220, 60], [90, 230, 255], [255, 140, 230]], dtype=np.float32)
BACKGROUNDS = np.array([[45, 45, 90], [30, 75, 45], [75, 45, 45]], dtype=np.float32)
RECORD = "synthetic.json"
RATE = 25  # MPEG-1 knows only a few frame rates; this is one
PERIOD = 7 / 6  # of a motion, in repetitions: most windows then see the saw-tooth fall back at most once


def write_synthetic(
    path: str | os.PathLike[str],
    clips_per_class: int = 25,
    groups: int = 5,
    size: tuple[int, int] = (160, 120),
    frames: int = 60,
    seed: int = 0,
    container: str = "avi",
    progress: bool = True,
) -> Path:
    """Write the data set below ``path`` as class/v_class_GG/v_class_GG_CC.avi (or .mpg) and return ``path``.

    The same arguments give the same files; a set that is already there is kept. ``size`` is (width, height).
    """
    root = Path(path)
    width, height = size
    if container not in CONTAINERS:
        raise DataError(f"unknown container '{container}'; use {' or '.join(CONTAINERS)}")
    if min(clips_per_class, groups, frames) < 1 or groups > clips_per_class or groups > 99:
        raise DataError(f"cannot make {groups} groups of {clips_per_class} clips of {frames} frames")
    if width % 2 or height % 2 or min(width, height) < 16 or max(width, height) > 4094:
        raise DataError(f"size must be even, from 16 to 4094, got {width} x {height}")
    record = {"clips_per_class": clips_per_class, "groups": groups, "size": [width, height], "frames": frames}
    record |= {"seed": seed, "container": container, "version": 1}
    if _already_written(root, record):
        return root
    try:
        root.mkdir(parents=True, exist_ok=True)
        _write_record(root, record, complete=False)
        jobs = [(motion, clip) for motion in MOTIONS for clip in range(clips_per_class)]
        names = [_clip_path(root, motion, clip, groups, container) for motion, clip in jobs]
        for name in names:
            name.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{printable(root)}: cannot be written: {error.strerror or error}") from None

    def write(position: int) -> None:
        motion, clip = jobs[position]
        generator = np.random.default_rng([seed, MOTIONS.index(motion), clip])
        pictures = _pictures(motion, clip, clip % groups, width, height, frames, generator)
        content = _encode(pictures, width, height, container)
        write_atomically(names[position], lambda temporary: temporary.write_bytes(content))

    # Threads: the encoder and numpy work outside the interpreter lock.
    with ThreadPoolExecutor(available_cores()) as pool:
        for _ in track(pool.map(write, range(len(jobs))), len(jobs), "writing videos", progress):
            pass
    _write_record(root, record, complete=True)
    return root


def _already_written(root: Path, record: dict[str, object]) -> bool:
    """Whether this very set is there. Anything else in the folder may be the user's work: an error."""
    if root.exists() and not root.is_dir():
        raise DataError(f"{printable(root)}: exists and is not a folder; give a new folder")
    if not root.exists() or not any(root.iterdir()):
        return False
    try:
        found = read_json(root / RECORD, table({"complete": truth}), DataError)
        complete = found.pop("complete")
    except DataError:
        found, complete = None, False
    if found != record:
        raise DataError(f"{printable(root)}: holds something else (no {RECORD} of this set); give a new folder")
    return bool(complete)


def _write_record(root: Path, record: dict[str, object], complete: bool) -> None:
    text = json.dumps({**record, "complete": complete}) + "\n"
    write_atomically(root / RECORD, lambda temporary: temporary.write_text(text))


def _clip_path(root: Path, motion: str, clip: int, groups: int, container: str) -> Path:
    group = f"v_{motion}_{clip % groups + 1:02d}"
    return root / motion / group / f"{group}_{clip // groups + 1:02d}.{container}"


def _pictures(
    motion: str, clip: int, group: int, width: int, height: int, frames: int, generator: np.random.Generator
) -> Iterator[np.ndarray]:
    """The frames of one clip, uint8 (height, width, 3). Colours go round-robin: every class has all equally often."""
    across, down = np.meshgrid(np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32))
    unit = np.float32(min(width / 160, height / 120))
    colour = COLOURS[clip % 3]
    shade = 1 + 0.2 * np.sin(2 * np.pi * (across / width + generator.random()))
    background = BACKGROUNDS[clip // 3 % 3] * shade[..., None].astype(np.float32)
    noise = generator.normal(0, 4 + group % 3 * 2, (height, 2 * width, 1)).astype(np.float32)
    length = max(6, round(frames / 10))  # of one repetition: as long as one of the ten validation clips
    for start in range(0, frames, length):
        shape = int(generator.integers(3))
        states = _states(motion, min(length, frames - start), length, generator)
        for x, y, area, light in states:
            right = np.abs(across - width * (0.5 + 0.75 * (x - 0.5)))
            below = np.abs(down - height * (0.5 + 0.67 * (y - 0.5)))
            distance = (np.hypot(right, below), np.maximum(right, below) * 1.13, (right + below) * 0.8)[shape]
            reach = unit * np.sqrt(12**2 + (72**2 - 12**2) * area)  # uniform in area, not in radius
            mask = np.clip((reach - distance) / 4 + 0.5, 0, 1)[..., None]
            picture = (background + mask * (colour - background)) * (0.5 + 0.5 * light)
            shift = int(generator.integers(width))
            picture += noise[:, shift : shift + width]
            yield np.clip(picture, 0, 255).astype(np.uint8)


def _states(motion: str, count: int, length: int, generator: np.random.Generator) -> np.ndarray:
    """(count, 4): x, y, area and light of each frame of one repetition, all in [0, 1] and uniform over it."""
    x, y, area, light = (np.full(count, value) for value in generator.random(4).astype(np.float32))
    time = np.arange(count)
    phase = generator.uniform(0.8, 1.25) * time / (PERIOD * length)  # in periods of the motion
    if motion == "left":
        x = (x - phase) % 1
    elif motion == "right":
        x = (x + phase) % 1
    elif motion == "up":
        y = (y - phase) % 1
    elif motion == "down":
        y = (y + phase) % 1
    elif motion in ("clockwise", "counter_clockwise"):
        angle = 2 * np.pi * (x + (phase if motion == "clockwise" else -phase))
        reach = 0.25 + 0.25 * y
        x, y = 0.5 + reach * np.cos(angle), 0.5 + reach * np.sin(angle)  # y points down
    elif motion == "grow":
        area = (area + phase) % 1
    elif motion == "shrink":
        area = (area - phase) % 1
    elif motion == "bounce":
        y = np.abs((2 * y + 4 * phase + 1) % 2 - 1)
    elif motion == "blink":
        dark = (6 * time // length + int(2 * light[0])) % 2
        light = np.where(dark, 0.5 * light, 0.5 + 0.5 * light)
    states = np.stack([x, y, area, light], axis=1)
    # Jitter, for all classes: a position that never moves could be memorised.
    states += generator.uniform(-1, 1, states.shape) * (0.12, 0.12, 0.05, 0.05)
    return (1 - np.abs(states % 2 - 1)).astype(np.float32)  # reflected at 0 and 1, which keeps it uniform


def _encode(pictures: Iterator[np.ndarray], width: int, height: int, container: str) -> bytes:
    av = import_av()
    file_format, codec = CONTAINERS[container]
    target = io.BytesIO()
    with av.open(target, "w", format=file_format, options={"fflags": "+bitexact"}) as output:
        stream = output.add_stream(codec, rate=RATE)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.bit_rate = 40 * width * height
        stream.codec_context.thread_count = 1
        for picture in pictures:
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                output.mux(packet)
        for packet in stream.encode(None):
            output.mux(packet)
    return target.getvalue()
