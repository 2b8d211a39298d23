"""A plan is a pairwise contraction order with its costs: what is contracted in which step, and what each step costs.

Counting convention: one multiply-add is one; the cost of a step is the product of the sizes of all legs it touches.
A step that does not touch x is hoisted: it is done once per weight update, not once per row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from kronecell.errors import PlanError
from kronecell.plans.network import INPUT, Factor, Network
from kronecell.plans.order import Tree, leaves


@dataclass(frozen=True)
class Step:
    """One pairwise contraction; `macs` and `size` are per row of x unless the step is hoisted."""

    left: str
    right: str
    name: str
    left_legs: tuple[str, ...]
    right_legs: tuple[str, ...]
    out_legs: tuple[str, ...]
    macs: int
    size: int
    hoisted: bool


def steps_of(network: Network, tree: Tree) -> tuple[Step, ...]:
    """Steps in the order they are executed, hoisted ones first."""
    steps: list[Step] = []

    def visit(tree: Tree, outside: frozenset[str]) -> tuple[str, tuple[str, ...]]:
        """Contract `tree`, given the legs that are still needed outside it; return its name and legs."""
        if isinstance(tree, str):
            return tree, network.legs[tree]
        legs_of = [frozenset(leg for name in leaves(side) for leg in network.legs[name]) for side in tree]
        left, left_legs = visit(tree[0], outside | legs_of[1])
        right, right_legs = visit(tree[1], outside | legs_of[0])
        touched = (*left_legs, *(leg for leg in right_legs if leg not in left_legs))
        out = tuple(leg for leg in touched if leg in outside)
        name, hoisted = f"({left} {right})", INPUT not in leaves(tree)
        macs, size = prod(network.shape(touched)), prod(network.shape(out))
        steps.append(Step(left, right, name, left_legs, right_legs, out, macs, size, hoisted))
        return name, out

    visit(tree, frozenset(network.outputs))
    return tuple(sorted(steps, key=lambda step: not step.hoisted))  # stable, so dependencies stay in order


@dataclass(frozen=True)
class Plan:
    """A network, an order for it, and the number of rows it is meant for. Integers and names: a plan knows no tensor.

    `wide` lets the machine do more multiply-adds than are counted where that saves moving x: products over the gates
    are then taken for all pairs of gates. With `chunk`, that many rows are run at a time: intermediates stay in cache.
    """

    network: Network
    tree: Tree
    rows: int = 1
    order: str = "custom"
    wide: bool = False
    chunk: int | None = None

    def __post_init__(self) -> None:
        expected, got = sorted(self.network.legs), sorted(leaves(self.tree))
        if expected != got:
            raise PlanError(f"an order must use every tensor exactly once: expected {expected}, got {got}")
        if self.rows < 1:
            raise PlanError(f"rows must be at least 1, got {self.rows}")
        if self.chunk is not None and self.chunk < 1:
            raise PlanError(f"a chunk must have at least 1 row, got {self.chunk}")

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Steps in the order they are executed, hoisted ones first."""
        return steps_of(self.network, self.tree)

    @cached_property
    def width(self) -> int:
        """Elements of a row of x."""
        return prod(self.network.shape(self.network.inputs))

    @property
    def macs(self) -> int:
        """Multiply-adds for one row of x, hoisted work excluded."""
        return sum(step.macs for step in self.steps if not step.hoisted)

    @property
    def hoisted_macs(self) -> int:
        """Multiply-adds done once per weight update."""
        return sum(step.macs for step in self.steps if step.hoisted)

    @property
    def flops(self) -> int:
        """2 * macs."""
        return 2 * self.macs

    @property
    def total_macs(self) -> int:
        """Multiply-adds for all rows of this plan, hoisted work included once."""
        return self.hoisted_macs + self.rows * self.macs

    @property
    def peak(self) -> int:
        """Elements of the largest result of a step, for the rows of this plan (the output counts, x does not)."""
        rows = self.rows if self.chunk is None else min(self.rows, self.chunk)
        return max((step.size * (1 if step.hoisted else rows) for step in self.steps), default=0)

    def in_chunks(self, rows: int) -> Plan:
        """The same, so many rows at a time."""
        return replace(self, chunk=rows)

    @cached_property
    def text(self) -> str:
        """The plan as one line of JSON: how an operator is told what to run, and what an exported graph holds."""
        network = self.network
        factors = [[f.name, [*f.legs], f.constant, [*f.blocks]] for f in network.factors]
        fields = {
            "factors": factors, "inputs": network.inputs, "outputs": network.outputs, "sizes": dict(network.leg_sizes),
            "tree": self.tree, "rows": self.rows, "order": self.order, "wide": self.wide, "chunk": self.chunk,
        }  # fmt: skip
        return json.dumps(fields, separators=(",", ":"))

    def __str__(self) -> str:
        def show(name: str, legs: tuple[str, ...]) -> str:
            return f"{name}[{' '.join(legs)}]"

        rows = [("step", "contract", "result", "size", "multiply-adds", "when")]
        names: dict[str, str] = {}
        for i, step in enumerate(self.steps, 1):
            left, right = names.get(step.left, step.left), names.get(step.right, step.right)
            names[step.name] = f"#{i}"
            contract = f"{show(left, step.left_legs)} {show(right, step.right_legs)}"
            when = "once" if step.hoisted else "each row"
            rows.append((f"#{i}", contract, f"[{' '.join(step.out_legs)}]", f"{step.size:,}", f"{step.macs:,}", when))
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        right_aligned = {3, 4}
        lines = [
            "  ".join(
                cell.rjust(w) if i in right_aligned else cell.ljust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * w for w in widths))
        lines.append(
            f"order {self.order}: {self.macs:,} multiply-adds a row, {self.hoisted_macs:,} once per weight update; "
            f"largest intermediate for {self.rows:,} row(s): {self.peak:,} elements"
        )
        if self.chunk is not None:
            lines.append(f"in chunks of {self.chunk:,} rows")
        return "\n".join(lines)


@lru_cache(maxsize=4096)
def plan_of(text: str) -> Plan:
    """The plan that `Plan.text` describes."""
    try:
        fields: dict[str, Any] = json.loads(text)
        factors = [
            Factor(name, tuple(legs), constant, tuple(blocks)) for name, legs, constant, blocks in fields["factors"]
        ]
        network = Network.of(factors, fields["inputs"], fields["outputs"], fields["sizes"])
        rest = (fields["rows"], fields["order"], fields["wide"], fields["chunk"])
        return Plan(network, _tree(fields["tree"]), *rest)
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"not the text of a plan ({error}): {text[:100]!r}") from None


def _tree(nested: Any) -> Tree:
    return nested if isinstance(nested, str) else (_tree(nested[0]), _tree(nested[1]))
