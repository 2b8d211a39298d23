"""Refinement of factors from one or several starts: alternate while it pays, then all factors at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kronecell.fit.als import FROZEN, environments, sweep
from kronecell.fit.newton import NEAR_EXACT, newton, plain_error
from kronecell.fit.options import FitOptions
from kronecell.network import Network

FIRST_SWEEPS = 12  # sweeps every start gets before the best are chosen
NEWTON_PARAMETERS = 1500  # beyond this the matrix of all pairs of parameters costs more than further sweeps
NOISE = 0.01  # zeros of a start become this part of the factor's size: a zero direction has no gradient and would stay

Trial = tuple[float, int, dict[str, Tensor]]


def refine(
    network: Network, target: Tensor, starts: Iterator[dict[str, Tensor]], options: FitOptions, label: str = ""
) -> dict[str, Tensor]:
    """The best of several starts after refinement; never worse than the first start.

    Every start gets a few sweeps; the most promising half is refined to the end, until one is exact.
    """
    norm = float(torch.linalg.vector_norm(target, dtype=torch.float64))
    trials: list[Trial] = []
    first: Trial | None = None
    for count, start in enumerate(starts):
        factors = {name: tensor.double() for name, tensor in start.items()}
        if first is None:
            first = (plain_error(network, target, factors, norm), -1, factors)
            if first[0] < NEAR_EXACT or norm == 0 or not environments(network):
                return factors
            factors = _without_zeros(factors, options.seed)
        error = _alternate(network, target, factors, norm, options, min(options.sweeps, FIRST_SWEEPS), label)
        trials.append((error, count, factors))
        if error < NEAR_EXACT:
            return factors
    assert first is not None
    trials.sort(key=lambda trial: trial[:2])
    finished: list[Trial] = [first]
    for _, count, factors in trials[: 1 + (len(trials) + 1) // 2]:
        error = _finish(network, target, factors, norm, options, label)
        finished.append((error, count, factors))
        if error < NEAR_EXACT:
            break
    return min(finished, key=lambda trial: trial[:2])[2]


def _finish(
    network: Network, target: Tensor, factors: dict[str, Tensor], norm: float, options: FitOptions, label: str
) -> float:
    """To the end, in place; returns the relative error.

    With few parameters a step of all factors at once gains more than dozens of sweeps, at the price of a few.
    """
    count = sum(tensor.numel() for name, tensor in factors.items() if name != FROZEN)
    if count > NEWTON_PARAMETERS:
        return _alternate(network, target, factors, norm, options, options.sweeps, label)
    error = newton(network, target, factors, norm, options.sweeps, options)
    options.report(f"{label}: all factors at once, relative error {error:.6f}")
    return error


def _alternate(
    network: Network,
    target: Tensor,
    factors: dict[str, Tensor],
    norm: float,
    options: FitOptions,
    sweeps: int,
    label: str,
) -> float:
    """Sweeps until one gains less than the tolerance; factors change in place; returns the relative error."""
    error = float("inf")
    for count in range(sweeps):
        squared = max(0.0, norm**2 + sweep(network, target, factors))
        previous, error = error, squared**0.5 / norm
        options.report(f"{label}: sweep {count + 1}, relative error {error:.6f}")
        if previous - error < options.tolerance * max(error, 1e-6):
            break
    return error if sweeps else plain_error(network, target, factors, norm)


def _without_zeros(factors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    filled = {}
    for name, tensor in factors.items():
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
        size = NOISE * tensor.square().mean().sqrt()
        filled[name] = tensor if name == FROZEN else torch.where(tensor == 0, size * noise, tensor)
    return filled
