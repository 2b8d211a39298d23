"""`kronecell paper figures`: every format's drawing, the curves, and one-line errors."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kronecell.cli.main import main
from kronecell.formats import FORMATS
from tests.run_cases import write_run


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["paper", "figures", *arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_every_format_and_order_is_drawn_and_runs_give_curves(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_run(tmp_path / "runs", "tt", "TT")
    write_run(tmp_path / "runs", "$k_c$p", "KCP(4,4,2)", state="running")
    out = tmp_path / "figures"
    code, text, err = run(capsys, str(out), "--runs", str(tmp_path / "runs"), "--ranks", "2", "--json")
    files = [Path(name) for name in json.loads(text)]
    assert code == 0 and {*files} == {*out.iterdir()} and err.count("wrote") == len(files)
    for kind in FORMATS:
        assert any(path.name.startswith(f"network-{kind}-") for path in files)
    names = {path.name for path in files}
    assert {
        "network-kcp-algorithm1.svg",
        "complexity.svg",
        "parallel.svg",
        "curves-ucf11-top1.svg",
        "curves-ucf11-loss.svg",
    } <= names
    for path in files:
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for arguments in (
        (str(tmp_path / "file"),),
        (str(tmp_path / "file" / "below"),),
        (str(tmp_path / "out"), "--kind", "gif"),
        (str(tmp_path / "out"), "--ranks", "two"),
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 2 and err.splitlines()[-1].startswith("kronecell: error: ") and "Traceback" not in err
