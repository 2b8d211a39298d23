"""All the ways we know to run one product, and a model of what each costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from kronecell.formats.base import Format
from kronecell.network import INPUT
from kronecell.order import greedy, optimal
from kronecell.plan import Plan
from kronecell.split import Split, thin_split

TRAFFICS = (0, 8, 32, 128)  # prices of an element for which optimal orders are searched
DENSE_LIMIT = 2**22  # elements up to which making W is considered at all: what was compressed for memory stays so
CHUNK_ELEMENTS = 2**20  # an intermediate of this size stays in a core's cache

IN_CACHE = 0.6  # price of writing what stays in cache, relative to memory

Sharing = bool | tuple[str, ...]


@dataclass(frozen=True)
class Chunked:
    """A plan applied to a few rows at a time, so that its intermediates stay in cache."""

    plan: Plan

    def prepare(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As the plan's."""
        return self.plan.prepare(factors)

    def apply(self, x: Tensor, prepared: Mapping[str, Tensor], bias: Tensor | None = None) -> Tensor:
        """As the plan's, chunk by chunk."""
        return self.plan.apply(x, prepared, bias, chunk=self.plan.rows)

    def execute(self, x: Tensor, factors: Mapping[str, Tensor]) -> Tensor:
        """Both."""
        return self.apply(x, self.prepare(factors))

    def __str__(self) -> str:
        return f"{self.plan}\nin chunks of {self.plan.rows} rows"


Runner = Plan | Split | Chunked


@lru_cache(maxsize=1024)
def candidates(fmt: Format, rows: int, gates: int = 1, shared: Sharing = False) -> dict[str, Runner]:
    """Runners for this number of rows by name: the format's orders, optimal ones, wide, split, chunked and dense."""
    network = fmt.network(gates, shared)
    plans: dict[str, Plan] = {}
    for name in fmt.orders():
        if name != "naive":
            plans[name] = fmt.plan(name, rows, gates=gates, shared=shared)
    for traffic in TRAFFICS:
        name = f"optimal/{traffic}" if traffic else "optimal"
        tree = optimal(network, rows, traffic)
        if all(plan.tree != tree for plan in plans.values()):
            plans[name] = Plan(network, tree, rows, name)
    if len(network.factors) > 1 and gates * fmt.M * fmt.N <= DENSE_LIMIT:
        plans["dense"] = Plan(network, (INPUT, greedy(network.as_dense())), rows, "dense")
    for name, plan in [*plans.items()]:
        wide = replace(plan, wide=True)
        if gates > 1 and any(op.diagonal for op in wide.program.hot):
            plans[f"{name} wide"] = wide
    found: dict[str, Runner] = {**plans}
    for name, plan in plans.items():
        per_row = max((step.size for step in plan.steps if not step.hoisted), default=0)
        chunk = max(1, CHUNK_ELEMENTS // max(1, per_row))
        if chunk < rows:
            found[f"{name} in chunks"] = Chunked(replace(plan, rows=chunk))
    found |= splits(fmt, rows, gates, shared)
    return found


@lru_cache(maxsize=1024)
def splits(fmt: Format, rows: int, gates: int = 1, shared: Sharing = False) -> dict[str, Split]:
    """The thin splits that are thin: with fewer columns between than outputs."""
    network = fmt.network(gates, shared)
    found: dict[str, Split] = {}
    for traffic in TRAFFICS:
        split = thin_split(network, rows, traffic)
        if split is None or split.width >= gates * fmt.N:
            return {}
        name = f"split/{traffic}" if traffic else "split"
        if all(split.inner.tree != other.inner.tree for other in found.values()):
            found[name] = split
            wide = replace(split, inner=replace(split.inner, wide=True))
            if any(op.diagonal for op in wide.inner.program.hot):
                found[f"{name} wide"] = wide
    return found


@dataclass(frozen=True)
class Prices:
    """The cost model, in multiply-adds: what an element moved, a matrix product started and a call cost.

    Fitted by least squares to timings of all candidates of all formats on one machine; see benchmarks/prices.py.
    Ratios like these vary little between machines; where they do, measure with kc.tune.
    """

    read: float = 4.0
    written: float = 128.0
    copied: float = 20.0
    matrix: float = 2_000.0
    call: float = 1_800_000.0


PRICES = Prices()


def work(runner: Runner, rows: int, hoisted: bool) -> dict[str, float]:
    """What a call of a runner does: multiply-adds, elements read, written and copied, matrices and calls started."""
    if isinstance(runner, Chunked):
        once = work(runner.plan, runner.plan.rows, hoisted=False)
        prepared = work(runner.plan, 0, hoisted) if hoisted else {}
        once["written"] *= IN_CACHE
        return {key: value * rows / runner.plan.rows + prepared.get(key, 0.0) for key, value in once.items()}
    plan = runner.inner if isinstance(runner, Split) else runner
    total = dict.fromkeys(("macs", "read", "written", "copied", "matrix", "call"), 0.0)
    ops = {op.out: op for op in (*plan.program.hoisted, *plan.program.hot)}
    share = rows / plan.rows  # op.copied and op.matrices are for the rows of the plan
    for step in plan.steps:
        if step.hoisted and not hoisted:
            continue
        op, times = ops[step.name], 1 if step.hoisted else rows
        pairs = op.diagonal[0][op.diagonal[1]] if op.diagonal is not None else 1
        total["macs"] += step.macs * times * pairs
        sides = (prod(plan.network.shape(legs)) for legs in (step.left_legs, step.right_legs))
        big, small = sides if INPUT in step.left else reversed([*sides])
        total["read"] += big * times + small
        total["written"] += step.size * times * pairs
        total["copied"] += op.copied * (1 if step.hoisted else share)
        if op.matrices > 1:
            total["matrix"] += op.matrices * (share if op.spread else 1)
        total["call"] += 1 if step.hoisted or rows else 0
    if isinstance(runner, Split):
        outputs = runner.gates * prod(runner.out_modes)
        total["macs"] += rows * outputs * runner.width
        total["written"] += rows * outputs
        total["call"] += 1
        if hoisted:
            total["macs"] += runner.outer.hoisted_macs
            total["call"] += len(runner.outer.steps) + 2
    elif plan.program.last.permutation is not None:
        total["copied"] += 2 * rows * prod(plan.network.shape(plan.network.outputs))
    return total


def predict(runner: Runner, rows: int, hoisted: bool = True, prices: Prices = PRICES) -> float:
    """Price of one call in multiply-adds; `hoisted` includes the work that needs no x, as training does."""
    done = work(runner, rows, hoisted)
    return done.pop("macs") + sum(getattr(prices, name) * amount for name, amount in done.items())
