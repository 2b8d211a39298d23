"""The demo: data, six trained networks, a table and a page, from nothing; and the real one keeps its promises."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kronecell.cli.main import main

LABELS = {"dense", "KCP(4,4,2)", "TR", "TT", "HT", "BT"}


def run_demo(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["demo", *arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_the_quick_demo_trains_all_prints_the_table_and_writes_a_page_without_network(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = run_demo(capsys, "--quick", "--out", str(tmp_path))
    assert code == 0
    for word in ("dense", "KCP(4,4,2)", "TT", "BT", "TR", "HT", "ratio of model", "latency", "Same budget for all"):
        assert word in out
    page = (tmp_path / "report.html").read_text()
    assert "kcp" in page.lower() and not re.search(r"""(src|href)=["']https?:""", page)
    code, out, _ = run_demo(capsys, "--quick", "--out", str(tmp_path), "--json")  # again: everything is there
    assert code == 0 and {*json.loads(out)["results"]} == LABELS


@pytest.mark.slow
def test_every_compressed_format_reaches_80_percent_on_unseen_groups(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = run_demo(capsys, "--out", str(tmp_path), "--json")
    results = json.loads(out)["results"]
    assert code == 0 and {*results} == LABELS
    for label in LABELS - {"dense"}:
        assert results[label]["top1_last"] >= 0.8, label
        assert results[label]["seconds"] <= results["dense"]["seconds"] * 1.1  # dense had as much time as any
