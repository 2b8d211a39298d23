"""Low-rank factorisation W = U V: the simplest compression, and the bound for every rank-limited format."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import ClassVar

from torch import Tensor

from kronecell.formats.base import Format, largest_bond, mode_legs
from kronecell.formats.fitting.options import FitOptions
from kronecell.formats.fitting.svd import left_basis, truncated_svd
from kronecell.plans.network import INPUT, Factor, Network
from kronecell.plans.order import Tree


@dataclass(frozen=True)
class LowRank(Format):
    """W = U V with U (M x r) and V (r x N): (M + N) r parameters and multiply-adds.

    >>> LowRank((8, 20), (4, 4), r=3).num_params
    528
    """

    r: int
    clip: InitVar[bool] = False

    kind: ClassVar[str] = "lowrank"
    equation: ClassVar[str] = "W = U V"
    space: ClassVar[str] = "(m^d + n^d) r"
    computation: ClassVar[str] = "(m^d + n^d) r"
    optimal_start: ClassVar[bool] = True

    def __post_init__(self, clip: bool) -> None:
        self._check_modes(same_count=False)
        self._settle_count("r", None, clip)
        self._settle_count("r", largest_bond(self._network(), "r"), clip)

    def _network(self) -> Network:
        m, n = mode_legs("m", self.m), mode_legs("n", self.n)
        return Network.of([Factor("U", (*m, "r")), Factor("V", ("r", *n))], m, n, m | n | {"r": self.r})

    def orders(self) -> dict[str, Tree]:
        return {"input_first": ((INPUT, "U"), "V")}

    def _decompose(self, W: Tensor, options: FitOptions) -> dict[str, Tensor]:
        """The truncated SVD, the best there is (Eckart and Young), singular values split evenly."""
        U, S, Vh = truncated_svd(W, self.r, options.seed)
        root = S.sqrt()
        return {"U": (U * root).reshape(*self.m, self.r), "V": (root[:, None] * Vh).reshape(self.r, *self.n)}

    def _decompose_seen(self, W: Tensor, L: Tensor, options: FitOptions) -> dict[str, Tensor]:
        """Reduced-rank regression: L W Q Q^T with Q the leading right singular vectors of L W is the best rank r."""
        Q = left_basis((L @ W).mT, self.r, options.seed)
        return {"U": (W @ Q).reshape(*self.m, self.r), "V": Q.mT.reshape(self.r, *self.n)}

    @property
    def unshared(self) -> tuple[str, ...]:
        return ("V",)
