"""The benchmark of doped formats runs, and does not repeat what is there. Its data are not part of the project."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"


@pytest.mark.skipif(
    not (DATA / "digits").is_dir() or not (DATA / "text").is_dir(),
    reason="the spoken digits and the text are not on this machine",
)
def test_doped_formats_are_trained_and_runs_that_are_there_are_not_repeated(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.doped", "--quick", "--latency", "--data", str(DATA)]
    command += ["--results", str(tmp_path), "--work", str(tmp_path / "work")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "doped.json").read_text())["runs"]
    assert {key.split("/")[0] for key in found} == {"digits", "digits, GRU", "text"} and len(found) == 23
    for record in found.values():
        assert record["bytes"] > 0 and record["score"] >= 0
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0 and "seed" not in again.stderr
    assert json.loads((tmp_path / "doped.json").read_text())["runs"] == found
    assert "| doped lowrank |" in (tmp_path / "doped.md").read_text()
    assert all((tmp_path / name).read_text().startswith("<?xml") for name in ("doped.svg", "doped-latency.svg"))


def test_the_speed_of_doped_layers_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.doped_speed", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(json.loads((tmp_path / "doped_speed.json").read_text())["rows"]) == 22
