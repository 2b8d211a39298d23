"""Drawings of tensor networks: every tensor and leg is there, nothing overlaps, the numbers are those of the plan."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kronecell as kc
from kronecell.cli.count import EXAMPLES
from kronecell.plans.network import INPUT
from kronecell.report.drawing import COLUMN, NODE, draw, step_rows
from kronecell.report.drawing_layout import RESULT, arrange
from tests.cases import KINDS, formats

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@given(st.sampled_from(KINDS).flatmap(formats))
def test_every_network_can_be_drawn_with_all_its_tensors_and_legs(fmt: kc.Format) -> None:
    plan = fmt.plan()
    words = texts(draw(plan, title=str(fmt)))
    for name in [INPUT, RESULT, *(f.name for f in plan.network.factors)]:
        assert name in words
    for leg, size in plan.network.leg_sizes:
        assert f"{leg} = {size:,}" in words
    for number, pair, _, macs, _ in step_rows(plan):
        assert pair in words and f"{macs:,}" in words and number in words


@given(st.sampled_from(KINDS).flatmap(formats))
def test_no_two_tensors_overlap(fmt: kc.Format) -> None:
    boxes = arrange(fmt.network()).boxes
    for (_, a), (_, b) in itertools.combinations(boxes.items(), 2):
        apart = abs(a.column - b.column) * COLUMN >= NODE[0] + (a.span + b.span) / 2 * COLUMN - 1
        assert apart or abs(a.row - b.row) >= 0.45, (fmt, a, b)


@pytest.mark.parametrize("gates", [1, 4])
@pytest.mark.parametrize("kind", [*EXAMPLES])
def test_no_label_covers_another_or_a_tensor(kind: str, gates: int) -> None:
    root = ElementTree.fromstring(draw(kc.parse(EXAMPLES[kind]).plan(gates=gates), steps=False))
    labels, boxes = [], []
    for node in root.iter():
        x, y = float(node.get("x", 0)), float(node.get("y", 0))
        if node.tag == f"{SVG}text" and node.get("class") == "size":
            half = 3.1 * len(node.text or "")
            labels.append((x - half, y - 9, x + half, y + 2))
        elif node.tag == f"{SVG}rect" and node.get("class") in ("factor", "end", "gatebox"):
            boxes.append((x, y, x + float(node.get("width", 0)), y + float(node.get("height", 0))))
    for a, b in itertools.combinations(labels + boxes, 2):
        if a in labels:
            assert not (a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]), (a, b)


@pytest.mark.parametrize("kind", [*EXAMPLES])
def test_the_list_adds_up_to_the_plan(kind: str) -> None:
    plan = kc.parse(EXAMPLES[kind]).plan("optimal", 96, gates=4)
    rows = step_rows(plan)
    assert sum(macs for *_, macs, when in rows if when == "each row") == plan.macs
    assert sum(macs for *_, macs, when in rows if when == "once") == plan.hoisted_macs


def test_a_ring_is_drawn_as_a_ring() -> None:
    boxes = arrange(kc.TR((4, 5, 6), (2, 3, 2), r=2).network()).boxes
    assert boxes["G3"].column == boxes["G4"].column and boxes["G1"].column == boxes["G6"].column


def test_gates_are_marked_on_the_factors_that_have_them() -> None:
    svg = draw(kc.parse(EXAMPLES["kcp"]).plan(gates=4, shared=True))
    assert texts(svg).count("g = 4") == 3  # A1, B1 and y


def test_a_network_without_input_is_refused() -> None:
    with pytest.raises(kc.PlanError, match="only networks with input"):
        draw(kc.parse(EXAMPLES["tt"]).network().as_dense())


def test_titles_are_text() -> None:
    assert "<script>" not in draw(kc.parse(EXAMPLES["tt"]).plan(), title="<script>alert(1)</script>")
