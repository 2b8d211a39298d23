"""The paper's lemmas as functions: bounds on the KT rank, and KT as a KCP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from kronecell.errors import ShapeError
from kronecell.formats.kcp import KCP
from kronecell.formats.kt import KT


def kt_rank_bounds(W: Tensor, m: Sequence[int], n: Sequence[int]) -> tuple[int, int]:
    """Lemma 3, R <= K <= C: the matrix rank of W below, an upper bound on the CP rank of its 2d-order tensor above.

    The CP rank itself is NP-hard. A tensor with multilinear ranks r_1 ... r_2d has a Tucker kernel of that size, whose
    fibres along the largest mode give a CP of prod(r) / max(r) terms: that is the bound returned.

    >>> kt_rank_bounds(torch.outer(torch.arange(1.0, 5), torch.arange(1.0, 5)), (2, 2), (2, 2))
    (1, 4)
    """
    if W.ndim != 2 or W.shape != (prod(m), prod(n)):
        raise ShapeError(f"W must be ({prod(m)}, {prod(n)}) for modes m={tuple(m)}, n={tuple(n)}, got {tuple(W.shape)}")
    rank = int(torch.linalg.matrix_rank(W))
    tensor = W.reshape(*m, *n)
    ranks = [
        int(torch.linalg.matrix_rank(tensor.movedim(mode, 0).reshape(tensor.shape[mode], -1)))
        for mode in range(tensor.ndim)
    ]
    return rank, prod(ranks) // max(1, *ranks)


def kt_to_kcp(kt: KT, factors: Mapping[str, Tensor]) -> tuple[KCP, dict[str, Tensor]]:
    """Theorem 1: every KT is a KCP (tie="all"), exactly, with CP ranks M / max(m) and N / max(n).

    A_k is written as the sum of its fibres along the largest mode, one rank-one term each. A lower CP rank is a
    matter of approximation, which `KCP.from_dense` does.
    """
    if len(kt.m) != len(kt.n):
        raise ShapeError(f"KCP needs as many input as output modes, got m={kt.m} and n={kt.n}; pad the shorter with 1")
    A, CA = _fibres(factors["A"], kt.m)
    B, CB = _fibres(factors["B"], kt.n)
    kcp = KCP(kt.m, kt.n, kt.K, CA, CB, tie="all")
    return kcp, {f"A{i}": t for i, t in enumerate(A, 1)} | {f"B{i}": t for i, t in enumerate(B, 1)}


def _fibres(tensors: Tensor, modes: Sequence[int]) -> tuple[list[Tensor], int]:
    """CP factors (K, mode_i, C) of K tensors (K, *modes): unit vectors in all modes but the largest."""
    longest = max(range(len(modes)), key=lambda i: modes[i])
    short = [i for i in range(len(modes)) if i != longest]
    columns = prod(modes[i] for i in short)
    grid = torch.arange(columns, device=tensors.device)
    factors: list[Tensor] = [torch.empty(0)] * len(modes)
    for i in reversed(short):
        unit = torch.nn.functional.one_hot(grid % modes[i], modes[i]).T.to(tensors.dtype)
        factors[i] = unit.expand(tensors.shape[0], -1, -1)
        grid = grid // modes[i]
    moved = tensors.movedim(1 + longest, 1)  # (K, longest, short...)
    factors[longest] = moved.reshape(tensors.shape[0], modes[longest], columns)
    return factors, columns
