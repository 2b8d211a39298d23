"""The plans behind a group's product x W: by the paper's order, and the one that is run."""

from __future__ import annotations

from dataclasses import dataclass

from kronecell.errors import KronecellError
from kronecell.formats.paper_counting import paper_order
from kronecell.nn.linear import TensorLinear
from kronecell.plans.plan import Plan
from kronecell.report.drawing import draw, step_rows
from kronecell.report.groups import Group


@dataclass(frozen=True)
class PlanTable:
    """A plan for the page: title, step rows, totals, drawing, and what is done after its steps."""

    title: str
    rows: list[tuple[str, str, str, int, str]]
    macs: int
    hoisted: int
    peak: int
    svg: str
    after: str = ""


def plan_tables(group: Group) -> list[PlanTable]:
    """Two tables; none for a plain matrix or a format that cannot be read."""
    fmt = group.format
    if fmt is None:
        return []
    try:
        theirs = fmt.plan(paper_order(fmt), group.rows, gates=group.gates, shared=group.shared)
        layer = TensorLinear(fmt, gates=group.gates, shared=group.shared, bias=False, device="meta")
        plan = layer.plan(group.rows)
    except KronecellError:
        return []
    after = f"In chunks of {plan.chunk:,} rows." if plan.chunk is not None else ""
    return [
        _table(f"the paper's order ({theirs.order})", theirs),
        _table(f"as run for {group.rows:,} rows ({plan.order})", plan, after),
    ]


def _table(title: str, plan: Plan, after: str = "") -> PlanTable:
    return PlanTable(title, step_rows(plan), plan.macs, plan.hoisted_macs, plan.peak, draw(plan, steps=False), after)
