"""Tensor train, Eq. (tt) of the paper."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import ClassVar

from kronecell.formats.base import Format, mode_legs
from kronecell.network import INPUT, Factor, Network
from kronecell.order import Tree, chain


@dataclass(frozen=True)
class TT(Format):
    """W = G_1 . G_2 . ... . G_d with cores G_i (r_{i-1} x m_i n_i x r_i), r_0 = r_d = 1; r lists r_1 ... r_{d-1}.

    >>> TT((8, 20, 20, 18), (4, 4, 4, 4), r=4).num_params
    2976
    """

    r: int | tuple[int, ...]
    clip: InitVar[bool] = False

    kind: ClassVar[str] = "tt"
    equation: ClassVar[str] = "W = G_1 . G_2 ... G_d"
    space: ClassVar[str] = "(d-2) mn r^2 + 2 mn r"
    computation: ClassVar[str] = "d max(m,n)^(d+1) r^2"

    def __post_init__(self, clip: bool) -> None:
        self._check_modes(same_count=True)
        self._settle_ranks("r", [f"r{i}" for i in range(1, self.d)], clip)

    def _network(self) -> Network:
        assert isinstance(self.r, tuple)
        m, n, r = mode_legs("m", self.m), mode_legs("n", self.n), mode_legs("r", self.r)
        factors = []
        for i in range(1, self.d + 1):
            bonds = [f"r{j}" for j in (i - 1, i) if 0 < j < self.d]
            before, after = (bonds[:1], bonds[1:]) if i > 1 else ([], bonds)
            factors.append(Factor(f"G{i}", (*before, f"m{i}", f"n{i}", *after)))
        return Network.of(factors, m, n, m | n | r)

    def orders(self) -> dict[str, Tree]:
        cores = [f"G{i}" for i in range(1, self.d + 1)]
        return {"forward": chain(INPUT, *cores), "backward": chain(INPUT, *reversed(cores))}

    @property
    def unshared(self) -> tuple[str, ...]:
        return ("G1",)
