"""Every benchmark runs, and the result files in git can be read. No times are asserted: these belong to a machine."""

from __future__ import annotations

import json
import shutil
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


@pytest.mark.parametrize(("name", "key"), [("prices", "prices"), ("kernels", "products"), ("deploy", "networks")])
def test_those_that_are_run_by_themselves_run(tmp_path: Path, name: str, key: str) -> None:
    pytest.importorskip("scipy")
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / f"{name}.json").read_text())[key]


def test_the_letters_run_go_on_and_are_summarised(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "benchmarks.letters", "--quick", "--out", str(tmp_path / "runs")]
    command += ["--results", str(tmp_path / "results")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads((tmp_path / "results" / "letters.json").read_text())
    assert [row["name"] for row in facts["table"]] == ["dense", "KCP (4,4,2), all"]
    for row in facts["table"] + facts["besides"]:
        low, high = row["interval"]
        assert low <= row["accuracy"] <= high
    assert facts["table"][1]["difference"][1] <= facts["table"][1]["difference"][0]
    assert {point["rates"] for point in facts["sweep"]} == {"uniform", "structure"} and facts["transfer"]
    page = (tmp_path / "results" / "letters.md").read_text()
    assert "Made with --quick" in page and "Talkers that were never seen" in page
    assert all((tmp_path / "results" / name).is_file() for name in ("letters.svg", "letters-rates.svg"))
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0 and "fold" not in again.stderr, again.stderr[-500:]  # nothing is trained twice
    assert json.loads((tmp_path / "results" / "letters.json").read_text())["table"] == facts["table"]
    shutil.rmtree(tmp_path / "runs" / "records")  # a clean checkout has the results alone
    clean = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert clean.returncode == 0 and "fold" not in clean.stderr, clean.stderr[-500:]
    assert json.loads((tmp_path / "results" / "letters.json").read_text())["runs"] == facts["runs"]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_in_git_parse(path: Path) -> None:
    assert isinstance(json.loads(path.read_text()), dict)
    assert str(Path.home()) not in path.read_text()
