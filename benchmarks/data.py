"""How fast the video path is, as ratios measured in one run: against ffmpeg, and against a plain memory copy.

    python -m benchmarks.data [--videos FOLDER] [--clips N]

Decode: every file to 160 x 120 RGB with one thread, by ``kronecell.data.decode`` and by ``ffmpeg -vf scale`` with the
same scaler. ffmpeg starts a process per file; the ratio is given with that start (what a user of ffmpeg pays) and
without it (the start-up, measured on a picture of 16 x 16 pixels, taken off). Read: batches of 32 x 6
frames from the warm store against copying the very same batch in memory. Both sides alternate, so that a busy machine
hurts both.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from kronecell import data

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
VIDEOS = REPOSITORY.parent / "shared" / "data" / "surveillance"
FFMPEG = ["ffmpeg", "-nostdin", "-v", "error", "-threads", "1", "-filter_threads", "1"]
SCALE = [
    "-an",
    "-sn",
    "-dn",
    "-vf",
    "scale=160:120:flags=bilinear",
    "-pix_fmt",
    "rgb24",
    "-f",
    "rawvideo",
    "-threads",
    "1",
]


def ffmpeg_seconds(path: Path, output: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([*FFMPEG, "-i", str(path), *output], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def startup_seconds() -> float:
    start = time.perf_counter()
    subprocess.run([*FFMPEG, "-f", "lavfi", "-i", "color=s=16x16", "-frames:v", "1", "-f", "null", "-"], check=True)
    return time.perf_counter() - start


def decode_ratio(paths: list[Path]) -> dict[str, float]:
    """Frames per second of both, over the same files, alternating file by file."""
    data.decode(paths[0])  # import PyAV before the clock starts
    ours = theirs = startup = 0.0
    frames = 0
    for path in paths:
        start = time.perf_counter()
        video = data.decode(path, threads=1)
        ours += time.perf_counter() - start
        frames += video.num_frames
        theirs += ffmpeg_seconds(path, [*SCALE, "-vsync", "passthrough", "-y", "/dev/null"])
        startup += startup_seconds()
    return {
        "files": len(paths),
        "frames": frames,
        "kronecell_frames_per_second": frames / ours,
        "ffmpeg_frames_per_second": frames / theirs,
        "ffmpeg_without_startup_frames_per_second": frames / (theirs - startup),
        "ratio": theirs / ours,
        "ratio_without_startup": (theirs - startup) / ours,
    }


def read_ratio(store: data.Store, rounds: int = 7) -> dict[str, float]:
    """Bytes per second of an epoch from the store, and of copying each of its batches in memory."""
    loader = data.Loader(store, range(len(store)), 32, seed=0)
    for _ in loader:  # every checksum is verified and every page is warm after this
        pass
    read, copied = [], []
    for epoch in range(rounds):
        loader.set_epoch(epoch)
        reading = copying = 0.0
        total, start = 0, time.perf_counter()
        for batch in loader:
            reading += time.perf_counter() - start
            start = time.perf_counter()
            copy = batch.x.clone()
            copying += time.perf_counter() - start
            total += copy.numel()
            start = time.perf_counter()
        read.append(total / reading)
        copied.append(total / copying)
    ratios = [a / b for a, b in zip(read, copied, strict=True)]
    return {
        "clips": len(store),
        "store_gigabytes_per_second": statistics.median(read) / 1e9,
        "memory_gigabytes_per_second": statistics.median(copied) / 1e9,
        "ratio": statistics.median(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--videos", type=Path, default=VIDEOS, help="a folder of classes")
    parser.add_argument("--clips", type=int, default=0, help="only the first N clips; 0 means all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dataset = data.find_dataset(options.videos)
    paths = [clip.path for clip in dataset.clips][: options.clips or None]
    if shutil.which("ffmpeg") is None:
        raise SystemExit("benchmarks.data needs the ffmpeg program (Debian: apt-get install ffmpeg)")
    version = subprocess.run(["ffmpeg", "-version"], capture_output=True, text=True).stdout.split()[2]
    with tempfile.TemporaryDirectory() as folder:
        store = data.prepare(dataset, Path(folder) / "store")
        result = {
            "command": "python -m benchmarks.data",
            "python": platform.python_version(),
            "ffmpeg": version,
            "av": data.video.import_av().__version__,
            "threads": 1,
            "decode": decode_ratio(paths),
            "read": read_ratio(store),
        }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "data.json").write_text(json.dumps(result, indent=1) + "\n")
    decode, read = result["decode"], result["read"]
    text = f"""# Video data: speed as ratios

Made by `python -m benchmarks.data` on {decode["files"]} files ({decode["frames"]} frames), one thread,
PyAV {result["av"]} against ffmpeg {version}; both sides alternate in one run.

| what | ours | theirs | ratio | wanted |
|---|---|---|---|---|
| decode + resize, against ffmpeg as called | {decode["kronecell_frames_per_second"]:.0f} frames/s \
| {decode["ffmpeg_frames_per_second"]:.0f} frames/s | {decode["ratio"]:.2f} | 0.9 |
| the same, ffmpeg's start-up taken off | {decode["kronecell_frames_per_second"]:.0f} frames/s \
| {decode["ffmpeg_without_startup_frames_per_second"]:.0f} frames/s | {decode["ratio_without_startup"]:.2f} | 0.9 |
| batches from the warm store, against memory copy | {read["store_gigabytes_per_second"]:.1f} GB/s \
| {read["memory_gigabytes_per_second"]:.1f} GB/s | {read["ratio"]:.2f} | 0.5 |
"""
    (RESULTS / "data.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
