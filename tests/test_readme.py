"""The README: its example runs, its figures are those of the library."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kronecell.paper import tables as paper

README = Path(__file__).resolve().parents[1] / "README.md"


def test_every_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_the_table_of_counts_is_the_librarys() -> None:
    rows = {row["format"]: row for row in paper.tables("UCF11") if not row["shared"]}
    labels = {"dense": "Ori", "TT": "TT", "BT": "BT", "TR": "TR", "HT": "HT", "KCP": "KCP(4,4,2)"}
    checked = 0
    for line in README.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        name = re.match(r"\w+", cells[0])
        if len(cells) != 4 or name is None or name[0] not in labels or "," not in cells[1]:
            continue
        row = rows[labels[name[0]]]
        dense = rows["Ori"]["executed"]["params"]
        real = row["executed"]
        ours = f"{real['mflops_best_order']:.1f}"
        assert cells[1:3] == [f"{real['params']:,}", f"{dense / real['params']:,.0f}x"]
        assert cells[3] == (f"{ours}*" if name[0] == "dense" else f"{row['printed']['mflops']} → {ours}")
        checked += 1
    assert checked == len(labels)
    assert f"The paper prints {rows['Ori']['printed']['mflops']}." in README.read_text()
