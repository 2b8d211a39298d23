"""Formats for many matrices at once: parameters or bytes go where they lower the loss of the output most.

Every matrix has candidates with a cost and a squared relative error, weighted by how much the model's output answers
to that matrix. On the lower convex hull of its candidates each further step has a worse exchange rate; taking the best
rate over all matrices until the budget is spent is the Lagrangian optimum over the hulls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kronecell.compress.candidates import Candidate, candidates, loss_of, num_indices, num_params, sharings
from kronecell.compress.matrices import Matrix
from kronecell.compress.sensitivity import Answer
from kronecell.compress.suggest import best_modes, smallest_reaching, with_densities
from kronecell.errors import RankError

SMALL = 0.02  # of the parameters of all matrices: below this a matrix is left alone, because it would save nothing


@dataclass(frozen=True)
class Free:
    """A matrix whose form is to be chosen."""

    matrix: Matrix
    kinds: tuple[str, ...]  # none: only its bits
    bits: int = 0  # that a rule asks for
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class Rung:
    """A candidate with its cost in one unit and what the model's output loses by it."""

    cost: int
    loss: float
    candidate: Candidate

    @classmethod
    def of(cls, candidate: Candidate, unit: str, answer: Answer) -> Rung:
        """The errors of format and rounding add up: they have nothing to do with each other.

        Only the first of several factors sees x; what it gives to the others is about uncorrelated.
        """
        factors = 1 if candidate.format is None else len(candidate.format.network().parameters)
        noise = candidate.noise * (answer.left + factors - 1) / factors
        loss = answer.cut * candidate.loss + answer.noise * noise
        return cls(candidate.cost(unit), loss, candidate)


def distribute(
    free: Sequence[Free], budget: int, unit: str, answers: Mapping[str, Answer] | None = None
) -> list[tuple[Matrix, Candidate]]:
    """One candidate per matrix within a common budget of parameters or bytes."""
    hulls: list[list[Rung]] = []
    for entry in free:
        answer = (answers or {}).get(entry.matrix.name, Answer())
        hull = _hull([Rung.of(c, unit, answer) for c in entry.candidates if c.cost(unit) <= budget])
        if not hull:
            small = min(entry.candidates, key=lambda c: c.cost(unit))
            raise RankError(
                f"{entry.matrix.name} ({entry.matrix.M} x {entry.matrix.N}): nothing tried is within a budget of "
                f"{budget:,} {unit}, the smallest is {small} with {small.cost(unit):,}; raise the budget, allow other "
                f"formats, or leave the matrix out of the rules"
            )
        hulls.append(hull)
    least = sum(hull[0].cost for hull in hulls)
    if least > budget:
        raise RankError(
            f"a budget of {budget:,} {unit} is too small: the smallest candidates of the matched matrices need "
            f"{least:,}; raise it, or allow other formats or fewer bits"
        )
    level = [0] * len(hulls)
    left = budget - least
    while True:
        steps = []
        for i, hull in enumerate(hulls):
            if level[i] + 1 < len(hull):
                here, there = hull[level[i]], hull[level[i] + 1]
                if there.cost - here.cost <= left:
                    steps.append((_rate(here, there), -i))
        if not steps:
            break
        i = -max(steps)[1]
        left -= hulls[i][level[i] + 1].cost - hulls[i][level[i]].cost
        level[i] += 1
    return [(entry.matrix, hull[at].candidate) for entry, hull, at in zip(free, hulls, level, strict=True)]


def with_candidates(
    free: Sequence[Free],
    bits: Sequence[int],
    inputs: Mapping[str, Tensor],
    seed: int,
    most: int | None,
    progress: Callable[[str], None] | None,
) -> list[Free]:
    """Every matrix with everything that it could become."""
    found = []
    for entry in free:
        matrix, seen = entry.matrix, inputs.get(entry.matrix.name)
        wanted = (entry.bits,) if entry.bits else bits
        forms = candidates(matrix, entry.kinds, wanted, seen, seed, most, progress)
        forms = [form for form in forms if form.bits or not entry.bits]
        found.append(dataclasses.replace(entry, candidates=tuple(forms)))
    return found


def _hull(found: Sequence[Rung]) -> list[Rung]:
    """The lower convex hull of (cost, loss), by growing cost."""
    best: list[Rung] = []
    for rung in sorted(found, key=lambda rung: (rung.cost, rung.loss)):
        if best and rung.loss >= best[-1].loss:
            continue
        while len(best) >= 2 and _rate(best[-2], rung) >= _rate(best[-2], best[-1]):
            best.pop()
        best.append(rung)
    return best


def _rate(a: Rung, b: Rung) -> float:
    return (a.loss - b.loss) / (b.cost - a.cost) if b.cost > a.cost else float("inf")


def smallest_within(
    free: Free, error: float, inputs: Tensor | None, seed: int, progress: Callable[[str], None] | None
) -> Candidate | None:
    """The smallest format with at most this error; None (dense) if none saves anything."""
    matrix, kinds = free.matrix, free.kinds
    found = [c for c in candidates(matrix, [k for k in kinds if k == "lowrank"], (), inputs) if c.format is not None]
    found = [c for c in found if c.loss <= error**2]
    for kind in [one for each in kinds for one in with_densities(each, known=True)]:
        if kind == "lowrank":
            continue
        if progress is not None:
            progress(f"{matrix.name}: {kind} for an error of {error}")
        hardest = max((gate for W in matrix.weights() for gate in W), key=_spread)
        modes = best_modes(kind, hardest, inputs, matrix.M * matrix.N // 4, seed)
        fmt = None if modes is None else smallest_reaching(kind, *modes, error, hardest, inputs, seed)
        for shared in sharings(matrix) if fmt is not None else ():
            assert fmt is not None
            loss = loss_of(matrix, fmt, shared, inputs, seed)
            params = num_params(matrix, fmt, shared)
            if loss <= error**2 and params < matrix.params:
                found.append(Candidate(params, 0, loss, 0.0, fmt, shared, indices=num_indices(matrix, fmt)))
    return min(found, key=lambda c: (c.cost("params"), c.loss)) if found else None


def _spread(W: Tensor) -> float:
    """Numerical rank |W|_*^2 / |W|_F^2: the flatter the spectrum, the harder the matrix (the Gram matrix is enough)."""
    small = W if W.shape[0] <= W.shape[1] else W.mT
    values = torch.linalg.eigvalsh((small @ small.mT).double()).clamp_min(0).sqrt()
    square = float(values.square().sum())
    return float(values.sum()) ** 2 / square if square else 0.0
