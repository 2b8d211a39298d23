"""An order taken apart into its pairwise steps, each with its legs and its cost."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kronecell.plans.network import INPUT, Network
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
        """Contract `tree`, given the legs that somebody outside it still needs; return its name and legs."""
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
