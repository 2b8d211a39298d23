"""The paper's tables: every figure recomputed from networks and orders; the differences are the known errata."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kronecell.paper import tables as paper

ERRATA = {
    ("UCF11", False, "Ori", "mflops"),
    ("UCF11", True, "Ori", "mflops"),
    ("UCF11", True, "KCP(4,2,2)", "params"),
    ("UCF50", False, "TT", "mflops"),
    ("UCF50", True, "TT", "mflops"),
}


def test_every_figure_equals_the_independent_recomputation(shared_paper: Path) -> None:
    reference = json.loads((shared_paper / "tables.json").read_text())
    rows = paper.tables()
    assert len(rows) == len(reference) == 44
    for row, want in zip(rows, reference, strict=True):
        name = (row["dataset"], row["shared"], row["format"])
        assert name == (want["dataset"], want["shared"], want["format"])
        assert row["recomputed"]["params"] == want["recomputed"]["params"], name
        assert row["recomputed"]["mflops"] == pytest.approx(want["recomputed"]["mflops"], abs=1e-3), name
        assert {key: row["printed"][key] for key in want["printed"]} == want["printed"], name
        assert {*row["errata"]} == {*want["errata"]}, name


def test_printed_and_recomputed_figures_differ_in_the_five_known_places_only() -> None:
    found = {(r["dataset"], r["shared"], r["format"], column) for r in paper.tables() for column in r["errata"]}
    assert found == ERRATA


def test_printed_ratios_are_those_of_the_recomputed_parameters_but_for_the_known_typo() -> None:
    wrong = [
        (row["dataset"], row["shared"], row["format"])
        for row in paper.tables()
        if row["printed"]["ratio"] and abs(row["printed"]["ratio"] - row["recomputed"]["ratio"]) > 1
    ]
    assert wrong == [("UCF11", True, "KCP(4,2,2)")]


def test_the_two_conventions_of_the_paper_are_shown_beside_the_true_values() -> None:
    rows = {(r["dataset"], r["shared"], r["format"]): r for r in paper.tables()}
    ht = rows["UCF11", False, "HT"]
    assert (ht["recomputed"]["params"], ht["executed"]["params"]) == (4992, 4800)  # root r^3 against r^2, four gates
    tt = rows["UCF11", True, "TT"]
    assert tt["recomputed"]["mflops"] == pytest.approx(37.1, abs=0.05)
    assert tt["executed"]["mflops_paper_order"] == pytest.approx(77.2, abs=0.05)
    assert tt["executed"]["mflops_best_order"] == pytest.approx(13.2, abs=0.05)
    for row in rows.values():
        assert row["executed"]["mflops_best_order"] <= row["executed"]["mflops_paper_order"]


def test_the_whole_ucf50_model_shrinks_26_times_not_278219() -> None:
    row = next(r for r in paper.tables("UCF50") if r["shared"] and r["format"] == "KCP(6,2,2)")
    assert round(row["recomputed"]["ratio"]) == row["printed"]["ratio"] == 278_219
    assert row["executed"]["model_ratio"] == pytest.approx(25.9, abs=0.1)


def test_the_last_table_has_two_kinds_of_errata() -> None:
    rows = paper.last_table()
    wrong = {(row["dataset"], row["method"]): row["erratum"] for row in rows if row["erratum"]}
    assert {dataset for dataset, _ in wrong} == {"YCF", "UCF50"}
    assert all("one of the 4 recurrent" in text for (dataset, _), text in wrong.items() if dataset == "UCF50")
    assert len(wrong) == 5 and len(rows) == 13
    for row in rows:  # the printed MFLOPs of that table agree with ours, so the convention is the same
        assert row["recomputed"]["mflops"] == pytest.approx(row["printed"]["mflops"], abs=0.051)


def test_the_text_on_the_kt_rank_names_the_wrong_ranks() -> None:
    rows = {(row["dataset"], row["format"]): row for row in paper.kt_rank_text()}
    row = rows["UCF11", "KCP(2,2,4)"]
    assert row["recomputed"]["KCP(2,4,4)"] == pytest.approx(60.9, abs=0.05)
    assert row["recomputed"]["KCP(2,2,4)"] != pytest.approx(60.9, abs=1)
    assert row["erratum"] == "the figure belongs to KCP(2,4,4)"


def test_complexity_curves_are_the_counts_of_the_networks() -> None:
    data = paper.complexity(range(1, 4))
    assert data["curves"]["TT"]["params"] == [4 * 160, 2 * 160 * 4 + 2 * 160 * 2, 2 * 160 * 9 + 2 * 160 * 3]
    assert data["curves"]["KCP"]["params"] == [4 * 28 * 4 * r for r in (1, 2, 3)]
    assert all(a < b for a, b in zip(data["curves"]["BT"]["macs"], data["curves"]["BT"]["macs"][1:], strict=False))


def test_counting_allocates_nothing_big() -> None:
    """Every count of the paper, the dense UCF50 layer of 530 million parameters included, in a fresh process."""
    code = """
import resource, kronecell as kc
from kronecell.paper import tables as paper
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
paper.tables(); paper.last_table()
kc.Dense((15, 16, 16, 15), (8, 6, 6, 8)).plan(rows=384, gates=4).peak
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(output) < 100 * 1024  # KiB
