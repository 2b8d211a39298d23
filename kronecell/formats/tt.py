"""Tensor train, Eq. (tt) of the paper."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import ClassVar

from torch import Tensor

from kronecell.formats.base import Format, mode_legs
from kronecell.formats.fitting.options import FitOptions
from kronecell.formats.fitting.svd import left_basis
from kronecell.plans.network import INPUT, Factor, Network
from kronecell.plans.order import Tree, chain


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

    def _decompose(self, W: Tensor, options: FitOptions) -> dict[str, Tensor]:
        """TT-SVD (Oseledets 2011): split off one joint mode at a time; within sqrt(d-1) of the best."""
        assert isinstance(self.r, tuple)
        d, m, n = self.d, self.m, self.n
        pairs = [axis for i in range(d) for axis in (i, d + i)]
        rest = W.reshape(*m, *n).permute(pairs)  # (m1, n1, m2, n2, ...)
        factors, before = {}, 1
        for i in range(1, d):
            rank = self.r[i - 1]
            unfolding = rest.reshape(before * m[i - 1] * n[i - 1], -1)
            Q = left_basis(unfolding, rank, options.seed)
            factors[f"G{i}"] = Q.reshape(*([before] if i > 1 else []), m[i - 1], n[i - 1], rank)
            rest, before = Q.mT @ unfolding, rank
        factors[f"G{d}"] = rest.reshape(*([before] if d > 1 else []), m[-1], n[-1])
        return factors

    @property
    def unshared(self) -> tuple[str, ...]:
        return ("G1",)
