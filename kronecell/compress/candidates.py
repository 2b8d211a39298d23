"""Everything that one matrix could become: formats, sharing of gates and bits, with what each costs and loses.

Low rank is priced for all ranks by one decomposition, for gates that share In and for gates of their own. Other formats
are fitted quickly, size by size. Bits act on whatever was chosen: their loss is measured on the dense matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from kronecell.compress.matrices import Matrix
from kronecell.compress.spectrum import spectrum_of
from kronecell.compress.suggest import DENSITIES, DOPED, SCREEN_SWEEPS, best_modes, mode_choices, sized
from kronecell.formats import Doped, Format
from kronecell.nn.layer_plans import Sharing
from kronecell.nn.quantize import SMALL
from kronecell.nn.rounding import chosen_group, rounded

LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SAMPLE = 192  # rows whose rounding stands for all


@dataclass(frozen=True)
class Candidate:
    """One form of a matrix: parameters and bytes of all gates and directions, and its squared relative errors.

    Format None is the matrix as it is, bits 0 its floats.
    """

    params: int
    bytes: int
    loss: float  # of the format
    noise: float = 0.0  # of rounding
    format: Format | None = None
    shared: Sharing = False
    bits: int = 0
    indices: int = 0  # bytes of the indices of a sparse part, which integers do not make smaller

    def cost(self, unit: str) -> int:
        """In parameters or bytes; four bytes of indices count as a parameter."""
        return self.bytes if unit == "bytes" else self.params - -self.indices // 4

    def __str__(self) -> str:
        words = ["dense" if self.format is None else str(self.format)]
        words += ["gates share"] if self.shared else []
        words += [f"{self.bits} bits"] if self.bits else []
        return ", ".join(words)


def candidates(
    matrix: Matrix,
    kinds: Sequence[str],
    bits: Sequence[int],
    inputs: Tensor | None,
    seed: int = 0,
    most: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Candidate]:
    """The matrix as it is, and in every format of `kinds` with fewer parameters; floats, and integers of `bits`."""
    width = matrix.weights()[0].element_size()
    found = [Candidate(matrix.stored_params, matrix.stored_bytes, 0.0)]
    for kind in kinds if not matrix.is_compressed else ():
        if progress is not None:
            progress(f"{matrix.name}: trying {kind}")
        structure = kind.removeprefix(DOPED)
        if kind == "lowrank":
            made = _lowrank(matrix, inputs)
        else:
            make = _fitted if structure == kind else _doped
            made = make(matrix, structure, inputs, seed, most)
        found += [replace(c, bytes=width * c.params + c.indices) for c in made]
    return with_integers(matrix, found, bits, inputs)


def sharings(matrix: Matrix) -> tuple[bool, ...]:
    """Gates of their own; and what they have in common stored once."""
    return (False, True) if matrix.gates > 1 else (False,)


def num_params(matrix: Matrix, fmt: Format, shared: Sharing) -> int:
    """Of all gates and directions."""
    sparse = fmt.sparse(matrix.gates)
    one = fmt.network(matrix.gates, shared).num_params + (0 if sparse is None else sparse.num_values)
    return matrix.copies * one


def _lowrank(matrix: Matrix, inputs: Tensor | None) -> Iterator[Candidate]:
    spectrum = spectrum_of(matrix, inputs)
    for shared in sharings(matrix):
        stacked = shared or matrix.gates == 1
        for rank in spectrum.ranks(stacked, min(matrix.M, matrix.N)):
            fmt = sized("lowrank", (matrix.M,), (matrix.N,), rank)
            params = num_params(matrix, fmt, shared)
            if params >= matrix.params:
                break
            yield Candidate(params, 0, spectrum.loss(rank, stacked), 0.0, fmt, shared)


def num_indices(matrix: Matrix, fmt: Format) -> int:
    """Bytes of the indices of a sparse part, over all gates and directions."""
    sparse = fmt.sparse(matrix.gates)
    return 0 if sparse is None else matrix.copies * sparse.index_bytes


def _fitted(matrix: Matrix, kind: str, inputs: Tensor | None, seed: int, most: int | None) -> Iterator[Candidate]:
    """Quick fits of growing size, with the modes that are best for one gate."""
    for fmt, shared in _sizes(matrix, kind, inputs, seed, most):
        params = num_params(matrix, fmt, shared)
        yield Candidate(params, 0, loss_of(matrix, fmt, shared, inputs, seed), 0.0, fmt, shared)


def _doped(matrix: Matrix, kind: str, inputs: Tensor | None, seed: int, most: int | None) -> Iterator[Candidate]:
    """The same fits, each with the largest entries of what it leaves, at every density."""
    for structure, shared in _sizes(matrix, kind, inputs, seed, most):
        rests = _rests(matrix, structure, shared, inputs, seed)
        for density in DENSITIES:
            fmt = Doped(structure, density)
            params = num_params(matrix, fmt, shared)
            if params < matrix.params:
                left = [fmt.rest(rest, matrix.gates, inputs) for rest in rests]
                loss = _part(matrix, left, inputs)
                yield Candidate(params, 0, loss, 0.0, fmt, shared, indices=num_indices(matrix, fmt))


def _sizes(
    matrix: Matrix, kind: str, inputs: Tensor | None, seed: int, most: int | None
) -> Iterator[tuple[Format, bool]]:
    """Formats of growing size that save parameters, for gates of their own and for those that share."""
    limit = min(most or matrix.params, matrix.params)
    per_gate = max(1, min(limit, matrix.params // 2) // (matrix.gates * matrix.copies))
    modes = best_modes(kind, matrix.weights()[0][0], inputs, per_gate, seed)
    modes = modes or next(iter(mode_choices(kind, matrix.M, matrix.N)), None)
    for shared in sharings(matrix) if modes is not None else ():
        last: Format | None = None
        for size in LADDER:
            assert modes is not None
            fmt = sized(kind, *modes, size)
            params = num_params(matrix, fmt, shared)
            if fmt == last or params >= matrix.params or params > limit:
                break
            yield fmt, shared
            last = fmt


def loss_of(matrix: Matrix, fmt: Format, shared: Sharing, inputs: Tensor | None, seed: int) -> float:
    """The squared relative error of a quick fit, over all gates and directions."""
    return _part(matrix, _rests(matrix, fmt, shared, inputs, seed), inputs)


def _rests(matrix: Matrix, fmt: Format, shared: Sharing, inputs: Tensor | None, seed: int) -> list[Tensor]:
    """What a quick fit leaves of W, for each direction."""
    rests = []
    for W in matrix.weights():
        target = W[0] if matrix.gates == 1 else W
        options: dict[str, Any] = {"gates": matrix.gates, "shared": shared}
        quick: dict[str, Any] = {"sweeps": SCREEN_SWEEPS, "starts": 0, "joint": False, "seed": seed}
        factors, _ = fmt.from_dense(target, inputs=inputs, **options, **quick)
        rests.append(target - fmt.to_dense(factors, **options))
    return rests


def _part(matrix: Matrix, rests: Sequence[Tensor], inputs: Tensor | None) -> float:
    """The squared size of what is left, over that of W; on inputs, of what they see of it."""
    lost = norm = 0.0
    for W, rest in zip(matrix.weights(), rests, strict=True):
        seen = [part if inputs is None else inputs.to(part) @ part for part in (rest, W)]
        lost, norm = (
            total + float(part.double().square().sum()) for total, part in zip((lost, norm), seen, strict=True)
        )
    return lost / norm if norm else 0.0


def with_integers(
    matrix: Matrix, found: Sequence[Candidate], bits: Sequence[int], inputs: Tensor | None
) -> list[Candidate]:
    """Candidates, and the same with integers for weights: a product of two factors is rounded twice."""
    made = [*found]
    for number in bits:
        loss, share = rounding_loss(matrix, number, inputs)
        for candidate in found:
            factors = 1 if candidate.format is None else len(candidate.format.network().parameters)
            if share < 1:
                made.append(
                    replace(candidate, bytes=rounded_bytes(matrix, candidate, share), noise=factors * loss, bits=number)
                )
    return made


def rounded_bytes(matrix: Matrix, candidate: Candidate, share: float) -> int:
    """Bytes where integers take this part of those of floats; small factors stay floats, and indices as they are."""
    shapes = (
        [] if candidate.format is None else candidate.format.network(matrix.gates, candidate.shared).shapes.values()
    )
    stay = sum(size for size in map(prod, shapes) if size <= SMALL) * matrix.copies
    values = candidate.bytes - candidate.indices
    floats = min(stay * matrix.weights()[0].element_size(), values)
    return candidate.indices + floats + int((values - floats) * share)


@torch.no_grad()
def rounding_loss(matrix: Matrix, bits: int, inputs: Tensor | None) -> tuple[float, float]:
    """The squared relative error of a matrix of integers, and its part of the bytes of floats; of a sample of rows."""
    W = matrix.weights()[0]
    rows = W.transpose(1, 2).reshape(-1, matrix.M) if not matrix.is_table else W[0]
    rows = rows[:: -(-len(rows) // SAMPLE)]
    group = chosen_group(rows, bits)
    integers, scales = rounded(rows, bits, group)
    spread = scales if group == 0 else scales.repeat_interleave(group, 1)[:, : rows.shape[1]]
    off = integers.to(rows.dtype) * spread - rows
    share = bits / (8 * rows.element_size()) + scales.numel() / rows.numel()
    if inputs is not None:
        off, rows = off @ inputs.to(off).mT, rows @ inputs.to(rows).mT
    norm = float(rows.double().square().sum())
    return (float(off.double().square().sum()) / norm if norm else 0.0), share
