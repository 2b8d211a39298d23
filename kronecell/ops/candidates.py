"""All the ways we know to run one product, and a model of what each costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from kronecell.ops import products
from kronecell.formats.base import Format
from kronecell.ops.hot import KEPT_PART
from kronecell.plans.network import INPUT, Network
from kronecell.ops.operation import Op
from kronecell.plans.order import greedy, optimal
from kronecell.ops.plan import Plan
from kronecell.ops.processor import LANES
from kronecell.ops.space import LEARNING_BYTES
from kronecell.ops.split import Split, thin_split

TRAFFICS = (0, 8, 32, 128)  # prices of an element for which optimal orders are searched
DENSE_LIMIT = 2**23  # elements of products of weights that are considered: what was compressed for memory stays so
# An intermediate of this size stays in cache, and is worth a call; up to twice as large it may be beside a large
# product of weights, which every chunk reads, and to whose gradient it adds.
CHUNK_ELEMENTS = 2**20
FEW_ROWS = 128  # optimal orders for these are tried in chunks of more rows, too
FRESH = 2**23  # elements from which the allocator takes memory from the system and gives it back, page by page
LENT = LEARNING_BYTES // 4  # elements up to which the same memory is used at every step of a training

IN_CACHE = 0.6  # price of writing what stays in cache, relative to memory
RUNS = 3  # of a product in training: itself, and the gradients of both operands
AT_ONCE = 40  # price of a multiply-add in products of weights that one call makes, for which no registers are filled
BETWEEN = 2  # calls that the two products of a split cost more than two of a plan; in training not to be seen
REGISTER = 16  # columns that a product computes at once

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

    def execute(self, x: Tensor, factors: Mapping[str, Tensor], bias: Tensor | None = None) -> Tensor:
        """Both."""
        return self.apply(x, self.prepare(factors), bias)

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
    _add_optimal(plans, network, rows, rows)
    if len(network.factors) > 1 and gates * fmt.M * fmt.N <= DENSE_LIMIT:
        plans["dense"] = Plan(network, (INPUT, greedy(network.as_dense())), rows, "dense")
    for name, plan in [*plans.items()]:
        wide = replace(plan, wide=True)
        if gates > 1 and any(op.diagonal for op in wide.program.hot):
            plans[f"{name} wide"] = wide
    found: dict[str, Runner] = {**plans}
    if rows > FEW_ROWS:  # what pays for many rows may be too much to read again for every chunk of them
        _add_optimal(plans, network, rows, FEW_ROWS, f" for {FEW_ROWS} rows")
    for name, plan in plans.items():
        elements = max(CHUNK_ELEMENTS, min(2 * _hoists(plan), 2 * CHUNK_ELEMENTS))
        chunk = max(1, elements // max(1, _per_row(plan)))
        if 2 * chunk <= rows:  # one and a little more would cost a call and save nothing
            found[f"{name} in chunks"] = Chunked(replace(plan, rows=chunk))
    for name, split in splits(fmt, rows, gates, shared).items():
        if not any(_same_products(plan, split) for plan in plans.values()):
            found[name] = split
    return found


def _same_products(plan: Plan, split: Split) -> bool:
    """Whether a split is what a plan is anyway: one product with x, and one with what that makes."""
    ours, theirs = plan.program.hot, split.inner.program.hot
    return len(theirs) == 1 and len(ours) == 2 and ours[0] == theirs[0]


def _add_optimal(plans: dict[str, Plan], network: Network, rows: int, best_for: int, ending: str = "") -> None:
    """The orders that are optimal for `best_for` rows, as plans for `rows`, unless they are there already."""
    for traffic in TRAFFICS:
        name = (f"optimal/{traffic}" if traffic else "optimal") + ending
        plan = Plan(network, optimal(network, best_for, traffic), rows, name)
        if all(plan.tree != other.tree for other in plans.values()) and _hoists(plan) <= DENSE_LIMIT:
            plans[name] = plan


def _per_row(plan: Plan) -> int:
    """Elements of the largest tensor that a row makes, permuted copies included."""
    made = [step.size for step in plan.steps if not step.hoisted]
    return max([*made, *(op.copied // 2 // plan.rows for op in plan.program.hot)], default=0)


def _hoists(plan: Plan) -> int:
    """Elements of the largest product of weights that a plan makes."""
    return max((step.size for step in plan.steps if step.hoisted), default=0)


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

    `batched` is what a multiply-add costs more in a batch of small matrices than in one large product. The constants
    are those with which the model's choices lose least time over the candidates of all formats at the paper's shape,
    in float32: with AVX-512 by a search over the timings of two machines, of which one has an AMD processor (the
    timings of benchmarks/prices.py), with AVX2 by one over those of one machine. They are judged on the shapes they
    were chosen for.
    """

    batched: float = 0.4
    read: float = 20.0
    written: float = 20.0
    fresh: float = 180.0
    copied: float = 42.0
    matrix: float = 7_000.0
    call: float = 2_100_000.0

    def for_dtype(self, dtype: torch.dtype) -> Prices:
        """The same for numbers of another size: those twice as long double the times that are not of a call."""
        share = 4 / dtype.itemsize if dtype.itemsize > 4 else 1.0
        return replace(self, matrix=share * self.matrix, call=share * self.call)


NARROW_REGISTERS = Prices(
    batched=0.42, read=20.0, written=68.0, fresh=133.0, copied=22.0, matrix=10_000.0, call=2_500_000.0
)
PRICES = NARROW_REGISTERS if LANES == 8 else Prices()


AMOUNTS = ("macs", "batched", "read", "written", "fresh", "copied", "matrix", "call")


def work(runner: Runner, rows: int, training: bool) -> dict[str, float]:
    """What a call of a runner does: multiply-adds, and those in batches; elements read, written, copied and put into
    fresh memory; matrices and calls.

    Training includes the gradients, the work that needs no x, and in chunks the steps that are run again.
    """
    if isinstance(runner, Chunked):
        plan = runner.plan
        once = _hot_work(plan, plan.rows, training, _made_again(plan))
        once["written"] *= IN_CACHE
        times = rows / plan.rows
        total = {name: amount * times for name, amount in once.items()}
    else:
        plan = runner.inner if isinstance(runner, Split) else runner
        total = _hot_work(plan, rows, training)
    if training:
        _add_hoisted_work(plan, total)
    if isinstance(runner, Split):
        outputs, runs = runner.gates * prod(runner.out_modes), RUNS if training else 1
        total["macs"] += runs * rows * outputs * runner.width
        total["written"] += runs * rows * outputs
        total["call"] += runs if training else 1 + BETWEEN
        if training:
            total["macs"] += runs * runner.outer.hoisted_macs
            total["call"] += runs * (len(runner.outer.steps) + 2)
    return total


def _hot_work(plan: Plan, rows: int, training: bool, again: int = 0) -> dict[str, float]:
    """The steps that touch x. In training each is a product and the gradients of its operands, x excepted; the first
    `again` of them are made once more for the backward."""
    total = dict.fromkeys(AMOUNTS, 0.0)
    ops = {op.out: op for op in plan.program.hot}
    share = rows / plan.rows  # op.copied and op.matrices are for the rows of the plan
    made: list[float] = []  # sizes of all that the forward makes
    for i, step in enumerate(step for step in plan.steps if not step.hoisted):
        op = ops[step.name]
        forward = 1 + (training and i < again)
        back = training and i > 0  # the gradient of what came in, of the same size
        runs = forward + training + back
        pairs = op.diagonal[0][op.diagonal[1]] if op.diagonal is not None else 1
        macs = step.macs * rows * pairs * _padding(op)
        total["macs"] += runs * macs
        sides = (prod(plan.network.shape(legs)) for legs in (step.left_legs, step.right_legs))
        big, small = sides if INPUT in step.left else reversed([*sides])
        total["read"] += runs * (op.parts * big * rows + small)
        written, copied = step.size * rows * pairs, op.copied * share
        total["written"] += forward * written + back * big * rows
        total["copied"] += forward * copied + (2 * big * rows if back and op.moves_gradient else 0)
        made += [written, copied / 2]
        if op.matrices > 1:
            total["batched"] += runs * macs
            total["matrix"] += runs * op.matrices * (share if op.spread else 1)
        total["call"] += runs
    if not training or sum(made) > LENT:
        total["fresh"] += sum(size for size in made if size > FRESH)
    if plan.program.last.permutation is not None and not plan.program.straight:
        total["copied"] += 2 * rows * prod(plan.network.shape(plan.network.outputs))
    return total


def _made_again(plan: Plan) -> int:
    """Steps that are run again for the backward of a chunk: up to the last whose operand was too large to be kept."""
    kept, last = 0, 0
    sizes = [step.size for step in plan.steps if not step.hoisted]
    for i, size in enumerate(sizes[:-1], 1):
        if kept + size <= prod(plan.network.shape(plan.network.inputs)) // KEPT_PART:
            kept += size
        else:
            last = i
    return last


def _add_hoisted_work(plan: Plan, total: dict[str, float]) -> None:
    """The products of weights, and the small operands laid out."""
    if products.suit(plan.program.hoisted, plan.program.hot):
        total["macs"] += RUNS * AT_ONCE * plan.hoisted_macs
        total["call"] += RUNS
        return
    ops = {op.out: op for op in plan.program.hoisted}
    for step in plan.steps:
        if step.hoisted:
            op = ops[step.name]
            total["macs"] += RUNS * step.macs * _padding(op)
            total["written"] += RUNS * step.size
            total["copied"] += RUNS * op.copied
            total["matrix"] += RUNS * op.matrices if op.matrices > 1 else 0
            total["call"] += RUNS
    for op in plan.program.hot:
        if op.right_view.permutation is not None:
            total["copied"] += 2 * 2 * prod(op.right_view.legs)  # there and back


def _padding(op: Op) -> float:
    """Multiply-adds done over those that count: a product of a few columns takes as long as one of a whole register."""
    columns = op.b.groups[0 if op.narrow else -1]
    return REGISTER * -(-columns // REGISTER) / columns if columns > 0 else 1.0


def predict(runner: Runner, rows: int, training: bool = True, prices: Prices = PRICES) -> float:
    """Price of one call in multiply-adds."""
    done = work(runner, rows, training)
    return done.pop("macs") + sum(getattr(prices, name) * amount for name, amount in done.items())
