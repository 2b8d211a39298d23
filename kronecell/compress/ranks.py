"""Ranks for many matrices at once: parameters go where they lower the error most.

Every matrix has a ladder of candidates (kind, size) with their parameters and squared relative errors, from quick fits.
On the lower convex hull of that ladder each further step has a worse exchange rate; taking the best rate over all
matrices until the budget is spent is the Lagrangian optimum over the hulls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kronecell.compress.matrices import Matrix
from kronecell.compress.suggest import SCREEN_SWEEPS, best_modes, mode_choices, sized, smallest_reaching
from kronecell.errors import RankError
from kronecell.formats import Format

LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class Chosen:
    """A matrix and the format it gets."""

    matrix: Matrix
    format: Format


@dataclass(frozen=True)
class Rung:
    """A candidate: parameters (all gates, both directions) and squared relative error; format None is dense."""

    params: int
    loss: float
    format: Format | None


def distribute(
    free: list[tuple[Matrix, tuple[str, ...]]],
    inputs: Mapping[str, Tensor],
    seed: int,
    progress: Callable[[str], None] | None,
    *,
    budget: int | None = None,
    error: float | None = None,
) -> list[tuple[Matrix, Format | None]]:
    """One format per matrix within a common budget of parameters, or with an error each of at most `error`."""
    if error is not None:
        return [(matrix, _reaching(matrix, kinds, error, inputs, seed, progress)) for matrix, kinds in free]
    assert budget is not None
    hulls = []
    for matrix, kinds in free:
        if progress is not None:
            progress(f"{matrix.name}: trying {', '.join(kinds)}")
        hulls.append(_hull(_ladder(matrix, kinds, inputs, seed, budget)))
    least = sum(hull[0].params for hull in hulls)
    if least > budget:
        raise RankError(
            f"a budget of {budget:,} parameters is too small: the smallest candidates of the matched matrices need "
            f"{least:,}; raise it, or allow other formats"
        )
    level = [0] * len(hulls)
    left = budget - least
    while True:
        steps = []
        for i, hull in enumerate(hulls):
            if level[i] + 1 < len(hull):
                here, there = hull[level[i]], hull[level[i] + 1]
                if there.params - here.params <= left:
                    steps.append(((here.loss - there.loss) / (there.params - here.params), -i))
        if not steps:
            break
        i = -max(steps)[1]
        left -= hulls[i][level[i] + 1].params - hulls[i][level[i]].params
        level[i] += 1
    return [(matrix, hull[at].format) for (matrix, _), hull, at in zip(free, hulls, level, strict=True)]


def _ladder(matrix: Matrix, kinds: tuple[str, ...], inputs: Mapping[str, Tensor], seed: int, budget: int) -> list[Rung]:
    """Candidates of all kinds with fewer parameters than dense and within the budget; dense itself is the last."""
    weights = matrix.weights()
    X = inputs.get(matrix.name)
    gate = weights[0][0]
    rungs = [Rung(matrix.params, 0.0, None)] if matrix.params <= budget else []
    for kind in kinds:
        per_gate = max(1, min(budget, matrix.params // 2) // (matrix.gates * matrix.copies))
        modes = best_modes(kind, gate, X, per_gate, seed) or next(iter(mode_choices(kind, matrix.M, matrix.N)), None)
        if modes is None:
            continue
        last: Format | None = None
        for size in LADDER:
            fmt = sized(kind, *modes, size)
            params = matrix.copies * fmt.network(matrix.gates).num_params
            if fmt == last or params >= matrix.params or params > budget:
                break
            rungs.append(Rung(params, _loss(matrix, fmt, weights, X, seed), fmt))
            last = fmt
    if not rungs:
        raise RankError(
            f"{matrix.name} ({matrix.M} x {matrix.N}): no format of {', '.join(kinds)} is within {budget:,} "
            f"parameters; raise the budget, allow other formats, or leave it out of the rules"
        )
    return rungs


def _loss(matrix: Matrix, fmt: Format, weights: list[Tensor], X: Tensor | None, seed: int) -> float:
    """Mean over directions of the squared relative error of a quick fit."""
    total = 0.0
    for W in weights:
        target = W[0] if matrix.gates == 1 else W
        factors, plain = fmt.from_dense(target, gates=matrix.gates, inputs=X, sweeps=SCREEN_SWEEPS, starts=0, seed=seed)
        seen = plain if X is None else fmt.error(target, factors, gates=matrix.gates, inputs=X)
        total += seen**2 / len(weights)
    return total


def _hull(rungs: list[Rung]) -> list[Rung]:
    """The lower convex hull of (params, loss), by growing params."""
    best: list[Rung] = []
    for rung in sorted(rungs, key=lambda rung: (rung.params, rung.loss)):
        if best and rung.loss >= best[-1].loss:
            continue
        while len(best) >= 2 and _rate(best[-2], rung) >= _rate(best[-2], best[-1]):
            best.pop()
        best.append(rung)
    return best


def _rate(a: Rung, b: Rung) -> float:
    return (a.loss - b.loss) / (b.params - a.params) if b.params > a.params else float("inf")


def _reaching(
    matrix: Matrix,
    kinds: tuple[str, ...],
    error: float,
    inputs: Mapping[str, Tensor],
    seed: int,
    progress: Callable[[str], None] | None,
) -> Format | None:
    """The smallest format with at most this error on every gate and direction; None (dense) if none saves anything."""
    weights = matrix.weights()
    X = inputs.get(matrix.name)
    found: list[tuple[int, Format]] = []
    for kind in kinds:
        if progress is not None:
            progress(f"{matrix.name}: {kind} for an error of {error}")
        hardest = max((gate for W in weights for gate in W), key=_spread)
        modes = best_modes(kind, hardest, X, matrix.M * matrix.N // 4, seed)
        fmt = None if modes is None else smallest_reaching(kind, *modes, error, hardest, X, seed)
        if fmt is not None and _loss(matrix, fmt, weights, X, seed) <= error**2:
            found.append((fmt.num_params, fmt))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _spread(W: Tensor) -> float:
    """Numerical rank |W|_*^2 / |W|_F^2: the flatter the spectrum, the harder the matrix (the Gram matrix is enough)."""
    small = W if W.shape[0] <= W.shape[1] else W.mT
    values = torch.linalg.eigvalsh((small @ small.mT).double()).clamp_min(0).sqrt()
    square = float(values.square().sum())
    return float(values.sum()) ** 2 / square if square else 0.0
