"""From a dense matrix to factors, in one way for all formats: check, start in closed form, refine, measure exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kronecell.errors import ShapeError
from kronecell.formats import base  # a module, not its names: base imports this file in turn
from kronecell.formats.fitting.als import FROZEN, environments
from kronecell.formats.fitting.gauge import settled
from kronecell.formats.fitting.metric import check_inputs, root, seen_target, seen_through
from kronecell.formats.fitting.options import FitOptions
from kronecell.formats.fitting.refine import refine
from kronecell.ops.execute import contract_network
from kronecell.plans.network import GATE, Network
from kronecell.plans.order import optimal
from kronecell.plans.plan import Plan

START_SEED = 0x5EED  # keeps random starts apart from factors that a user drew with the same seed
DOUBLE_NUMEL = 1 << 23  # up to here everything is done in float64 whatever the dtype of W, and from random starts too


def fit_dense(
    fmt: base.Format, W: Tensor, gates: int, shared: base.Shared, inputs: Tensor | None, options: FitOptions
) -> tuple[dict[str, Tensor], float]:
    """Factors in the dtype and on the device of W, and |W - W'| / |W| of those very factors."""
    check_matrix(fmt, W, gates)
    network = fmt.network(gates, shared)
    with torch.no_grad():
        work = torch.float64 if W.numel() <= DOUBLE_NUMEL or W.dtype == torch.float64 else torch.float32
        options.check_memory(memory_needed(fmt, W, gates, work), str(fmt))
        X = None if inputs is None else check_inputs(inputs, fmt.M).to(device=W.device, dtype=work)
        if gates == 1:
            factors = settled(network, fit_one(fmt, W.to(work), X, options))
        elif all(GATE in f.legs for f in network.parameters):
            fits = [settled(fmt.network(), fit_one(fmt, gate.to(work), X, options)) for gate in W]
            factors = {name: torch.stack([fit[name].to(work) for fit in fits]) for name in fits[0]}
        else:
            factors = settled(network, _fit_shared(fmt, W.to(work), network, X, options))
        factors = {name: factors[name].to(W.dtype).contiguous() for name in network.shapes}
        return factors, relative_error(fmt, W, factors, gates, shared, None)


def fit_one(fmt: base.Format, W: Tensor, X: Tensor | None, options: FitOptions) -> dict[str, Tensor]:
    """One matrix (M, N); with inputs X, the fit that matters for X W."""
    network = fmt.network()
    if not options.refine or len(network.parameters) < 2 or fmt.optimal_start:
        plain = fmt._decompose(W, options)
    else:
        dense = network.as_dense()
        plain = refine(dense, W.reshape(dense.shape(dense.outputs)), _starts(fmt, W, options), options, str(fmt))
    if X is None:
        return plain
    L = root(X)
    seen = fmt._decompose_seen(W, L, options)
    if seen is None and (not options.refine or len(network.parameters) < 2):
        return plain
    seen = _refine_seen(network, W, L, plain, options, str(fmt)) if seen is None else seen
    return _better(network, W, X, plain, seen)


def _better(
    network: Network, W: Tensor, X: Tensor, plain: dict[str, Tensor], seen: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The fit with the smaller error on X itself: the ridge in L, or a refinement that stops early, may mislead."""
    dense = network.as_dense()
    plan = Plan(dense, optimal(dense), order="dense")
    errors = [
        float(torch.linalg.vector_norm(X @ (W - contract_network(plan, factors).reshape(W.shape).to(W))))
        for factors in (seen, plain)
    ]
    return plain if errors[1] < errors[0] else seen


def _refine_seen(
    network: Network, W: Tensor, L: Tensor, factors: dict[str, Tensor], options: FitOptions, label: str
) -> dict[str, Tensor]:
    """Refine factors for |L (W - W')|, from the plain fit."""
    seen = seen_through(network, L.shape[0])
    start = {**factors, FROZEN: L.reshape(seen.shapes[FROZEN])}
    refined = refine(seen, seen_target(L, W, network), iter([start]), options, f"{label} on calibration inputs")
    return {name: tensor for name, tensor in refined.items() if name != FROZEN}


def relative_error(
    fmt: base.Format, W: Tensor, factors: Mapping[str, Tensor], gates: int, shared: base.Shared, inputs: Tensor | None
) -> float:
    """|W - W'| / |W|, or |X (W - W')| / |X W|, from the difference itself: norms alone lose half the digits."""
    check_matrix(fmt, W, gates)
    with torch.no_grad():
        exact = torch.float64 if W.dtype == torch.float64 else torch.float32
        W = W.to(exact)
        dense = fmt.to_dense({name: tensor.to(exact) for name, tensor in factors.items()}, gates=gates, shared=shared)
        difference = W - dense
        if inputs is not None:
            X = check_inputs(inputs, fmt.M).to(W)
            difference, W = X @ difference, X @ W
        norm = float(torch.linalg.vector_norm(W, dtype=torch.float64))
        error = float(torch.linalg.vector_norm(difference, dtype=torch.float64))
        return error / norm if norm else error


def memory_needed(fmt: base.Format, W: Tensor, gates: int, work: torch.dtype) -> int:
    """Bytes above W: a copy in the working precision, a rearranged one, the largest step, and the final difference."""
    network = fmt.network().as_dense()
    one = W.numel() // gates
    peak = 0
    if len(network.parameters) > 1 and not fmt.optimal_start:
        peak = max((environment.peak for environment in environments(network)), default=0)
    return (2 * one + 2 * peak) * work.itemsize + 2 * W.numel() * max(4, W.element_size())


def _starts(fmt: base.Format, W: Tensor, options: FitOptions) -> Iterator[dict[str, Tensor]]:
    """The closed form, then random ones; a large matrix gets the closed form only unless starts are asked for."""
    yield fmt._decompose(W, options)
    generator = torch.Generator().manual_seed(START_SEED + options.seed)
    std = float(torch.linalg.vector_norm(W, dtype=torch.float64)) / W.numel() ** 0.5
    usual = fmt.restarts if W.numel() <= DOUBLE_NUMEL else 0
    for _ in range(usual if options.starts is None else options.starts):
        yield fmt.init(generator, std=std or 1.0, dtype=torch.float64, device=W.device)


def _fit_shared(
    fmt: base.Format, W: Tensor, network: Network, X: Tensor | None, options: FitOptions
) -> dict[str, Tensor]:
    """One joint fit of all gates."""
    gated = [f for f in network.parameters if GATE in f.legs]
    legs = [leg for leg in gated[0].legs if leg in network.outputs[1:]]
    if len(gated) == 1 and legs:  # more outputs of the same inputs
        return _fit_widened(fmt, W, gated[0].name, legs[0], X, options)
    legs = [leg for leg in gated[0].legs if leg in network.inputs]
    if len(gated) == 1 and legs:
        plain = _fit_widened(fmt, W, gated[0].name, legs[0], None, options)
    else:
        plain = _fit_around_mean(fmt, W, network, options)
    if X is None:
        return plain
    return _better(network, W, X, plain, _refine_seen(network, W, root(X), plain, options, f"{fmt} shared"))


def _fit_widened(
    fmt: base.Format, W: Tensor, name: str, leg: str, X: Tensor | None, options: FitOptions
) -> dict[str, Tensor]:
    """A gate leg on one factor alone is a wider mode of that factor: the same network with mode g * m_i."""
    gates = W.shape[0]
    side, index = leg[0], int(leg[1:]) - 1
    modes = [*getattr(fmt, side)]
    modes[index] *= gates
    wide = replace(fmt, **{side: tuple(modes)})
    position = index + (len(fmt.m) if side == "n" else 0)
    tensor = W.reshape(gates, *fmt.m, *fmt.n).movedim(0, position)
    factors = fit_one(wide, tensor.reshape(wide.M, wide.N), X, options)
    axis = next(f for f in fmt.network().parameters if f.name == name).legs.index(leg)
    factor = factors[name]
    shape = (*factor.shape[:axis], gates, factor.shape[axis] // gates, *factor.shape[axis + 1 :])
    return {**factors, name: factor.reshape(shape).movedim(axis, 0)}


def _fit_around_mean(fmt: base.Format, W: Tensor, network: Network, options: FitOptions) -> dict[str, Tensor]:
    """Start from the fit of the gates' leading common direction, every gate with its coefficient; refine jointly."""
    gates = W.shape[0]
    flat = W.reshape(gates, -1)
    weights = torch.linalg.eigh((flat @ flat.mT).double())[1][:, -1]  # the combination with the largest norm
    start = fit_one(fmt, torch.einsum("g,gmn->mn", weights.to(W.dtype), W), None, options)
    factors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(START_SEED + options.seed)
    scaled = False
    for f in network.parameters:
        tensor = start[f.name].double()
        if GATE in f.legs:
            scale = torch.ones_like(weights) if scaled else weights
            noise = torch.randn((gates, *tensor.shape), generator=generator, dtype=torch.float64).to(tensor)
            spread = 0.01 * tensor.square().mean().sqrt()  # gates that start equal would stay equal
            tensor = scale.reshape(-1, *[1] * tensor.ndim) * tensor + (spread * noise if options.refine else 0.0)
            scaled = True
        factors[f.name] = tensor
    if not options.refine:
        return factors
    dense = network.as_dense()
    return refine(dense, W.reshape(dense.shape(dense.outputs)), iter([factors]), options, f"{fmt} shared")


def check_matrix(fmt: base.Format, W: Tensor, gates: int) -> None:
    """W is a finite floating point tensor of the format's shape."""
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
