"""W as In and Out with few columns between, as tensors: the form of a matrix for a few rows of a stream, and for U."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from torch import Tensor

from kronecell.ops.contract import contract_network
from kronecell.plans.network import GATE, Network
from kronecell.plans.split import Split, split_of


def split_matrices(network: Network, factors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """In and Out of a network that splits with fewer columns than outputs; differentiable."""
    split = split_of(network)
    if split is None or split.width >= prod(network.shape(network.outputs)):
        return None
    return matrices_of(split, factors)


def matrices_of(split: Split, factors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """In (r, M) and Out (r, gates * N); where gates have their own columns, In (gates * r, M) and Out (gates, r, N)."""
    rank, gates = split.rank, split.gates
    inner = contract_network(split.inner, factors)
    outer = contract_network(split.outer, factors)
    width = inner.numel() // split.width
    if split.gated:
        In = inner.reshape(gates, width, rank).transpose(1, 2).reshape(gates * rank, width)
        gated = GATE in split.outer.network.outputs
        Out = outer.reshape(gates if gated else 1, rank, -1)
        return In, Out if gated else Out.expand(gates, -1, -1).contiguous()
    Out = outer.reshape(gates, rank, -1).transpose(0, 1).reshape(rank, -1)
    return inner.reshape(width, rank).t().contiguous(), Out
