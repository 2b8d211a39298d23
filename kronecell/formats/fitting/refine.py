"""Refinement of factors from one or several starts: alternate while that helps, then all factors at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kronecell.formats.fitting.als import FROZEN, environments, sweep
from kronecell.formats.fitting.newton import NEAR_EXACT, newton, plain_error
from kronecell.formats.fitting.options import FitOptions
from kronecell.plans.network import Network

FIRST_SWEEPS = 12  # sweeps every start gets before the best are chosen
FINAL_STEPS = 25  # steps every finalist gets before the best of them is refined to the end
FEW_PARAMETERS = 400  # up to here half of the starts become finalists; beyond, the two best
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
    parameters = sum(tensor.numel() for name, tensor in first[2].items() if name != FROZEN)
    finalists = 1 if parameters > NEWTON_PARAMETERS else 2 if parameters > FEW_PARAMETERS else len(trials) // 2 + 1
    finished: list[Trial] = [first]
    steps = min(options.sweeps, FINAL_STEPS) if min(finalists, len(trials)) > 1 else options.sweeps
    for _, count, factors in trials[:finalists]:
        error = _finish(network, target, factors, norm, options, label, steps)
        finished.append((error, count, factors))
        if error < NEAR_EXACT:
            return factors
    error, count, factors = min(finished, key=lambda trial: trial[:2])
    if count >= 0 and steps < options.sweeps:  # the factors of a start that nothing improved are returned untouched
        _finish(network, target, factors, norm, options, label, options.sweeps)
    return factors


def _finish(
    network: Network,
    target: Tensor,
    factors: dict[str, Tensor],
    norm: float,
    options: FitOptions,
    label: str,
    steps: int,
) -> float:
    """At most `steps` more steps, in place; returns the relative error.

    With few parameters a step of all factors at once gains more than dozens of sweeps, at the price of a few.
    """
    parameters = sum(tensor.numel() for name, tensor in factors.items() if name != FROZEN)
    if parameters > NEWTON_PARAMETERS or not options.joint or options.sweeps <= FIRST_SWEEPS:
        return _alternate(network, target, factors, norm, options, steps, label)
    error = newton(network, target, factors, norm, steps, options)
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
