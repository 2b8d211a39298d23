"""A newcomer's first hour: every command and every block of the tutorial, in order, in an empty folder."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.test_docs import FENCE, ROOT

for package in ("av", "matplotlib", "onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package)

COMMAND = [sys.executable, "-m", "kronecell"]
EXECUTE = """
import nbclient, nbformat
notebook = nbformat.read("tutorial.ipynb", 4)
nbclient.NotebookClient(notebook, timeout=600).execute()
nbformat.write(notebook, "done.ipynb")
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "100"}


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


@pytest.mark.slow
def test_folders_of_png_frames_made_of_real_videos_train_like_the_videos(shared_data: Path, tmp_path: Path) -> None:
    import av

    from kronecell.data import decode

    for label in ("fight", "noFight"):
        for number, clip in enumerate(sorted((shared_data / "surveillance" / label).glob("*.mp4"))[:6]):
            folder = tmp_path / "frames" / label / f"{number}"
            folder.mkdir(parents=True)
            (tmp_path / "videos" / label).mkdir(parents=True, exist_ok=True)
            (tmp_path / "videos" / label / clip.name).write_bytes(clip.read_bytes())
            for index, picture in enumerate(decode(clip, 64, 48, choose=lambda count: range(0, count, 4)).frames):
                context = av.CodecContext.create("png", "w")
                context.width, context.height, context.pix_fmt = 64, 48, "rgb24"
                packets = [*context.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24"))]
                packets += context.encode(None)
                (folder / f"{index}.png").write_bytes(b"".join(bytes(packet) for packet in packets))
    settings = 'format = "kcp:K=2,CA=2,CB=2"\nwidth = 32\nheight = 24\nhidden = 16\nepochs = 1\nfolds = 2\n'
    for name in ("frames", "videos"):
        (tmp_path / f"{name}.toml").write_text(settings)
        for words in (
            ("train", f"{name}.toml", "--data", name),
            ("evaluate", f"runs/{name}", "--confusion"),
            ("predict", f"runs/{name}", f"{name}/fight"),
        ):
            done = kronecell(tmp_path, *words)
            assert done.returncode == 0, (words, done.stderr)
        assert "fight" in done.stdout and done.stdout.count("%") >= 6


@pytest.mark.slow
def test_in_a_terminal_the_bar_leaves_a_line_for_every_epoch(tmp_path: Path) -> None:
    synthetic = ("data", "synthetic", "motions", "--clips-per-class", "2", "--groups", "2", "--frames", "6")
    assert kronecell(tmp_path, *synthetic, "--width", "32", "--height", "24").returncode == 0
    settings = 'format = "tt:r=2"\nwidth = 32\nheight = 24\nhidden = 16\nepochs = 2\nfolds = 2\n'
    (tmp_path / "own.toml").write_text(settings)
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "train", "own.toml", "-d", "motions"], cwd=tmp_path, env={**environment(), "TERM": "xterm"},
        stdin=inner, stdout=inner, stderr=inner,
    )  # fmt: skip
    os.close(inner)
    seen = b""
    while True:
        try:
            block = os.read(outer, 65536)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        seen += block
    os.close(outer)
    text = seen.decode()
    assert process.wait() == 0, text
    assert "epoch 1/2" in text and "epoch 2/2" in text and "run directory" in text
