"""Exported files on other processors, in emulators: a Cortex-M4 and M7 without an operating system, and aarch64."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import kronecell as kc
from kronecell.data import write_synthetic
from kronecell.deploy.c_source.check import compare, harness, inputs
from kronecell.deploy.c_source.parts import take_apart
from kronecell.training.predict import Prediction, read_segments
from kronecell.training.run import run, run_folder
from tests.deploy.c_cases import STRICT, drawn
from tests.training_cases import make_store, tiny

BOARD = Path(__file__).resolve().parents[2] / "examples" / "board"
ARM, QEMU_ARM = "arm-none-eabi-gcc", "qemu-system-arm"
AARCH64, QEMU_AARCH64 = "aarch64-linux-gnu-gcc", "qemu-aarch64"
BOARDS = {
    "Cortex-M4": ("mps2-an386", "-mcpu=cortex-m4", "-mfpu=fpv4-sp-d16"),
    "Cortex-M7": ("mps2-an500", "-mcpu=cortex-m7", "-mfpu=fpv5-d16"),
}


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def on_board(model: kc.VideoClassifier, clips: Sequence[Path], folder: Path, board: str) -> tuple[np.ndarray, int, int]:
    """Chances of every clip, and bytes of flash and of RAM beside a frame, stack included."""
    machine, *processor = BOARDS[board]
    p = model.preprocessing
    assert p is not None
    (folder / "frames.bin").write_bytes(b"".join(read_segments(clip, p)[0].numpy().tobytes() for clip in clips))
    sizes = [f"-DSEGMENTS={p.segments}", f"-DSTEPS={p.frames}"]
    flags = [*processor, "-mthumb", "-mfloat-abi=hard", "-O2", "-Wall", "-Wextra", "-Werror", *sizes, "-I", str(folder)]
    link = ["-nostartfiles", "--specs=nosys.specs", "-T", str(BOARD / "board.ld")]
    sources = [str(BOARD / "startup.c"), str(BOARD / "main.c"), str(folder / "clips.c")]
    subprocess.run([ARM, *flags, *link, *sources, "-o", str(folder / "board.elf")], check=True)
    emulator = [QEMU_ARM, "-M", machine, "-nographic", "-monitor", "none", "-serial", "none"]
    semihosting = ["-semihosting-config", "enable=on,target=native", "-kernel", "board.elf"]
    subprocess.run([*emulator, *semihosting], cwd=folder, check=True, timeout=900, stdin=subprocess.DEVNULL)
    printed = (folder / "chances.bin").read_bytes()
    chances = np.frombuffer(printed[:-4], np.float32).reshape(len(clips), -1)
    listed = subprocess.run(
        ["arm-none-eabi-size", "-A", "-d", str(folder / "board.elf")], check=True, capture_output=True, text=True
    ).stdout
    section = {name: int(size) for name, size in re.findall(r"^\.(\w+)\s+(\d+)", listed, re.M)}
    stack = int.from_bytes(printed[-4:], "little")
    ram = section["bss"] + section.get("data", 0) - p.input_size + stack
    return chances, section["text"] + section.get("data", 0), ram


def assert_answers(chances: np.ndarray, expected: Sequence[Prediction]) -> None:
    wanted = np.array([answer.chances for answer in expected])
    np.testing.assert_allclose(chances, wanted, atol=1e-4)
    assert [answer.classes[int(k)] for answer, k in zip(expected, chances.argmax(1), strict=True)] == [
        answer.label for answer in expected
    ]


@needs(ARM, QEMU_ARM)
@pytest.mark.parametrize("board", [*BOARDS])
def test_a_trained_classifier_answers_on_a_board_as_predict_does(board: str, tmp_path: Path) -> None:
    pytest.importorskip("av")
    store = make_store(tmp_path)
    experiment = tiny(epochs=1, pixel_mean=0.3, input_gain=3.0)
    run(experiment, store, tmp_path / "runs", show=False)
    model = kc.quantize(kc.load(run_folder(tmp_path / "runs", experiment, 0, 0)), bits=8)
    exported = kc.export_c(model, tmp_path, "clips", flash=32 * 1024, ram=8 * 1024)
    clips = [clip.path for clip in store.clips][::4]
    chances, flash, ram = on_board(model, clips, tmp_path, board)
    assert_answers(chances, model.predict(clips))
    assert flash <= exported.report.flash and ram <= exported.report.ram + 1024


@needs(ARM, QEMU_ARM)
@pytest.mark.slow
def test_the_paper_s_network_fits_a_board(tmp_path: Path) -> None:
    """UCF11's KCP with a low-rank U at 8 bits: 57,600 pixels in less than 100 KB of flash and 16 KB of RAM."""
    pytest.importorskip("av")
    torch.manual_seed(0)
    kcp = "kcp:m=8x20x20x18,n=4x4x4x4,K=4,CA=4,CB=2"
    sizes = kc.Preprocessing(segments=2)
    model = kc.VideoClassifier(
        57600, 256, 11, input_format=kcp, hidden_format="lowrank:r=16", shared=True, pixel_mean=0.3, input_gain=9.0,
        preprocessing=sizes,
    )  # fmt: skip
    with torch.no_grad():
        model.classifier.weight.mul_(20)  # an untrained network has an opinion, too
        model.classifier.bias.zero_()
    small = kc.quantize(model.eval(), bits=8)
    kc.export_c(small, tmp_path, "clips", flash=100 * 1024, ram=16 * 1024)
    videos = write_synthetic(tmp_path / "videos", 5, 5, (160, 120), 12, progress=False)
    clips = sorted(videos.rglob("*.avi"))[:52]
    chances, flash, ram = on_board(small, clips, tmp_path, "Cortex-M4")
    expected = small.predict(clips)
    assert_answers(chances, expected)
    assert len({answer.label for answer in expected}) > 2
    assert flash < 100 * 1024 and ram < 16 * 1024


@needs(AARCH64, QEMU_AARCH64)
@pytest.mark.parametrize("seed", [1, 4, 9, 14])
def test_a_file_runs_on_aarch64(seed: int, tmp_path: Path) -> None:
    """With -O3, so that the compiler makes NEON of the loops."""
    what, module = drawn(seed)
    kc.export_c(module, tmp_path, "net")
    network = take_apart(module)
    (tmp_path / "main.c").write_text(harness(network, "net"))
    program = tmp_path / "program"
    built = [str(tmp_path / "net.c"), str(tmp_path / "main.c"), "-o", str(program)]
    subprocess.run([AARCH64, *STRICT, "-O3", "-static", *built], check=True)
    x = inputs(network)
    ran = subprocess.run([QEMU_AARCH64, str(program)], input=x.numpy().tobytes(), check=True, capture_output=True)
    difference = compare(network, x, torch.from_numpy(np.frombuffer(ran.stdout, np.float32).copy()))
    assert difference < 1e-4, what
