"""CP of one tensor: the start for the CP format, and the folding of a vector for KCP."""

from __future__ import annotations

import torch
from torch import Tensor

from kronecell.formats.fitting.als import balance, sweep
from kronecell.formats.fitting.options import FitOptions
from kronecell.formats.fitting.svd import truncated_svd
from kronecell.formats.fitting.tucker import axis_basis
from kronecell.plans.network import Factor, Network


def cp_start(tensor: Tensor, rank: int, options: FitOptions) -> list[Tensor]:
    """Factors (size_i, rank): singular vectors of every unfolding, random columns beyond; exact for two axes."""
    if tensor.ndim == 1:
        return [torch.cat([tensor[:, None], tensor.new_zeros(tensor.shape[0], rank - 1)], 1)]
    if tensor.ndim == 2:
        U, S, Vh = truncated_svd(tensor, rank, options.seed)
        root = S.sqrt()
        return [_widen(U * root, rank), _widen(Vh.mT * root, rank)]
    generator = torch.Generator().manual_seed(options.seed)
    factors = {}
    for axis, size in enumerate(tensor.shape):
        basis = axis_basis(tensor, axis, min(rank, size), options.seed)
        extra = torch.randn(size, max(0, rank - size), generator=generator, dtype=torch.float64).to(tensor)
        factors[str(axis)] = torch.cat([basis, extra / size**0.5], 1)
    return _fix_scale(tensor, [*factors.values()])


def cp_fit(tensor: Tensor, rank: int, options: FitOptions) -> list[Tensor]:
    """`cp_start` refined by alternating least squares on the tensor alone."""
    start = cp_start(tensor, rank, options)
    if tensor.ndim <= 2 or not options.refine:
        return start
    legs = [f"m{i}" for i in range(1, tensor.ndim + 1)]
    sizes = dict(zip(legs, tensor.shape, strict=True)) | {"r": rank}
    network = Network.of([Factor(f"F{i}", (leg, "r")) for i, leg in enumerate(legs, 1)], (), legs, sizes)
    factors = {f"F{i}": factor.double() for i, factor in enumerate(start, 1)}
    norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
    error = float("inf")
    for _ in range(options.sweeps):
        previous, error = error, max(0.0, norm**2 + sweep(network, tensor, factors))
        if previous - error <= options.tolerance * norm**2:
            break
    balance(factors)
    return [factor.to(tensor.dtype) for factor in factors.values()]


def _fix_scale(tensor: Tensor, factors: list[Tensor]) -> list[Tensor]:
    """Unit vectors of an unrefined start, scaled so that their product has the best size."""
    grams = factors[0].mT @ factors[0]
    for factor in factors[1:]:
        grams = grams * (factor.mT @ factor)
    inner = tensor.movedim(0, -1) @ factors[0]  # (size_2, ..., rank)
    for factor in factors[1:]:
        inner = (inner * factor.reshape(factor.shape[0], *[1] * (inner.ndim - 2), -1)).sum(0)
    square = grams.sum()  # |W'|^2, while inner.sum() is <W, W'>
    scale = inner.sum() / square if square > 0 else square
    return [factors[0] * scale, *factors[1:]]


def _widen(factor: Tensor, rank: int) -> Tensor:
    missing = rank - factor.shape[1]
    return factor if missing <= 0 else torch.cat([factor, factor.new_zeros(factor.shape[0], missing)], 1)
