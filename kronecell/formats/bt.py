"""Block term decomposition, Eq. (btd) of the paper: a sum of P Tucker blocks."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kronecell.formats.base import Format, mode_legs
from kronecell.formats.fitting.options import FitOptions
from kronecell.formats.fitting.tucker import joint_modes, tucker_dense, tucker_fit
from kronecell.formats.tucker import kernel_orders
from kronecell.plans.network import Factor, Network
from kronecell.plans.order import Tree


@dataclass(frozen=True)
class BT(Format):
    """W = sum_p K_p . F_p^(1) . ... . F_p^(d), K_p (r1 x ... x rd), F_p^(i) (r_i x m_i n_i); the paper has P = 2.

    >>> BT((8, 20, 20, 18), (4, 4, 4, 4), r=4, P=2).num_params
    2624
    """

    r: int | tuple[int, ...]
    P: int = 2
    clip: InitVar[bool] = False

    kind: ClassVar[str] = "bt"
    equation: ClassVar[str] = "W = sum_p K_p . F_p1 . F_p2 ... F_pd"
    space: ClassVar[str] = "(d mn r + r^d) P"
    computation: ClassVar[str] = "(d max(m,n)^(d+1) + n^d) r^d P"
    restarts: ClassVar[int] = 9

    def __post_init__(self, clip: bool) -> None:
        self._check_modes(same_count=True)
        self._settle_count("P", None, clip)
        self._settle_ranks("r", [f"r{i}" for i in range(1, self.d + 1)], clip)

    def _network(self) -> Network:
        assert isinstance(self.r, tuple)
        m, n, r = mode_legs("m", self.m), mode_legs("n", self.n), mode_legs("r", self.r)
        factors = [Factor(f"F{i}", ("p", f"r{i}", f"m{i}", f"n{i}")) for i in range(1, self.d + 1)]
        return Network.of([*factors, Factor("K", ("p", *r))], m, n, m | n | r | {"p": self.P})

    def orders(self) -> dict[str, Tree]:
        return kernel_orders(self.d)

    def _decompose(self, W: Tensor, options: FitOptions) -> dict[str, Tensor]:
        """Deflation: each block is the Tucker fit of the residual of the blocks before it."""
        assert isinstance(self.r, tuple)
        rest = joint_modes(W, self.m, self.n)
        kernels, bases = [], []
        for _ in range(self.P):
            kernel, basis = tucker_fit(rest, self.r, options)
            rest = rest - tucker_dense(kernel, basis)
            kernels.append(kernel)
            bases.append(basis)
        factors = {
            f"F{i + 1}": torch.stack([basis[i].mT for basis in bases]).reshape(self.P, self.r[i], self.m[i], self.n[i])
            for i in range(self.d)
        }
        return {**factors, "K": torch.stack(kernels)}

    @property
    def unshared(self) -> tuple[str, ...]:
        return ("F1",)
