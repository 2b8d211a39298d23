"""A newcomer's first hour: the tutorial, the notebook, and every command that is shown, in a terminal and in a pipe."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import save_file

from kronecell.cli.main import build
from tests.test_docs import FENCE, ROOT, commands

for package in ("av", "matplotlib", "onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package)

COLUMNS = 80
COMMAND = [sys.executable, "-m", "kronecell"]
EXECUTE = """
import nbclient, nbformat
notebook = nbformat.read("tutorial.ipynb", 4)
nbclient.NotebookClient(notebook, timeout=600).execute()
nbformat.write(notebook, "done.ipynb")
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "100"}


def in_terminal(folder: Path, *words: str, stop_at: str = "") -> tuple[int, str]:
    """Exit code and everything that a terminal of 80 columns was sent; Ctrl-C when `stop_at` is seen."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    settings = {name: value for name, value in environment().items() if name != "COLUMNS"}
    process = subprocess.Popen(
        [*COMMAND, *words], cwd=folder, env={**settings, "TERM": "xterm"}, stdin=inner, stdout=inner, stderr=inner
    )
    os.close(inner)
    seen, stopped = b"", False
    while True:
        try:
            block = os.read(outer, 65536)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        seen += block
        if stop_at and not stopped and stop_at.encode() in seen:
            process.send_signal(signal.SIGINT)
            stopped = True
    os.close(outer)
    return process.wait(), seen.decode()


def kronecell(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], cwd=folder, env=environment(), capture_output=True, text=True)


@pytest.mark.slow
def test_the_tutorial_runs_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "__main__"}
    ran = 0
    for kind, text in FENCE.findall((ROOT / "docs" / "tutorial.md").read_text()):
        if kind == "toml":
            (tmp_path / "mine.toml").write_text(text)
        elif kind == "python":  # the blocks follow each other in one session
            exec(compile(text, "tutorial", "exec"), scope)
            ran += 1
        elif kind == "sh":
            for line in text.strip().splitlines():
                done = kronecell(tmp_path, *shlex.split(line)[1:])
                assert done.returncode == 0, (line, done.stderr)
                assert "Traceback" not in done.stderr and "Warning" not in done.stderr, (line, done.stderr)
                ran += 1
    assert ran >= 15
    for name in ("report.html", "confusion.png", "mine.onnx", "mine.onnx.json", "small/model.safetensors"):
        assert (tmp_path / name).stat().st_size > 100, name


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason="the notebook's tools are not installed (make docs installs them)")
    notebook = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":  # a failed command would only show its message
            source = "".join(cell["source"])
            cell["source"] = re.sub(r"^(!.*)$", r"\1\nassert _exit_code == 0", source, flags=re.M)
    (tmp_path / "tutorial.ipynb").write_text(json.dumps(notebook))
    folder = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # where `kronecell` is
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE],
        cwd=tmp_path, env={**environment(), "PATH": folder}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outputs = "".join(
        "".join(output.get("text", ()))
        for cell in json.loads((tmp_path / "done.ipynb").read_text())["cells"]
        for output in cell.get("outputs", ())
    )
    assert "accuracy" in outputs and "checked in ONNX Runtime" in outputs


def write_pictures(clip: Path, folder: Path) -> None:
    """A few frames of a video as PNG files."""
    import av

    from kronecell.data import decode

    folder.mkdir(parents=True)
    for index, picture in enumerate(decode(clip, 64, 48, choose=lambda count: range(0, count, 4)).frames):
        context = av.CodecContext.create("png", "w")
        context.width, context.height, context.pix_fmt = 64, 48, "rgb24"
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
        packets = [*context.encode(frame), *context.encode(None)]
        (folder / f"{index}.png").write_bytes(b"".join(bytes(packet) for packet in packets))


@pytest.mark.slow
def test_three_commands_lead_from_real_files_to_a_confusion_matrix(shared_data: Path, tmp_path: Path) -> None:
    for name, pattern, most in (("surveillance", "*.mp4", 6), ("avletters", "*_1.mkv", 6)):
        for label in sorted(path.name for path in (shared_data / name).iterdir() if path.is_dir()):
            (tmp_path / name / label).mkdir(parents=True)
            for clip in sorted((shared_data / name / label).glob(pattern))[:most]:
                (tmp_path / name / label / clip.name).symlink_to(clip)
    for clip in (tmp_path / "surveillance").glob("*/*.mp4"):
        write_pictures(clip, tmp_path / "frames" / clip.parent.name / clip.stem)
    page = (ROOT / "docs" / "data.md").read_text()
    section = page.split("## From files to a confusion matrix")[1].split("\n## ")[0]
    steps = [text.strip().splitlines() for kind, text in FENCE.findall(section) if kind == "sh"]
    assert [len(lines) for lines in steps] == [3, 3, 3]
    for lines, classes in zip(steps, (2, 26, 2), strict=True):
        for line in lines:
            extra = ["--epochs", "1"] if " train " in line else []
            done = kronecell(tmp_path, *shlex.split(line)[1:], *extra)
            assert done.returncode == 0, (line, done.stderr)
        matrix = done.stdout.split("is \\ answered")[1]
        assert len(re.findall(r"^ +\d+ \w+", matrix, re.M)) == classes, matrix
        assert "95% interval" in done.stdout


@pytest.mark.slow
def test_in_a_terminal_the_bar_leaves_a_line_for_every_epoch_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    synthetic = ("data", "synthetic", "motions", "--clips-per-class", "2", "--groups", "2", "--frames", "6")
    assert kronecell(tmp_path, *synthetic, "--width", "32", "--height", "24").returncode == 0
    settings = 'format = "tt:r=2"\nwidth = 32\nheight = 24\nhidden = 16\nepochs = 30\nfolds = 2\n'
    (tmp_path / "own.toml").write_text(settings)
    words = ("train", "own.toml", "-d", "motions")
    code, text = in_terminal(tmp_path, *words, stop_at="epoch 2/30")
    assert code == 143 and "checkpoint saved" in text and "epoch 1/30" in text, text
    code, text = in_terminal(tmp_path, *words)
    assert code == 0 and "goes on in epoch" in text and "epoch 30/30" in text and "run directory" in text, text
    assert "epoch 1/30" not in text
    done = kronecell(tmp_path, *words)
    assert done.returncode == 0 and "was finished before" in done.stderr


# Every command that is shown ------------------------------------------------------------------------------------

# What is added to a command so that it ends soon; the rest is as it is shown.
SHORTER = {
    "demo": "--quick",
    "train": "--epochs 1",
    "sweep": "--dry-run",
    "data synthetic": "--clips-per-class 1 --groups 1 --frames 6 --width 32 --height 24",
    "paper figures": "--ranks 2",
    "paper parallel": "--repeats 1",
}


def shown() -> list[str]:
    """The commands of the README's blocks, and the example of every command."""
    lines = [line for line in commands(ROOT / "README.md") if "explore" not in line]  # it waits for a browser
    todo: list[tuple[str, Any]] = [("", typer.main.get_command(build()))]
    while todo:
        path, command = todo.pop(0)
        todo += [(f"{path} {name}".strip(), sub) for name, sub in getattr(command, "commands", {}).items()]
        for example in re.findall(r"Example: (.*?)(?:\n\n|\Z)", command.help or "", re.S):
            if path != "explore":
                lines += [line.strip() for line in " ".join(example.split()).split("&&")]
    return [*dict.fromkeys(lines)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all files that the commands name."""
    folder = tmp_path_factory.mktemp("hour")
    small = ("--clips-per-class", "2", "--groups", "2", "--frames", "8", "--width", "32", "--height", "24")
    (folder / "mine.toml").write_text(
        'format = "kcp:K=2,CA=2,CB=2"\nwidth = 32\nheight = 24\nhidden = 16\nepochs = 1\n'
    )
    for words in (
        ("data", "synthetic", "UCF11_updated_mpg", *small, "--container", "mpg"),
        ("data", "prepare", "UCF11_updated_mpg", "ucf11-store"),
        ("data", "prepare", "UCF11_updated_mpg", "my-store", "--width", "32", "--height", "24"),
        ("train", "mine.toml", "--data", "my-store"),
    ):
        done = kronecell(folder, *words)
        assert done.returncode == 0, (words, done.stderr)
    shutil.copytree(folder / "UCF11_updated_mpg", folder / "my-videos")
    for name, clip in zip(("clip.mp4", "other.mp4"), sorted(folder.glob("my-videos/*/*/*.mpg")), strict=False):
        shutil.copy(clip, folder / name)
    with zipfile.ZipFile(folder / "UCF11_updated_mpg.zip", "w") as archive:
        archive.write(folder / "clip.mp4", "UCF11_updated_mpg/up/v_up_01/v_up_01_01.mpg")
    save_file(torch.nn.ModuleDict({"rnn": torch.nn.LSTM(96, 32)}).state_dict(), folder / "model.safetensors")
    (folder / "mine.toml").unlink()  # `experiments copy` writes it
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_every_command_that_is_shown_works(place: Path, tmp_path: Path, terminal: bool) -> None:
    folder = tmp_path / "here"
    shutil.copytree(place, folder)
    lines = shown()
    assert len(lines) >= 30
    for line in lines:
        extra = next((more for name, more in SHORTER.items() if line.startswith(f"kronecell {name}")), "")
        words = shlex.split(f"{line} {extra}".replace(".rar", ".zip"))[1:]
        if terminal:
            code, text = in_terminal(folder, *words)
        else:
            done = kronecell(folder, *words)
            code, text = done.returncode, done.stdout + done.stderr
            assert "\x1b" not in text, (line, text)
        assert code == 0, (line, text)
        assert "Traceback" not in text and "Warning" not in text and text.strip(), (line, text)
        rules = re.findall(r"^-+(?:  -+)+\r?$", text, re.M)  # the line below the header of a table
        assert not terminal or all(len(rule.rstrip()) <= COLUMNS for rule in rules), (line, text)


@pytest.mark.slow
def test_explore_says_its_address_and_serves_the_page(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "explore", "--port", "0", "--no-browser"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = None
        while found is None:
            line = process.stdout.readline()
            assert line, "it ended without an address"
            found = re.search(r"http://127\.0\.0\.1:\d+\S*", line)
        with urllib.request.urlopen(found[0]) as answer:
            assert b"<title>" in answer.read()
    finally:
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=60)[0]
    assert "Traceback" not in rest
