"""Drawn formats (modes and d from 1 to 5, unequal ranks, small enough for an oracle) and the product they equal."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from kronecell.formats import BT, CP, HT, KCP, KT, TR, TT, Dense, Doped, Format, LowRank, Tucker

STRUCTURES = ("dense", "lowrank", "cp", "tucker", "tt", "tr", "bt", "ht", "kt", "kcp-pair", "kcp-all")
KINDS = (*STRUCTURES, "doped")
BUDGET = 48  # largest M or N


@st.composite
def modes(draw: st.DrawFn, d: int) -> tuple[int, ...]:
    """d modes from 1 to 5 with a bounded product."""
    left, out = BUDGET, []
    for _ in range(d):
        size = draw(st.integers(1, min(5, max(1, left))))
        out.append(size)
        left //= size
    return tuple(draw(st.permutations(out)))


@st.composite
def formats(draw: st.DrawFn, kind: str) -> Format:
    """A format of the given kind; ranks are drawn freely and clipped to what the network can use."""
    if kind == "doped":
        structure = draw(st.sampled_from(STRUCTURES).flatmap(formats))
        block = draw(st.sampled_from([size for size in (1, 2, 3, 4) if structure.N % size == 0]))
        return Doped(structure, draw(st.sampled_from([0, 0.02, 0.1, 0.5, 1])), block)
    d = draw(st.integers(1, 5))
    m = draw(modes(d))
    unequal = kind in ("dense", "lowrank", "tr", "kt")
    n = draw(modes(draw(st.integers(1, 5)) if unequal else d))
    rank = st.integers(1, 4)

    def ranks(count: int) -> int | tuple[int, ...]:
        return draw(st.one_of(rank, st.tuples(*[rank] * count)))

    if kind == "dense":
        return Dense(m, n)
    if kind == "lowrank":
        return LowRank(m, n, draw(rank), clip=True)
    if kind == "cp":
        return CP(m, n, draw(rank))
    if kind == "tucker":
        return Tucker(m, n, ranks(d), clip=True)
    if kind == "tt":
        return TT(m, n, ranks(d - 1), clip=True)
    if kind == "tr":
        return TR(m, n, ranks(len(m) + len(n)), clip=True)
    if kind == "bt":
        return BT(m, n, ranks(d), P=draw(st.integers(1, 3)), clip=True)
    if kind == "ht":
        return HT(m, n, ranks(0 if d == 1 else 2 * d - 2), clip=True)
    if kind == "kt":
        return KT(m, n, draw(rank), clip=True)
    small = st.integers(1, 3)
    K = min(KCP(m, n, 3, 1, 1, clip=True).K, draw(small))
    CA, CB = (draw(st.one_of(small, st.tuples(*[small] * K))) for _ in range(2))
    return KCP(m, n, K, CA, CB, tie=kind.removeprefix("kcp-"), clip=True)


def drawn(fmt: Format, generator: torch.Generator, **options: Any) -> dict[str, torch.Tensor]:
    """Random factors, and of a sparse part too, which `init` leaves zero."""
    factors = fmt.init(generator, **options)
    return factors | {
        name: torch.randn(t.shape, generator=generator).to(t) for name, t in factors.items() if name == "S"
    }


def dense_product(fmt: Format, x: torch.Tensor, factors: dict, gates: int, shared: object) -> torch.Tensor:
    """x @ W for all gates, gate-major, with every W formed."""
    W = fmt.to_dense(factors, gates=gates, shared=shared).reshape(gates, fmt.M, fmt.N)
    return torch.stack([x @ w for w in W], dim=-2).flatten(-2)
