"""The ways to run one product, a model of what each costs, and the choice between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch

from kronecell.ops.contract import ready
from kronecell.ops.kernels import register_width
from kronecell.ops.program import Op
from kronecell.plans.network import INPUT, Network
from kronecell.plans.order import Tree, greedy, optimal
from kronecell.plans.plan import Plan
from kronecell.plans.split import sides

TRAFFICS = (0, 8, 32, 128)  # prices of an element for which optimal orders are searched
DENSE_LIMIT = 2**23  # elements of a product of weights up to which a plan is considered, so that memory stays small
# An intermediate of this size stays in cache, and is worth a call; it may be four times as large where a chunk has few
# rows, or beside a large product of weights, which every chunk reads, and to whose gradient it adds.
CHUNK_ELEMENTS, CHUNK_ROWS = 2**19, 4
FEW_ROWS = 128  # optimal orders for these are tried in chunks of more rows, too
FRESH = 2**20  # elements from which an allocation is likely to come from the system, page by page

NOT_USED_AGAIN = 0.25  # part of a chunk's memory that is fresh for the next one, too; measured
IN_CACHE = 0.6  # price of writing what stays in cache, relative to memory
RUNS = 3  # of a product in training: itself, and the gradients of both operands
AT_ONCE = 40  # price of a multiply-add in products of weights that one call makes, for which no registers are filled
REGISTER = 16  # columns that a product computes at once


@dataclass(frozen=True)
class Product:
    """What a choice depends on: the matrix, its named orders, about how many rows, and how it is computed.

    `orders` are (name, network, tree), because a format may have an order on an equivalent network. With `frozen`, the
    products of weights are there already.
    """

    network: Network
    orders: tuple[tuple[str, Network, Tree], ...]
    name: str
    rows: int
    grad: bool
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    frozen: bool = False

    @property
    def key(self) -> str:
        """One line of text; the number of threads belongs to it."""
        how = "training" if self.grad else "frozen" if self.frozen else "inference"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"product {self.name} rows={self.rows} {how} {dtype} {self.device} threads={torch.get_num_threads()}"


@lru_cache(maxsize=1024)
def candidates(product: Product) -> dict[str, Plan]:
    """Plans for this number of rows by name: the format's orders, optimal ones, wide, split, chunked and dense."""
    return _candidates(product.network, product.orders, product.rows)


@lru_cache(maxsize=1024)
def _candidates(network: Network, orders: tuple[tuple[str, Network, Tree], ...], rows: int) -> dict[str, Plan]:
    plans = {name: Plan(of, tree, rows, name) for name, of, tree in orders if name != "naive"}
    _add_optimal(plans, network, rows, rows)
    _add_splits(plans, network, rows)
    dense = prod(network.shape((*network.inputs, *network.outputs)))
    if len(network.factors) > 1 and dense <= DENSE_LIMIT:
        plans["dense"] = Plan(network, (INPUT, greedy(network.as_dense())), rows, "dense")
    for name, plan in [*plans.items()]:
        wide = replace(plan, wide=True)
        if "g" in network.sizes and any(op.diagonal for op in ready(wide.text).program.hot):
            plans[f"{name} wide"] = wide
    found = {**plans}
    if rows > FEW_ROWS:  # orders that are optimal for all rows may reread too much weight data per chunk
        _add_optimal(plans, network, rows, FEW_ROWS, f" for {FEW_ROWS} rows")
    for name, plan in plans.items():
        each = max(1, _per_row(plan))
        elements = max(CHUNK_ELEMENTS, min(max(2 * _hoists(plan), CHUNK_ROWS * each), 4 * CHUNK_ELEMENTS))
        chunk = max(1, elements // each)
        if 2 * chunk <= rows:  # one and a little more would cost a call and save nothing
            found[f"{name} in chunks"] = plan.in_chunks(chunk)
    return found


def _add_splits(plans: dict[str, Plan], network: Network, rows: int) -> None:
    """x In first, with few columns, then Out, which is hoisted."""
    parts = sides(network)
    if parts is None:
        return
    left, right, bonds = parts
    gate = [leg for leg in ("g",) if any(leg in factor.legs for factor in left)]
    inner = Network.of(left, network.inputs, (*gate, *bonds), network.sizes)
    outputs = prod(network.shape(network.outputs))
    if prod(inner.shape(inner.outputs)) >= outputs:
        return
    legs = tuple(leg for leg in network.outputs if leg != "g")
    out_gate = [leg for leg in ("g",) if any(leg in factor.legs for factor in right)]
    outer = optimal(Network.of(right, (), (*out_gate, *bonds, *legs), network.sizes))
    for traffic in TRAFFICS:
        name = f"split/{traffic}" if traffic else "split"
        plan = Plan(network, (optimal(inner, rows, traffic), outer), rows, name)
        if all(plan.tree != other.tree for other in plans.values()):
            plans[name] = plan


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
    return max([*made, *(op.copied // 2 // plan.rows for op in ready(plan.text).program.hot)], default=0)


def _hoists(plan: Plan) -> int:
    """Elements of the largest product of weights that a plan makes."""
    return max((step.size for step in plan.steps if step.hoisted), default=0)


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


def default_prices() -> Prices:
    """The prices of this processor."""
    return NARROW_REGISTERS if register_width() == 8 else Prices()


AMOUNTS = ("macs", "batched", "read", "written", "fresh", "copied", "matrix", "call")


def work(plan: Plan, rows: int, training: bool, frozen: bool = False) -> dict[str, float]:
    """What a call of a plan does: multiply-adds, and those in batches; elements read, written, copied and put into
    fresh memory; matrices and calls.

    All but frozen layers do the work that needs no x at every call. Training includes the gradients, and in chunks the
    steps that are run again.
    """
    if plan.chunk is not None:
        once = _hot_work(plan, plan.chunk, training, _made_again(plan))
        once["written"] *= IN_CACHE
        times = rows / plan.chunk
        total = {name: amount * times for name, amount in once.items()}
        total["fresh"] = once["fresh"] * (1 + NOT_USED_AGAIN * (times - 1))
    else:
        total = _hot_work(plan, rows, training)
    if not frozen:
        _add_hoisted_work(plan, total, RUNS if training else 1)
    return total


def _hot_work(plan: Plan, rows: int, training: bool, again: int = 0) -> dict[str, float]:
    """The steps that touch x. In training each is a product and the gradients of its operands, x excepted; the first
    `again` of them are made once more for the backward."""
    total = dict.fromkeys(AMOUNTS, 0.0)
    program = ready(plan.text).program
    ops = {op.out: op for op in program.hot}
    share = rows / (plan.chunk or plan.rows)  # op.copied and op.matrices are for the rows that are run at once
    made: list[float] = []  # sizes of all that is made of x
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
        made += [written, copied / 2, back * big * rows]
        if op.matrices > 1:
            total["batched"] += runs * macs
            total["matrix"] += runs * op.matrices * (share if op.spread else 1)
        total["call"] += runs
    total["fresh"] += sum(size for size in made if size > FRESH)
    if program.last.permutation is not None and not program.straight:
        total["copied"] += 2 * rows * prod(plan.network.shape(plan.network.outputs))
    return total


def _made_again(plan: Plan) -> int:
    """Steps that are run again for the backward of a chunk: up to the last whose operand was too large to be kept."""
    kept, last = 0, 0
    sizes = [step.size for step in plan.steps if not step.hoisted]
    for i, size in enumerate(sizes[:-1], 1):
        if kept + size <= plan.width:
            kept += size
        else:
            last = i
    return last


def _add_hoisted_work(plan: Plan, total: dict[str, float], runs: int) -> None:
    """The products of weights, and the small operands laid out."""
    of = ready(plan.text)
    if of.products is not None:
        total["macs"] += runs * AT_ONCE * plan.hoisted_macs
        total["call"] += runs
        return
    ops = {op.out: op for op in of.program.hoisted}
    for step in plan.steps:
        if step.hoisted:
            op = ops[step.name]
            total["macs"] += runs * step.macs * _padding(op)
            total["written"] += runs * step.size
            total["copied"] += runs * op.copied
            total["matrix"] += runs * op.matrices if op.matrices > 1 else 0
            total["call"] += runs
    for op in of.program.hot:
        if op.right_view.permutation is not None:
            there_and_back = 2 if runs > 1 else 1
            total["copied"] += 2 * there_and_back * prod(op.right_view.legs)


def _padding(op: Op) -> float:
    """Multiply-adds done over those that count: a product of a few columns takes as long as one of a whole register."""
    columns = op.b.groups[0 if op.narrow else -1]
    return REGISTER * -(-columns // REGISTER) / columns if columns > 0 else 1.0


def executed_macs(plan: Plan) -> int:
    """Multiply-adds that run for one row of x, those that a wide product throws away included."""
    pairs = {op.out: op.diagonal[0][op.diagonal[1]] for op in ready(plan.text).program.hot if op.diagonal is not None}
    return sum(step.macs * pairs.get(step.name, 1) for step in plan.steps if not step.hoisted)


def predict(plan: Plan, rows: int, training: bool = True, prices: Prices | None = None, frozen: bool = False) -> float:
    """Price of one call in multiply-adds."""
    done = work(plan, rows, training, frozen)
    prices = prices or default_prices()
    return done.pop("macs") + sum(getattr(prices, name) * amount for name, amount in done.items())


SAME = 1.002  # prices closer than this are the same


@lru_cache(maxsize=4096)
def predicted(product: Product) -> str:
    """The candidate with the lowest price; the first of those that cost the same, which are the format's own orders."""
    price = prices(product)
    return next(name for name in price if price[name] <= SAME * min(price.values()))


def prices(product: Product) -> dict[str, float]:
    """The price of every candidate."""
    of = default_prices().for_dtype(product.dtype)
    found = candidates(product)
    return {name: predict(plan, product.rows, product.grad, of, product.frozen) for name, plan in found.items()}
