"""A row of the matrix of a network: its input legs fixed to the digits of the row's number, the rest contracted.

Fixing the input legs of a factor picks one slice of it for every row, so the rows are one more leg, held by each factor
that had an input leg. What is left is a network like any other, with an order and a cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from string import ascii_letters

from kronecell.errors import PlanError
from kronecell.plans.network import Factor, Network
from kronecell.plans.order import optimal
from kronecell.plans.plan import steps_of

ROWS = "rows"  # the leg of the rows that are looked up
PLANNED = 128  # rows for which the order is chosen; it serves every number


@dataclass(frozen=True)
class Slices:
    """How slices of a factor are picked: its legs in order, fixed ones first, and the digits that number the slices."""

    name: str
    order: tuple[int, ...]
    digits: tuple[int, ...]  # numbers of input legs
    shape: tuple[int, ...]  # of a slice


@dataclass(frozen=True)
class Lookup:
    """Which slices are picked and how they are contracted: names and integers."""

    network: Network
    digits: tuple[tuple[int, int], ...]  # of every input leg its size, and how many rows one step of it is: C order
    slices: tuple[Slices, ...]
    products: tuple[tuple[str, str, str, str], ...]  # left, right (or ""), torch.einsum's equation, result
    macs: int  # multiply-adds of one row
    hoisted_macs: int  # and those that do not depend on the number of rows


@lru_cache(maxsize=1024)
def lookup_of(network: Network) -> Lookup:
    """The lookup in a network's matrix."""
    sizes, inputs = network.shape(network.inputs), {*network.inputs}
    slices, factors = [], []
    for factor in network.factors:
        fixed = [leg for leg in network.inputs if leg in factor.legs]
        rest = [leg for leg in factor.legs if leg not in inputs]
        factors.append(Factor(factor.name, (ROWS, *rest) if fixed else factor.legs))
        if fixed:
            order = tuple(factor.legs.index(leg) for leg in (*fixed, *rest))
            digits = tuple(network.inputs.index(leg) for leg in fixed)
            slices.append(Slices(factor.name, order, digits, network.shape(rest)))
    rows = Network.of(factors, (), (ROWS, *network.outputs), {**network.sizes, ROWS: PLANNED})
    steps = steps_of(rows, optimal(rows))
    if not steps:
        (only,) = factors
        products: tuple[tuple[str, str, str, str], ...] = (
            (only.name, "", _equation(rows, only.legs, result=rows.outputs), only.name),
        )
    else:
        results = [*(step.out_legs for step in steps[:-1]), rows.outputs]
        products = tuple(
            (step.left, step.right, _equation(rows, step.left_legs, step.right_legs, result=legs), step.name)
            for step, legs in zip(steps, results, strict=True)
        )
    return Lookup(
        network=network,
        digits=tuple((size, prod(sizes[i + 1 :])) for i, size in enumerate(sizes)),
        slices=tuple(slices),
        products=products,
        macs=sum(step.macs for step in steps if ROWS in step.out_legs) // PLANNED,
        hoisted_macs=sum(step.macs for step in steps if ROWS not in step.out_legs),
    )


def _equation(network: Network, *operands: tuple[str, ...], result: tuple[str, ...]) -> str:
    names = [*network.sizes]
    if len(names) > len(ascii_letters):
        raise PlanError(f"a row of this format has {len(names)} legs; at most {len(ascii_letters)} are supported")
    letter = dict(zip(names, ascii_letters, strict=False))
    *left, right = ("".join(letter[leg] for leg in legs) for legs in (*operands, result))
    return f"{','.join(left)}->{right}"
