"""Kronecker tensor decomposition, Eq. (general_ktd); by Lemma 1 it is a rank-K factorisation of W."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import ClassVar

from torch import Tensor

from kronecell.formats.base import Format, mode_legs
from kronecell.formats.fitting.options import FitOptions
from kronecell.formats.fitting.svd import left_basis, truncated_svd
from kronecell.plans.network import INPUT, Factor, Network
from kronecell.plans.order import Tree


@dataclass(frozen=True)
class KT(Format):
    """W = sum_k A_k (x) B_k, A_k (m1 x ... x md), B_k (n1 x ... x nd): sum_k a_k b_k^T as a matrix (Lemma 1).

    >>> KT((8, 20), (4, 4), K=3).num_params
    528
    """

    K: int
    clip: InitVar[bool] = False

    kind: ClassVar[str] = "kt"
    equation: ClassVar[str] = "W = sum_k A_k (x) B_k"
    space: ClassVar[str] = "(m^d + n^d) K"
    computation: ClassVar[str] = "(m^d + n^d) K"
    optimal_start: ClassVar[bool] = True

    def __post_init__(self, clip: bool) -> None:
        self._check_modes(same_count=False)
        self._settle_count("K", min(self.M, self.N), clip)

    def _network(self) -> Network:
        m, n = mode_legs("m", self.m), mode_legs("n", self.n)
        return Network.of([Factor("A", ("k", *m)), Factor("B", ("k", *n))], m, n, m | n | {"k": self.K})

    def orders(self) -> dict[str, Tree]:
        return {"input_first": ((INPUT, "A"), "B")}

    def _decompose(self, W: Tensor, options: FitOptions) -> dict[str, Tensor]:
        """The rearrangement of a Kronecker sum of vectors a_k, b_k is W itself: its truncated SVD is optimal."""
        U, S, Vh = truncated_svd(W, self.K, options.seed)
        root = S.sqrt()
        return {"A": (U * root).mT.reshape(self.K, *self.m), "B": (root[:, None] * Vh).reshape(self.K, *self.n)}

    def _decompose_seen(self, W: Tensor, L: Tensor, options: FitOptions) -> dict[str, Tensor]:
        """Reduced-rank regression: L W Q Q^T with Q the leading right singular vectors of L W is the best rank r."""
        Q = left_basis((L @ W).mT, self.K, options.seed)
        return {"A": (W @ Q).mT.reshape(self.K, *self.m), "B": Q.mT.reshape(self.K, *self.n)}

    @property
    def unshared(self) -> tuple[str, ...]:
        return ("B",)
