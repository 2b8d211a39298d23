"""Truncated singular value decompositions that never make a square factor of the long side.

Three methods, by size: LAPACK's economy SVD for small matrices; the eigenvectors of the small Gram matrix, summed in
float64, for short-and-wide or tall-and-narrow ones (a 32 x 460,800 unfolding costs one pass over the data); a
randomised range finder with power iterations where both sides are long. The Gram matrix squares the condition number:
a float64 basis is good to about 1e-8 of the largest singular value. Where less than that is cut off, the small
triangular factor of a QR decomposition takes the Gram matrix's place; at full rank the basis is orthonormal all the
same, so nothing is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXACT_NUMEL = 1 << 16  # up to here the economy SVD is as fast as anything
GRAM_SIDE = 1536  # shorter side up to which the Gram matrix's eigenvectors are cheap
CHUNK = 1 << 22  # elements converted to float64 at a time
OVERSAMPLE = 16
POWER_ITERATIONS = 4


def left_basis(A: Tensor, rank: int, seed: int = 0) -> Tensor:
    """Orthonormal Q (rows, rank) spanning the leading left singular vectors of A (rows, columns)."""
    rows, columns = A.shape
    wide = columns >= 4 * rows  # then the Gram matrix is much cheaper than any SVD
    if A.numel() <= EXACT_NUMEL and A.dtype == torch.float64 and not wide:
        return _fill(torch.linalg.svd(A, full_matrices=False)[0][:, :rank], rank)
    if rows <= min(columns, GRAM_SIDE) or rows <= GRAM_SIDE // 2:
        values, vectors = torch.linalg.eigh(gram(A))
        if _needs_more_digits(values, rank) and A.dtype == torch.float64 and rows <= columns:
            vectors = torch.linalg.svd(torch.linalg.qr(A.mT, mode="r")[1].mT)[0].flip(1)
        return _fill(vectors.flip(1)[:, :rank].to(A.dtype), rank)
    if columns <= GRAM_SIDE:
        vectors = torch.linalg.eigh(gram(A.mT))[1].flip(1)[:, :rank].to(A.dtype)
        return _fill(torch.linalg.qr(A @ vectors)[0], rank)
    return _fill(_range(A, rank, seed), rank)


def truncated_svd(A: Tensor, rank: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """U (rows, rank), S (rank,), Vh (rank, columns) with U S Vh the best approximation of A of this rank."""
    rows, columns = A.shape
    rank = min(rank, rows, columns)
    if rows > columns:
        U, S, Vh = truncated_svd(A.mT, rank, seed)
        return Vh.mT, S, U.mT
    if A.numel() <= EXACT_NUMEL:
        U, S, Vh = torch.linalg.svd(A, full_matrices=False)
        return U[:, :rank], S[:rank], Vh[:rank]
    Q = left_basis(A, rank, seed)  # (rows, rank)
    U, S, Vh = torch.linalg.svd(Q.mT @ A, full_matrices=False)  # rank is the short side: cheap
    return Q @ U, S, Vh


def gram(A: Tensor) -> Tensor:
    """A A^T in float64, a chunk of columns at a time."""
    rows, columns = A.shape
    total = torch.zeros(rows, rows, dtype=torch.float64, device=A.device)
    width = max(1, CHUNK // rows)
    for start in range(0, columns, width):
        block = A[:, start : start + width].double()
        total.addmm_(block, block.mT)
    return total


def _needs_more_digits(values: Tensor, rank: int) -> bool:
    """Whether squaring hides what is cut off, or the last direction that is kept: then QR is worth its cost."""
    lost = values[: max(0, len(values) - rank)].clamp_min(0).sum()
    last = values[max(0, len(values) - rank)]
    return bool(last < 1e-12 * values[-1]) or (rank < len(values) and bool(lost < 1e-10 * values.sum()))


def _range(A: Tensor, rank: int, seed: int) -> Tensor:
    """Randomised range finder (Halko, Martinsson and Tropp 2011), power iterations with re-orthogonalisation."""
    generator = torch.Generator().manual_seed(seed)
    width = min(rank + OVERSAMPLE, *A.shape)
    probe = torch.randn(A.shape[1], width, generator=generator, dtype=torch.float64).to(A)
    Q = torch.linalg.qr(A @ probe)[0]
    for _ in range(POWER_ITERATIONS):
        Z = torch.linalg.qr(A.mT @ Q)[0]
        Q = torch.linalg.qr(A @ Z)[0]
    U = torch.linalg.svd(Q.mT @ A, full_matrices=False)[0]
    return Q @ U[:, :rank]


def _fill(Q: Tensor, rank: int) -> Tensor:
    """Zero columns up to `rank`, for ranks beyond what the matrix has (their core entries are then zero too)."""
    missing = rank - Q.shape[1]
    return Q if missing <= 0 else torch.cat([Q, Q.new_zeros(Q.shape[0], missing)], 1)


def nearest_kronecker(tensor: Tensor, left: int) -> tuple[Tensor, Tensor]:
    """The best P (x) Q: `tensor` (left axes, right axes) as a matrix has rank one exactly for a Kronecker product.

    Van Loan and Pitsianis (1993). Returns P with the first `left` axes' shape and Q with the others'.
    """
    shape = tensor.shape
    matrix = tensor.reshape(torch.Size(shape[:left]).numel(), -1)
    U, S, Vh = truncated_svd(matrix, 1)
    root = S[0].sqrt()
    return (U[:, 0] * root).reshape(shape[:left]), (Vh[0] * root).reshape(shape[left:])
