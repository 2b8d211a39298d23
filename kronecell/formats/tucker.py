"""Tucker over the joint modes m_i n_i: one block of BT."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import ClassVar

from torch import Tensor

from kronecell.formats.base import Format, mode_legs
from kronecell.formats.fitting.options import FitOptions
from kronecell.formats.fitting.tucker import joint_modes, tucker_fit
from kronecell.plans.network import INPUT, Factor, Network
from kronecell.plans.order import Tree, chain


@dataclass(frozen=True)
class Tucker(Format):
    """W = K . F^(1) . ... . F^(d), kernel K (r1 x ... x rd), F^(i) (r_i x m_i n_i).

    >>> Tucker((8, 20), (4, 4), r=3).num_params
    345
    """

    r: int | tuple[int, ...]
    clip: InitVar[bool] = False

    kind: ClassVar[str] = "tucker"
    equation: ClassVar[str] = "W = K . F_1 . F_2 ... F_d"
    space: ClassVar[str] = "d mn r + r^d"
    computation: ClassVar[str] = "(d max(m,n)^(d+1) + n^d) r^d"
    optimal_start: ClassVar[bool] = True  # HOOI is the refinement

    def __post_init__(self, clip: bool) -> None:
        self._check_modes(same_count=True)
        self._settle_ranks("r", [f"r{i}" for i in range(1, self.d + 1)], clip)

    def _network(self) -> Network:
        assert isinstance(self.r, tuple)
        m, n, r = mode_legs("m", self.m), mode_legs("n", self.n), mode_legs("r", self.r)
        factors = [Factor(f"F{i}", (f"r{i}", f"m{i}", f"n{i}")) for i in range(1, self.d + 1)]
        return Network.of([*factors, Factor("K", tuple(r))], m, n, m | n | r)

    def orders(self) -> dict[str, Tree]:
        return kernel_orders(self.d)

    def _decompose(self, W: Tensor, options: FitOptions) -> dict[str, Tensor]:
        """HOSVD, then higher-order orthogonal iteration (De Lathauwer 2000)."""
        assert isinstance(self.r, tuple)
        kernel, bases = tucker_fit(joint_modes(W, self.m, self.n), self.r, options)
        factors = {
            f"F{i}": basis.mT.reshape(rank, m, n)
            for i, (basis, rank, m, n) in enumerate(zip(bases, self.r, self.m, self.n, strict=True), 1)
        }
        return {**factors, "K": kernel}

    @property
    def unshared(self) -> tuple[str, ...]:
        return ("F1",)


def kernel_orders(d: int) -> dict[str, Tree]:
    """The orders of a kernel K with factors F1 ... Fd: K last, as the paper has it for BT, or merged into F1 first."""
    factors = [f"F{i}" for i in range(1, d + 1)]
    return {
        "kernel_last": chain(INPUT, *factors, "K"),
        "kernel_first": chain(INPUT, ("K", factors[0]), *factors[1:]),
    }
