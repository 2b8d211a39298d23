"""Projections of a tensor on one axis at a time, and the Tucker fit made of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from kronecell.formats.fitting.options import FitOptions
from kronecell.formats.fitting.svd import left_basis


def joint_modes(W: Tensor, m: Sequence[int], n: Sequence[int]) -> Tensor:
    """W (M, N) as a tensor (m1 n1, m2 n2, ..., md nd)."""
    d = len(m)
    pairs = [axis for i in range(d) for axis in (i, d + i)]
    return W.reshape(*m, *n).permute(pairs).reshape([a * b for a, b in zip(m, n, strict=True)])


def axis_basis(tensor: Tensor, axis: int, rank: int, seed: int) -> Tensor:
    """Orthonormal (size, rank): the leading left singular vectors of the unfolding along `axis`."""
    return left_basis(tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1), rank, seed)


def apply_to_axis(tensor: Tensor, axis: int, matrix: Tensor) -> Tensor:
    """sum_j matrix[i, j] tensor[..., j, ...]; no transposed copy of the tensor is made."""
    shape = tensor.shape
    before, after = prod(shape[:axis]), prod(shape[axis + 1 :])
    if after == 1:
        result = tensor.reshape(before, shape[axis]) @ matrix.mT
    elif before == 1:
        result = matrix @ tensor.reshape(shape[axis], after)
    else:
        result = matrix @ tensor.reshape(before, shape[axis], after)
    return result.reshape(*shape[:axis], matrix.shape[0], *shape[axis + 1 :])


def project_axis(tensor: Tensor, axis: int, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """The tensor in the coordinates of its leading `rank` directions along `axis`, and those directions."""
    basis = axis_basis(tensor, axis, rank, seed)
    return apply_to_axis(tensor, axis, basis.mT), basis


def tucker_fit(tensor: Tensor, ranks: Sequence[int], options: FitOptions) -> tuple[Tensor, list[Tensor]]:
    """Kernel (r1, ..., rd) and orthonormal bases (size_i, r_i): sequentially truncated HOSVD, then HOOI.

    Each HOOI update is optimal given the other bases, so the kernel's norm, and with it the fit, cannot fall.
    """
    kernel, bases = tensor, []
    for axis, rank in enumerate(ranks):
        kernel, basis = project_axis(kernel, axis, rank, options.seed)
        bases.append(basis)
    norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
    if not options.refine or len(bases) < 2 or norm == 0:
        return kernel, bases
    error = _error(kernel, norm)
    for _ in range(options.sweeps):
        candidate, updated = _iterate(tensor, [*bases], ranks, options.seed)
        previous, after = error, _error(candidate, norm)
        if after >= previous:
            break
        kernel, bases, error = candidate, updated, after
        if previous - error < options.tolerance * error:
            break
    return kernel, bases


def _iterate(tensor: Tensor, bases: list[Tensor], ranks: Sequence[int], seed: int) -> tuple[Tensor, list[Tensor]]:
    """Every basis once. The tensor itself is contracted twice, with each half of the bases, not once per axis."""
    d = len(bases)
    halves = [range((d + 1) // 2), range((d + 1) // 2, d)]
    part = tensor
    for own, other in (halves, halves[::-1]):
        half = tensor
        for axis in reversed(other):
            half = apply_to_axis(half, axis, bases[axis].mT)
        for axis in own:
            part = half
            for neighbour in own:
                if neighbour != axis:
                    part = apply_to_axis(part, neighbour, bases[neighbour].mT)
            bases[axis] = axis_basis(part, axis, ranks[axis], seed)
    return apply_to_axis(part, d - 1, bases[-1].mT), bases


def _error(kernel: Tensor, norm: float) -> float:
    """Relative error of an orthogonal projection: what is not in the kernel is lost."""
    captured = float(torch.linalg.vector_norm(kernel, dtype=torch.float64))
    return max(0.0, 1 - (captured / norm) ** 2) ** 0.5


def tucker_dense(kernel: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """The tensor of a kernel and its bases."""
    for axis, basis in enumerate(bases):
        kernel = apply_to_axis(kernel, axis, basis)
    return kernel
