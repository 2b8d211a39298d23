"""W as In and Out with few columns between, as tensors: the form of a matrix for a few rows of a stream, and for U."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from torch import Tensor

from kronecell.ops.contract import contract_text
from kronecell.plans.network import GATE, Network
from kronecell.plans.split import split_of

WORTH_SPLITTING = 0.8  # a split with more than so much of the dense multiply-adds is not faster: two products, not one


class SplitText(NamedTuple):
    """A split as plain texts and numbers, which tracers can hold."""

    inner: str  # plans that contract to In and to Out
    outer: str
    gates: int
    rank: int
    own_columns: bool  # whether every gate has columns of its own
    own_outer: bool  # whether Out differs by gate
    width: int
    outputs: int  # of all gates
    hoisted_macs: int  # of both plans

    @staticmethod
    def of(network: Network) -> SplitText | None:
        """That of a network, if no factor holds both an input and an output mode."""
        split = split_of(network)
        if split is None:
            return None
        own_outer = GATE in split.outer.network.outputs
        sizes = (prod(network.shape(network.inputs)), prod(network.shape(network.outputs)))
        once = split.inner.hoisted_macs + split.outer.hoisted_macs
        return SplitText(
            split.inner.text, split.outer.text, split.gates, split.rank, split.gated, own_outer, *sizes, once
        )

    @property
    def columns(self) -> int:
        """Columns between, of all gates."""
        return self.rank * (self.gates if self.own_columns else 1)

    @property
    def narrow(self) -> bool:
        """Whether there are fewer columns between than outputs."""
        return self.columns < self.outputs

    @property
    def macs(self) -> int:
        """Multiply-adds of one row."""
        return self.columns * self.width + self.rank * self.outputs

    @property
    def elements(self) -> int:
        """Of In and Out."""
        return self.columns * self.width + self.rank * (self.outputs if self.own_columns or self.own_outer else 1)

    @property
    def pays(self) -> bool:
        """Whether two narrow products of a few rows take less time than a dense one."""
        return self.macs <= WORTH_SPLITTING * self.width * self.outputs


def matrices_of(split: SplitText, factors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """In (r, M) and Out (r, gates * N); where gates have their own columns, In (gates * r, M) and Out (gates, r, N)."""
    inner, outer = contract_text(split.inner, factors), contract_text(split.outer, factors)
    gates, rank, width = split.gates, split.rank, split.width
    if split.own_columns:
        In = inner.reshape(gates, width, rank).transpose(1, 2).reshape(gates * rank, width)
        Out = outer.reshape(gates if split.own_outer else 1, rank, -1)
        return In, Out if split.own_outer else Out.expand(gates, -1, -1).contiguous()
    Out = outer.reshape(gates, rank, -1).transpose(0, 1).reshape(rank, -1)
    return inner.reshape(width, rank).t().contiguous(), Out
