"""Tensor ring, Eq. (tr) of the paper: one core per input mode, one per output mode, closed to a ring."""

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
class TR(Format):
    """W = G_1 . ... . G_{d+e}, G_i (r_{i-1} x m_i x r_i) then (r x n_i x r), r_{d+e} = r_0; r lists r_0 ... r_{d+e-1}.

    Input and output may have different numbers of modes.

    >>> TR((4, 2, 5), (4, 4), r=2).num_params
    76
    """

    r: int | tuple[int, ...]
    clip: InitVar[bool] = False

    kind: ClassVar[str] = "tr"
    equation: ClassVar[str] = "W = trace(G_1 . G_2 ... G_d . G_(d+1) ... G_2d)"
    space: ClassVar[str] = "d (m+n) r^2"
    computation: ClassVar[str] = "d (m^d + n^d) r^3"
    restarts: ClassVar[int] = 3

    def __post_init__(self, clip: bool) -> None:
        self._check_modes(same_count=False)
        self._settle_ranks("r", [f"r{i}" for i in range(len(self.m) + len(self.n))], clip)

    def _network(self) -> Network:
        assert isinstance(self.r, tuple)
        m, n = mode_legs("m", self.m), mode_legs("n", self.n)
        r = {f"r{i}": size for i, size in enumerate(self.r)}
        cores = [Factor(f"G{i}", (f"r{i - 1}", leg, f"r{i % len(r)}")) for i, leg in enumerate([*m, *n], 1)]
        return Network.of(cores, m, n, m | n | r)

    def orders(self) -> dict[str, Tree]:
        cores = [f"G{i}" for i in range(1, len(self.m) + len(self.n) + 1)]
        return {"input_then_output": chain(INPUT, *cores)}

    def _decompose(self, W: Tensor, options: FitOptions) -> dict[str, Tensor]:
        """TR-SVD (Zhao 2016): the first unfolding has rank r_0 r_1; r_0 moves to the end, the rest is a train."""
        assert isinstance(self.r, tuple)
        modes, r = (*self.m, *self.n), (*self.r, self.r[0])
        first = W.reshape(modes[0], -1)
        used = -(-min(modes[0], r[0] * r[1]) // r[1])  # values of r_0 that the first mode can fill; the rest stay 0
        Q = left_basis(first, used * r[1], options.seed)
        start = W.new_zeros(r[0], modes[0], r[1])
        start[:used] = Q.reshape(modes[0], used, r[1]).movedim(1, 0)
        factors = {"G1": start}
        rest = (Q.mT @ first).reshape(used, -1).mT  # (r1 m2 ... , r0)
        for i in range(2, len(modes)):
            unfolding = rest.reshape(r[i - 1] * modes[i - 1], -1)
            Q = left_basis(unfolding, r[i], options.seed)
            factors[f"G{i}"] = Q.reshape(r[i - 1], modes[i - 1], r[i])
            rest = Q.mT @ unfolding
        last = W.new_zeros(r[-2], modes[-1], r[0])
        last[..., :used] = rest.reshape(r[-2], modes[-1], used)
        return {**factors, f"G{len(modes)}": last}

    @property
    def unshared(self) -> tuple[str, ...]:
        """The second input core, as the paper's parameter counts show; the first output core when there is none."""
        return ("G2",)
