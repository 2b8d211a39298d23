"""How much a model's output answers to each matrix: a run with noise on it, as rounding makes, and one with less rank.

They differ where a recurrence adds up what is cut off at every step, and averages what is random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from kronecell.compress.inputs import batches_of, call
from kronecell.compress.matrices import Matrix
from kronecell.compress.spectrum import spectrum_of
from kronecell.formats.fitting.svd import left_basis

ENERGY = 0.99  # kept by the run with less rank
NOISE = 0.05  # of the rms of the weights: small enough for the output to answer in proportion

PIVOTS = 1024  # columns of X that stand for all
DAMPING = 0.01  # of the mean square of a column of X: a weight that answers to thousands of others answers to noise


class Answer(NamedTuple):
    """Squared relative change of the model's output for each of a matrix's own."""

    noise: float = 1.0  # as rounding makes
    cut: float = 1.0  # as a format makes
    left: float = 1.0  # the part of rounding's error in the factor that sees x that training cannot take back


@torch.no_grad()
def sensitivities(
    model: nn.Module,
    matrices: list[Matrix],
    calibration: Any,
    inputs: Mapping[str, Tensor],
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Answer]:
    """The answer to each matrix that is not compressed already.

    Only where calibration data runs the model: from inputs of single modules nothing is known about its output.
    """
    if isinstance(calibration, Mapping):
        return {}
    batch = next(iter(batches_of(calibration)), None)
    was_training = model.training
    model.eval()
    try:
        before = [*_tensors(call(model, batch))]
        norm = sum(float(part.double().square().sum()) for part in before)
        if not norm:
            return {}
        found = {}
        for matrix in matrices:
            if matrix.is_compressed:
                continue
            if progress is not None:
                progress(f"{matrix.name}: how much the output answers to it")
            X = inputs.get(matrix.name)
            noise = _answer(model, matrix, _noise(matrix, seed), batch, before, norm, X)
            cut = _answer(model, matrix, _cut(matrix, X), batch, before, norm, X)
            found[matrix.name] = Answer(noise or 1.0, cut or noise or 1.0)
        return found
    finally:
        model.train(was_training)


def trained_answers(answers: Mapping[str, Answer], inputs: Mapping[str, Tensor]) -> dict[str, Answer]:
    """The same where training follows."""
    left = {name: answers.get(name, Answer())._replace(left=left_of_rounding(X)) for name, X in inputs.items()}
    return {**answers, **left}


@torch.no_grad()
def left_of_rounding(X: Tensor) -> float:
    """The part of rounding's squared error in X W that is left where the other weights of a column may answer to it.

    If weights are rounded one after the other, and each may take back what those before it did to the output, the error
    of a column is sum D_i e_i^2 with the pivots D of X^T X = L D L^T; without, it is sum (X^T X)_ii e_i^2 (Chee and
    others, QuIP, 2023, theorem 1). Training with rounded weights does about this. Rejected: a constant. That
    of one model, 0.2, chose no worse there (9.6% of phonemes wrong against 9.9, one seed), but it was fitted to that
    model. What a format cuts off counts in full, because other weights cannot make it.
    """
    X = X[:, :: -(-X.shape[1] // PIVOTS)].double()
    gram = X.mT @ X
    mean = float(gram.diagonal().mean())
    if not mean > 0:
        return 1.0
    gram.diagonal().add_(DAMPING * mean)
    pivots = torch.linalg.cholesky(gram).diagonal().square()
    return min(float(pivots.mean()) / mean, 1.0)


def _noise(matrix: Matrix, seed: int) -> list[Tensor]:
    """A change (gates, M, N) of every direction."""
    generator = torch.Generator().manual_seed(seed)
    weights = matrix.weights()
    return [
        NOISE * W.square().mean().sqrt() * torch.randn(W.shape, generator=generator, dtype=W.dtype).to(W)
        for W in weights
    ]


def _cut(matrix: Matrix, X: Tensor | None) -> list[Tensor]:
    """What low rank for all gates together changes where it keeps most of the energy."""
    rank = spectrum_of(matrix, X).rank_for(ENERGY, True)
    changes = []
    for W in matrix.weights():
        gates, M, N = W.shape
        wide = W.transpose(0, 1).reshape(M, gates * N).double()
        Q = left_basis((wide if X is None else X.double() @ wide).mT, rank)
        changes.append((wide @ Q @ Q.mT - wide).to(W.dtype).reshape(M, gates, N).transpose(0, 1))
    return changes


def _answer(
    model: nn.Module,
    matrix: Matrix,
    changes: list[Tensor],
    batch: Any,
    before: list[Tensor],
    norm: float,
    X: Tensor | None,
) -> float | None:
    """Of the output to a change of the matrix; None where one of them does not change."""
    own = own_norm = 0.0
    kept = [part.detach().clone() for part in matrix.parts()]
    for part, W, change in zip(matrix.parts(), matrix.weights(), changes, strict=True):
        seen, all_of_it = (change, W) if X is None else (X.to(W) @ change, X.to(W) @ W)
        own, own_norm = own + float(seen.double().square().sum()), own_norm + float(all_of_it.double().square().sum())
        part.add_((change if matrix.is_table else change.transpose(1, 2)).reshape(part.shape))
    try:
        after = _tensors(call(model, batch))
        difference = sum(float((a - b).double().square().sum()) for a, b in zip(after, before, strict=True))
    finally:
        for part, old in zip(matrix.parts(), kept, strict=True):
            part.copy_(old)
    if own <= TINY * own_norm or not 0 < difference < float("inf"):
        return None
    return (difference / norm) / (own / own_norm)


TINY = 1e-8  # below this part of the energy the answer to a change is lost in rounding


def _tensors(output: Any) -> Iterator[Tensor]:
    """All floating point tensors of an output."""
    if isinstance(output, PackedSequence):
        yield output.data
    elif isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from _tensors(part)
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from _tensors(part)
