"""Every benchmark runs, and the result files in git can be read. No times are asserted: these belong to a machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NAMES = ("auto", "projection", "lstm", "recurrence", "decoders", "parallel", "memory", "growth", "acceptance")


def test_all_benchmarks_run_quickly(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "benchmarks", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in NAMES:
        assert json.loads((tmp_path / f"{name}.json").read_text())["benchmark"] == name
        assert (tmp_path / f"{name}.md").read_text().startswith("# ")
    assert (tmp_path / "growth.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(("name", "key"), [("prices", "prices"), ("kernels", "products")])
def test_those_that_are_run_by_themselves_run(tmp_path: Path, name: str, key: str) -> None:
    pytest.importorskip("scipy")
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / f"{name}.json").read_text())[key]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_in_git_parse(path: Path) -> None:
    assert isinstance(json.loads(path.read_text()), dict)
    assert str(Path.home()) not in path.read_text()
