"""The one road from a dense matrix to factors: check, start in closed form, refine, measure exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kronecell.errors import ShapeError
from kronecell.fit.als import environments, sweep
from kronecell.fit.newton import newton
from kronecell.fit.options import FitOptions
from kronecell.network import GATE, Network

if TYPE_CHECKING:  # formats import this module; at run time it needs no name from them
    from kronecell.formats.base import Format, Shared

EXACT = 2e-8  # a relative error this small is rounding: nothing is left to gain
FIRST_SWEEPS = 12  # sweeps every start gets before the best are chosen
NEWTON_PARAMETERS = 1500  # beyond this the matrix of all pairs of parameters costs more than further sweeps
START_SEED = 0x5EED  # keeps random starts apart from factors that a user drew with the same seed
DOUBLE_NUMEL = 1 << 23  # up to here everything is done in float64, whatever the dtype of W


def fit_dense(
    fmt: Format, W: Tensor, gates: int, shared: Shared, options: FitOptions
) -> tuple[dict[str, Tensor], float]:
    """Factors in the dtype and on the device of W, and |W - W'| / |W| of those very factors."""
    _check(fmt, W, gates)
    network = fmt.network(gates, shared)
    with torch.no_grad():
        work = _work_dtype(W)
        if gates == 1:
            factors = fit_one(fmt, W.to(work), options)
        elif all(GATE in f.legs for f in network.parameters):
            factors = _fit_each(fmt, W, work, options)
        else:
            factors = _fit_shared(fmt, W.to(work), network, options)
        factors = {name: factors[name].to(W.dtype).contiguous() for name in network.shapes}
        return factors, relative_error(fmt, W, factors, gates, shared)


def fit_one(fmt: Format, W: Tensor, options: FitOptions) -> dict[str, Tensor]:
    """One matrix (M, N): every start refined shortly, the best one refined to the end."""
    network = fmt.network().as_dense()
    refinable = options.refine and len(network.parameters) > 1 and not fmt.optimal_start
    target = W.reshape(network.shape(network.outputs))
    if not refinable:
        return fmt._decompose(W, options)
    return refine(network, target, _starts(fmt, W, options), options, str(fmt))


def refine(
    network: Network, target: Tensor, starts: Iterator[dict[str, Tensor]], options: FitOptions, label: str = ""
) -> dict[str, Tensor]:
    """The best of several starts after refinement; never worse than the first start.

    Every start gets a few sweeps; the most promising ones are refined to the end, until one is exact.
    """
    norm = float(torch.linalg.vector_norm(target, dtype=torch.float64))
    trials: list[tuple[float, int, dict[str, Tensor]]] = []
    for count, start in enumerate(starts):
        factors = {name: tensor.double() for name, tensor in start.items()}
        error = alternate(network, target, factors, norm, options, min(options.sweeps, FIRST_SWEEPS), label)
        trials.append((error, count, factors))
        if error < EXACT:
            return factors
    trials.sort(key=lambda trial: trial[:2])
    finished: list[tuple[float, int, dict[str, Tensor]]] = []
    for _, count, factors in trials[: 1 + (len(trials) + 1) // 2]:
        error = finish(network, target, factors, norm, options, label)
        finished.append((error, count, factors))
        if error < EXACT:
            break
    return min(finished, key=lambda trial: trial[:2])[2]


def finish(
    network: Network, target: Tensor, factors: dict[str, Tensor], norm: float, options: FitOptions, label: str
) -> float:
    """Alternate while it pays; then all factors at once where their number allows; in place."""
    error = alternate(network, target, factors, norm, options, options.sweeps, label)
    if EXACT < error and sum(tensor.numel() for tensor in factors.values()) <= NEWTON_PARAMETERS:
        error = newton(network, target, factors, norm, options.sweeps, options)
        options.report(f"{label} all factors at once: relative error {error:.6f}")
    return error


def alternate(
    network: Network,
    target: Tensor,
    factors: dict[str, Tensor],
    norm: float,
    options: FitOptions,
    sweeps: int,
    label: str,
) -> float:
    """ALS sweeps until one gains less than the tolerance; factors change in place; returns the relative error."""
    error = float("inf")
    for count in range(sweeps):
        squared = max(0.0, norm**2 + sweep(network, target, factors))
        previous, error = error, (squared**0.5 / norm if norm else 0.0)
        options.report(f"{label} sweep {count + 1}: relative error {error:.6f}")
        if previous - error < options.tolerance * max(error, 1e-6):
            break
    return error


def relative_error(fmt: Format, W: Tensor, factors: Mapping[str, Tensor], gates: int, shared: Shared) -> float:
    """|W - W'| / |W|, from the difference itself (not from norms, which lose half the digits)."""
    low = W.dtype not in (torch.float32, torch.float64)
    dense = fmt.to_dense({k: v.float() if low else v for k, v in factors.items()}, gates=gates, shared=shared)
    norm = float(torch.linalg.vector_norm(W, dtype=torch.float64))
    error = float(
        torch.linalg.vector_norm(dense.sub_(W) if dense.data_ptr() != W.data_ptr() else dense - W, dtype=torch.float64)
    )
    return error / norm if norm else error


def _starts(fmt: Format, W: Tensor, options: FitOptions) -> Iterator[dict[str, Tensor]]:
    yield fmt._decompose(W, options)
    generator = torch.Generator().manual_seed(START_SEED + options.seed)
    std = float(torch.linalg.vector_norm(W, dtype=torch.float64)) / W.numel() ** 0.5
    for _ in range(fmt.restarts if options.starts is None else options.starts):
        yield fmt.init(generator, std=std or 1.0, dtype=torch.float64, device=W.device)


def _fit_each(fmt: Format, W: Tensor, work: torch.dtype, options: FitOptions) -> dict[str, Tensor]:
    """Every gate on its own, stacked on the leading g leg."""
    fits = [fit_one(fmt, gate.to(work), options) for gate in W]
    return {name: torch.stack([fit[name].to(work) for fit in fits]) for name in fits[0]}


def _fit_shared(fmt: Format, W: Tensor, network: Network, options: FitOptions) -> dict[str, Tensor]:
    """One joint fit of all gates."""
    gated = [f for f in network.parameters if GATE in f.legs]
    legs = [leg for leg in gated[0].legs if leg in (*network.inputs, *network.outputs[1:])]
    if len(gated) == 1 and legs:
        return _fit_widened(fmt, W, gated[0].name, legs[0], options)
    return _fit_around_mean(fmt, W, network, options)


def _fit_widened(fmt: Format, W: Tensor, name: str, leg: str, options: FitOptions) -> dict[str, Tensor]:
    """A gate leg on one factor alone is a wider mode of that factor: the same network with mode g * m_i."""
    gates = W.shape[0]
    side, index = leg[0], int(leg[1:]) - 1
    modes = [*getattr(fmt, side)]
    modes[index] *= gates
    wide = replace(fmt, **{side: tuple(modes)})
    position = index + (len(fmt.m) if side == "n" else 0)
    tensor = W.reshape(gates, *fmt.m, *fmt.n).movedim(0, position)
    factors = fit_one(wide, tensor.reshape(wide.M, wide.N), options)
    axis = next(f for f in fmt.network().parameters if f.name == name).legs.index(leg)
    factor = factors[name]
    shape = (*factor.shape[:axis], gates, factor.shape[axis] // gates, *factor.shape[axis + 1 :])
    return {**factors, name: factor.reshape(shape).movedim(axis, 0)}


def _fit_around_mean(fmt: Format, W: Tensor, network: Network, options: FitOptions) -> dict[str, Tensor]:
    """Start from the fit of the gates' leading common direction, every gate with its coefficient; refine jointly."""
    gates = W.shape[0]
    flat = W.reshape(gates, -1)
    weights = torch.linalg.eigh((flat @ flat.mT).double())[1][:, -1]  # the combination with the largest norm
    start = fit_one(fmt, torch.einsum("g,gmn->mn", weights.to(W.dtype), W), options)
    factors = {}
    generator = torch.Generator().manual_seed(options.seed)
    for position, f in enumerate(p for p in network.parameters):
        tensor = start[f.name].double()
        if GATE in f.legs:
            first = all(GATE not in p.legs for p in network.parameters[:position])
            scale = weights if first else torch.ones_like(weights)
            noise = torch.randn((gates, *tensor.shape), generator=generator, dtype=torch.float64).to(tensor)
            spread = 0.01 * tensor.square().mean().sqrt()  # gates that start equal would stay equal
            tensor = scale.reshape(-1, *[1] * tensor.ndim) * tensor + spread * noise
        factors[f.name] = tensor
    dense = network.as_dense()
    target = W.reshape(dense.shape(dense.outputs))
    return refine(dense, target, iter([factors]), options, f"{fmt} shared")


def _work_dtype(W: Tensor) -> torch.dtype:
    small = W.numel() <= DOUBLE_NUMEL
    return torch.float64 if small or W.dtype == torch.float64 else torch.float32


def _check(fmt: Format, W: Tensor, gates: int) -> None:
    if not isinstance(W, torch.Tensor) or not W.is_floating_point():
        got = W.dtype if isinstance(W, torch.Tensor) else type(W).__name__
        raise ShapeError(f"from_dense needs a floating point torch tensor, got {got}; use torch.as_tensor(...).float()")
    if gates < 1:
        raise ShapeError(f"gates must be at least 1, got {gates}")
    expected = (fmt.M, fmt.N) if gates == 1 else (gates, fmt.M, fmt.N)
    if tuple(W.shape) != expected:
        raise ShapeError(
            f"W has the wrong shape for {fmt} with {gates} gate(s): expected {expected}, got {tuple(W.shape)}; "
            f"W acts as x @ W, so a torch weight (out, in) is transposed first"
        )
    if not torch.isfinite(W).all():
        raise ShapeError("W holds NaN or infinite entries; a decomposition of it means nothing")


__all__ = ["environments", "fit_dense", "fit_one", "refine", "relative_error"]
