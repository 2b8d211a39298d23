"""The split: W = In Out with few columns between, where every factor touches the input or the output, not both.

x In is then a short vector, and Out an ordinary weight matrix: a recurrence with such a U runs as two narrow products a
step. LowRank, TR, KT and KCP split; TT, CP, Tucker, BT and HT have factors that hold an input and an output mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from kronecell.plans.network import GATE, Factor, Network
from kronecell.plans.order import optimal
from kronecell.plans.plan import Plan


@dataclass(frozen=True)
class Split:
    """In and Out as networks without x, and as an order for x In followed by Out.

    `inner` contracts to In (gate of In if it has one, inputs, bonds), `outer` to Out (gate of Out if it has one, bonds,
    outputs of one gate).
    """

    inner: Plan
    outer: Plan
    bonds: tuple[str, ...]
    gates: int

    @property
    def rank(self) -> int:
        """Columns between, for one gate where In differs by gate."""
        return prod(self.inner.network.shape(self.bonds))

    @property
    def gated(self) -> bool:
        """Whether every gate has columns of its own."""
        return self.gates > 1 and GATE in self.inner.network.outputs

    @property
    def width(self) -> int:
        """Columns between, of all gates."""
        return self.rank * (self.gates if self.gated else 1)


@lru_cache(maxsize=256)
def split_of(network: Network) -> Split | None:
    """The split of a network, or None where a factor holds both an input and an output mode."""
    parts = sides(network)
    if parts is None:
        return None
    left, right, bonds = parts
    gated_left = any(GATE in f.legs for f in left)
    gated_right = any(GATE in f.legs for f in right)
    outputs = [leg for leg in network.outputs if leg != GATE]
    gate = (GATE,)
    inner = Network.of(left, (), (*(gate if gated_left else ()), *network.inputs, *bonds), network.sizes)
    outer = Network.of(right, (), (*(gate if gated_right else ()), *bonds, *outputs), network.sizes)
    first, second = (Plan(part, optimal(part), order="split") for part in (inner, outer))
    return Split(first, second, bonds, network.sizes.get(GATE, 1))


def sides(network: Network) -> tuple[list[Factor], list[Factor], tuple[str, ...]] | None:
    """The factors of the input side, those of the output side, and the legs between them; None where one is on both."""
    inputs, outputs = {*network.inputs}, {*network.outputs} - {GATE}
    left: list[Factor] = [f for f in network.parameters if inputs & {*f.legs}]
    right: list[Factor] = [f for f in network.parameters if not inputs & {*f.legs}]
    if not left or not right or any(outputs & {*f.legs} for f in left):
        return None
    held_left = {leg for f in left for leg in f.legs}
    for constant in network.constants:
        (left if held_left & {*constant.legs} else right).append(constant)
    held_left = {leg for f in left for leg in f.legs}
    held_right = {leg for f in right for leg in f.legs}
    bonds = tuple(leg for leg, _ in network.leg_sizes if leg in held_left & held_right and leg != GATE)
    return left, right, bonds
