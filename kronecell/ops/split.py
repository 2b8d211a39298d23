"""The thin split: W = In Out with few columns between, for formats whose factors touch either the input or the output.

S = x In is then a short vector, and Out is an ordinary weight matrix: an LSTM or GRU over S with `weight_ih = Out^T`
runs in torch's native kernel (LowRank, TR, KT and KCP split; TT, CP, Tucker, BT and HT have factors that hold both an
input and an output mode, and do not).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from kronecell.plans.network import GATE, Factor, Network
from kronecell.plans.order import optimal
from kronecell.ops.plan import Plan

OUT = "Out"  # the name of the output side among prepared tensors


@dataclass(frozen=True)
class Split:
    """S (..., R) = x In by `inner`, Out (R, gates * N) by `outer`; R counts the gates when S differs by gate."""

    inner: Plan
    outer: Plan
    gates: int
    bonds: tuple[str, ...]

    @property
    def gated(self) -> bool:
        """Whether S has a part per gate, which makes Out block diagonal."""
        return GATE in self.bonds

    @property
    def width(self) -> int:
        """R, the number of columns between."""
        return prod(self.inner.network.shape(self.bonds))

    def out_matrix(self, factors: Mapping[str, Tensor]) -> Tensor:
        """Out (R, gates * N), made once per weight update; contiguous is its transpose, the kernel's weight_ih."""
        tensor = self.outer.contract(factors)  # (g?, bonds without g, outputs without g)
        rank = self.width // (self.gates if self.gated else 1)
        copies = self.gates if GATE in self.outer.network.outputs else 1
        blocks = tensor.reshape(copies, rank, -1).mT  # (g?, N, rank)
        if not self.gated:
            return blocks.reshape(-1, rank).t()
        # every gate has its own columns of S, and the same Out where only the input side differs
        own = torch.eye(self.gates, dtype=blocks.dtype, device=blocks.device).reshape(self.gates, 1, self.gates, 1)
        return (blocks.unsqueeze(2) * own).reshape(-1, self.width).t()

    # The same three verbs as a Plan, so that a split can stand where a plan stands.

    def prepare(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The work that needs no x: the hoisted steps of the input side, and Out."""
        return {**self.inner.prepare(factors), OUT: self.out_matrix(factors)}

    def apply(self, x: Tensor, prepared: Mapping[str, Tensor], bias: Tensor | None = None) -> Tensor:
        """x (..., M) -> (..., gates * N)."""
        columns, out = self.inner.apply(x, prepared), prepared[OUT]
        if bias is None:
            return columns @ out
        if columns.ndim == 2:
            return torch.addmm(bias, columns, out)
        y = torch.addmm(bias, columns.reshape(-1, columns.shape[-1]), out)
        return y.reshape(*columns.shape[:-1], y.shape[-1])

    def execute(self, x: Tensor, factors: Mapping[str, Tensor], bias: Tensor | None = None) -> Tensor:
        """Both."""
        return self.apply(x, self.prepare(factors), bias)

    @property
    def rows(self) -> int:
        """Rows it is meant for."""
        return self.inner.rows

    @property
    def macs(self) -> int:
        """Multiply-adds for one row: the input side, and S Out with its zero blocks."""
        return self.inner.macs + self.width * self.gates * prod(self.out_modes)

    @property
    def hoisted_macs(self) -> int:
        """Multiply-adds done once per weight update."""
        return self.inner.hoisted_macs + self.outer.hoisted_macs

    @property
    def peak(self) -> int:
        """Elements of the largest intermediate."""
        return max(self.inner.peak, self.outer.peak, self.rows * self.gates * prod(self.out_modes))

    @property
    def out_modes(self) -> tuple[int, ...]:
        """Output modes of one gate."""
        network = self.outer.network
        return network.shape(leg for leg in network.outputs if leg != GATE and leg not in self.bonds)

    def __str__(self) -> str:
        width = self.gates * prod(self.out_modes)
        return f"{self.inner}\nthen S ({self.width} columns) times Out ({self.width} x {width})"


@lru_cache(maxsize=256)
def thin_split(network: Network, rows: int = 1, traffic: int = 0, wide: bool = False) -> Split | None:
    """The split of a network, or None when a factor holds both an input and an output mode.

    `traffic` and `wide` are those of `optimal` and `Plan`, for the input side.
    """
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
    gate = (GATE,) if GATE in held_left else ()
    crossing = tuple(leg for leg, _ in network.leg_sizes if leg in held_left & held_right and leg != GATE)
    inner = Network.of(left, network.inputs, (*gate, *crossing), network.sizes)
    plan = Plan(inner, optimal(inner, rows, traffic), rows, "split", wide)
    # The columns between may stand in any order: in the one in which the last product makes them, nothing is moved.
    made = [leg for leg in plan.program.hot[-1].legs if leg in {*crossing}]
    if made != [*crossing]:
        crossing = tuple(made)
        plan = replace(plan, network=Network.of(left, network.inputs, (*gate, *crossing), network.sizes))
    out_gate = (GATE,) if GATE in held_right else ()
    out_legs = tuple(leg for leg in network.outputs if leg != GATE)
    outer = Network.of(right, (), (*out_gate, *crossing, *out_legs), network.sizes)
    gates = network.sizes.get(GATE, 1)
    return Split(plan, Plan(outer, optimal(outer), order="split"), gates, (*gate, *crossing))
