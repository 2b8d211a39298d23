"""Singular values of a matrix as its data sees it: what every rank would cost, from one decomposition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kronecell.compress.matrices import Matrix
from kronecell.formats.fitting.svd import gram


@dataclass(frozen=True)
class Spectrum:
    """Squared singular values, largest first, of every gate alone and of all gates side by side (one In for all)."""

    own: Tensor  # (directions * gates, values)
    stacked: Tensor  # (directions, values)

    def loss(self, rank: int, stacked: bool) -> float:
        """Squared relative error of the best fit of this rank, over all gates and directions."""
        values = self.stacked if stacked else self.own
        total = float(values.sum())
        return float(values[:, rank:].sum()) / total if total else 0.0

    def ranks(self, stacked: bool, most: int) -> list[int]:
        """Ranks worth trying up to `most`: steps of five percent, and those at which nothing or little is lost."""
        found, rank = set(), 1
        while rank <= most:
            found.add(rank)
            rank = max(rank + 1, int(1.05 * rank))
        for share in (1 - 1e-2, 1 - 1e-4, 1 - 1e-6, 1 - 1e-9):
            found.add(self.rank_for(share, stacked))
        return sorted(rank for rank in found if rank <= most)

    def rank_for(self, energy: float, stacked: bool) -> int:
        """The smallest rank that keeps this part of the energy."""
        values = self.stacked if stacked else self.own
        kept = values.sum(0).cumsum(0) / values.sum().clamp_min(torch.finfo(values.dtype).tiny)
        return min(int((kept < energy).sum()) + 1, values.shape[1])


@torch.no_grad()
def spectrum_of(matrix: Matrix, inputs: Tensor | None = None) -> Spectrum:
    """Of the matrix, or of what it makes of its inputs."""
    own, stacked = [], []
    for W in matrix.weights():
        seen = W.double() if inputs is None else inputs.double() @ W.double()
        own += [squared_values(gate) for gate in seen]
        side_by_side = seen.transpose(0, 1).reshape(seen.shape[1], -1)
        stacked.append(squared_values(side_by_side) if len(seen) > 1 else own[-1])
    return Spectrum(torch.stack(own), torch.stack(stacked))


def squared_values(A: Tensor) -> Tensor:
    """Squared singular values, largest first."""
    small = A if A.shape[0] <= A.shape[1] else A.mT
    return torch.linalg.eigvalsh(gram(small)).flip(0).clamp_min(0)
