"""Projections of a tensor on one axis at a time, and the Tucker fit made of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from kronecell.fit.options import FitOptions
from kronecell.fit.svd import left_basis


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
    flat = tensor.reshape(before, shape[axis], after)
    result = matrix @ flat if before > 1 else (matrix @ flat[0])[None]
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
    captured = float(torch.linalg.vector_norm(kernel, dtype=torch.float64))
    for _ in range(options.sweeps):
        updated = [*bases]
        for axis, rank in enumerate(ranks):
            part = tensor
            for other, basis in enumerate(updated):
                if other != axis:
                    part = apply_to_axis(part, other, basis.mT)
            updated[axis] = axis_basis(part, axis, rank, options.seed)
            last = part
        candidate = apply_to_axis(last, len(ranks) - 1, updated[-1].mT)
        gained = float(torch.linalg.vector_norm(candidate, dtype=torch.float64)) - captured
        if gained <= 0:
            break
        kernel, bases, captured = candidate, updated, captured + gained
        if gained < options.tolerance * norm:
            break
    return kernel, bases


def tucker_dense(kernel: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """The tensor of a kernel and its bases."""
    for axis, basis in enumerate(bases):
        kernel = apply_to_axis(kernel, axis, basis)
    return kernel
