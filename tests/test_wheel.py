"""The wheel in a fresh environment, outside the source tree: from the demo to an answer of ONNX Runtime."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kronecell.ops.library import why_not
from tests.test_docs import ROOT

pytestmark = pytest.mark.slow

for package in ("av", "onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package)

PARTS = ("kronecell", "csrc", "setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
# What somebody does who has the two exported files, and reads the clip with kronecell: no torch runs the network.
ANSWER = """
import json, sys
import numpy as np
import onnxruntime
import kronecell
from kronecell.training.predict import Preprocessing

assert "site-packages" in kronecell.__file__, kronecell.__file__
model, clip = sys.argv[1:]
about = json.load(open(model + ".json"))
sizes = {name: about["preprocessing"][name] for name in Preprocessing.__dataclass_fields__}
session = onnxruntime.InferenceSession(model)
(scores,) = session.run(None, {session.get_inputs()[0].name: Preprocessing(**sizes).read(clip).numpy()})
chances = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
print(json.dumps(dict(zip(about["classes"], chances.mean(0).tolist()))))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment with the wheel; torch and the rest are those of the tests' environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in PARTS:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy2(path, source / name)
    for objects in ROOT.glob("build/kernels-*"):  # compiled already by the installation of the tests
        shutil.copytree(objects, source / "build" / objects.name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*pip, *build], check=True, capture_output=True, env={**os.environ, "PYTHONPATH": ""})
    fresh = folder / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(fresh)], check=True)
    (wheel,) = folder.glob("*.whl")
    place = ["--python", str(fresh / "bin" / "python"), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *place], check=True, capture_output=True)
    (packages,) = fresh.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after the environment's own
    return fresh / "bin"


def test_from_the_demo_to_an_answer_of_onnx_runtime(installed: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_WAIT_POLICY"] = "PASSIVE"

    def run(program: str, *words: str) -> str:
        command = [str(installed / program), *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)
        assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr
        return done.stdout

    assert "KCP(4,4,2)" in run("kronecell", "demo", "--quick")
    assert (tmp_path / "runs" / "demo" / "report.html").stat().st_size > 10_000
    model = "runs/demo/kcp-quick/fold0-seed0"
    assert "95% interval" in run("kronecell", "evaluate", model, "--confusion")
    assert "checked in ONNX Runtime" in run("kronecell", "export", model, "--to", "onnx", "--out", "demo.onnx")
    clips = sorted(str(path) for path in (tmp_path / "runs/demo/motions-quick").glob("*/*/*_01.avi"))
    for clip in clips[:3]:
        document = json.loads(run("kronecell", "predict", model, clip, "--json", "--top", "11"))
        expected = document["predictions"][0]["probabilities"]
        answer = json.loads(run("python", "-c", ANSWER, "demo.onnx", clip))
        assert len(expected) == 11 and answer == pytest.approx(expected, rel=1e-5)
        assert max(answer, key=answer.__getitem__) == document["predictions"][0]["class"]


def test_experiments_and_the_doctor_need_no_checkout(installed: Path, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = subprocess.run([str(installed / "kronecell"), *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "ucf11-kcp442" in run("experiments", "list")
    run("experiments", "copy", "surveillance-kcp", "mine.toml")
    assert "classes = 0" in (tmp_path / "mine.toml").read_text()
    report = run("doctor")
    assert "FAILED" not in report and ("kernels     compiled and used" in report or why_not())
