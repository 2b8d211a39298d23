"""A plan is data: it prints itself, is rebuilt from its text, counts on shapes alone and needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kronecell as kc
from kronecell.plans.network import Factor, Network
from kronecell.plans.plan import Plan, plan_of
from tests.cases import KINDS, formats

PAPER = kc.KCP((8, 20, 20, 18), (4, 4, 4, 4), 4, 4, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_plan_is_the_whole_plan(kind: str) -> None:
    @settings(max_examples=15)
    @given(
        formats(kind), st.sampled_from([(1, False), (3, False), (3, True)]), st.booleans(), st.sampled_from([None, 3])
    )
    def law(fmt: kc.Format, gating: tuple[int, bool], wide: bool, chunk: int | None) -> None:
        gates, shared = gating
        for order in fmt.orders():
            plan = replace(fmt.plan(order, 7, gates=gates, shared=shared), wide=wide, chunk=chunk)
            again = plan_of(plan.text)
            assert again == plan and hash(again) == hash(plan) and again.text == plan.text
            assert json.loads(plan.text)["rows"] == 7 and "\n" not in plan.text

    law()


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"factors": 3}', '{"tree": "x"}', "no plan at all"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(kc.PlanError, match="not the text of a plan"):
        plan_of(text)


def test_a_plan_prints_its_steps_and_totals() -> None:
    text = str(PAPER.plan("separable", rows=96))
    assert "A3[k2 m3 a2] A4[k2 m4 a2]" in text and "once" in text and "each row" in text
    assert "234,240 multiply-adds a row" in text and "8,576 once per weight update" in text
    assert "in chunks of 32 rows" in str(PAPER.plan("separable", rows=96).in_chunks(32))


def test_peak_grows_with_rows_only_where_x_is_touched_and_not_beyond_a_chunk() -> None:
    assert PAPER.plan("separable", 1).peak == 4 * 20 * 18
    assert PAPER.plan("separable", 96).peak == 96 * 160 * 4
    assert PAPER.plan("separable", 96).in_chunks(32).peak == 32 * 160 * 4
    assert PAPER.plan("separable", 96).in_chunks(200).peak == 96 * 160 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_the_counts_of_a_plan_are_the_sums_of_its_steps(kind: str) -> None:
    @settings(max_examples=15)
    @given(formats(kind), st.sampled_from([1, 5]))
    def law(fmt: kc.Format, rows: int) -> None:
        plan = fmt.plan("optimal", rows)
        assert plan.total_macs == plan.hoisted_macs + rows * plan.macs and plan.flops == 2 * plan.macs
        assert plan.total_macs == sum(step.macs * (1 if step.hoisted else rows) for step in plan.steps)
        assert plan.width == fmt.M
        for step in plan.steps:  # a step costs the product of all legs that it touches
            assert step.macs == prod(plan.network.shape({*step.left_legs, *step.right_legs}))
            assert step.size == prod(plan.network.shape(step.out_legs))

    law()


def test_mistakes_are_refused_when_a_plan_is_made() -> None:
    network = kc.TT((2, 3), (2, 2), 2).network()
    with pytest.raises(kc.PlanError, match="every tensor exactly once"):
        Plan(network, ("x", "G1"))
    with pytest.raises(kc.PlanError, match="every tensor exactly once"):
        Plan(network, (("x", "G1"), "G1"))
    with pytest.raises(kc.PlanError, match="rows must be at least 1"):
        Plan(network, (("x", "G1"), "G2"), rows=0)
    with pytest.raises(kc.PlanError, match="chunk must have at least 1"):
        Plan(network, (("x", "G1"), "G2"), chunk=0)


def test_what_describes_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from kronecell.plans.network import Factor, Network\n"
        "from kronecell.plans.order import optimal\n"
        "from kronecell.plans.plan import Plan, plan_of\n"
        "from kronecell.plans.split import split_of\n"
        "sizes = {'m': 3, 'r': 2, 'n': 4}\n"
        "network = Network.of([Factor('U', ('m', 'r')), Factor('V', ('r', 'n'))], ('m',), ('n',), sizes)\n"
        "plan = Plan(network, optimal(network, 5), 5)\n"
        "assert plan_of(plan.text) == plan and plan.macs == 14 and str(plan) and split_of(network).rank == 2\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_equal_networks_have_equal_plans() -> None:
    sizes = {"m": 3, "n": 4}
    one, two = (Network.of([Factor("W", ("m", "n"))], ("m",), ("n",), sizes) for _ in range(2))
    assert Plan(one, ("x", "W")) == Plan(two, ("x", "W")) != Plan(one, ("x", "W"), 2)
