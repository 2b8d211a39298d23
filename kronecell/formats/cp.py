"""CANDECOMP/PARAFAC over the joint modes m_i n_i."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import ClassVar

from torch import Tensor

from kronecell.formats.base import Format, mode_legs
from kronecell.formats.fitting.cp import cp_start
from kronecell.formats.fitting.options import FitOptions
from kronecell.formats.fitting.tucker import joint_modes
from kronecell.plans.network import INPUT, Factor, Network
from kronecell.plans.order import Tree, chain


@dataclass(frozen=True)
class CP(Format):
    """W = sum_r F^(1)[m1 n1, r] o ... o F^(d)[md nd, r].

    No largest feasible rank is enforced: the maximal CP rank of a tensor is not known in general.

    >>> CP((8, 20), (4, 4), r=3).num_params
    336
    """

    r: int
    clip: InitVar[bool] = False

    kind: ClassVar[str] = "cp"
    equation: ClassVar[str] = "W = sum_r F_1[:,r] o F_2[:,r] o ... o F_d[:,r]"
    space: ClassVar[str] = "d mn r"
    computation: ClassVar[str] = "d max(m,n)^(d+1) r"
    restarts: ClassVar[int] = 6

    def __post_init__(self, clip: bool) -> None:
        self._check_modes(same_count=True)
        self._settle_count("r", None, clip)

    def _network(self) -> Network:
        m, n = mode_legs("m", self.m), mode_legs("n", self.n)
        factors = [Factor(f"F{i}", (f"m{i}", f"n{i}", "r")) for i in range(1, self.d + 1)]
        if self.d == 1:  # a single factor shares its CP index with no other: sum it with ones
            factors.append(Factor("i", ("r",), constant="ones"))
        return Network.of(factors, m, n, m | n | {"r": self.r})

    def orders(self) -> dict[str, Tree]:
        names = [f.name for f in self._network().factors]
        return {"forward": chain(INPUT, *names), "backward": chain(INPUT, *reversed(names))}

    def _decompose(self, W: Tensor, options: FitOptions) -> dict[str, Tensor]:
        """Leading singular vectors of every joint mode; the refinement does the rest (for d = 2 it is the SVD)."""
        factors = cp_start(joint_modes(W, self.m, self.n), self.r, options)
        return {
            f"F{i}": factor.reshape(m, n, self.r)
            for i, (factor, m, n) in enumerate(zip(factors, self.m, self.n, strict=True), 1)
        }

    @property
    def unshared(self) -> tuple[str, ...]:
        return ("F1",)
