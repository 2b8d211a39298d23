"""Which modes and ranks: every format at a budget of parameters, an error or a latency, in one table.

One number s sizes a format (r, K, or K = CA = s with CB = s / 2), so a target picks the largest s that keeps a budget
or a latency, or the smallest that reaches an error. Modes: balanced factors for d = 2, 3, 4; which input mode meets
which output mode matters, so the distinct orders of the output modes are searched, by error if W is given, else by
multiply-adds. A kind "doped+tt" is TT with a sparse part, whose density is chosen, too; indices are counted.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from kronecell.errors import KronecellError, RankError, ShapeError
from kronecell.formats import BT, CP, HT, KCP, KT, TR, TT, Dense, Doped, Format, LowRank, Tucker, split_doping
from kronecell.formats.modes import factorize, factorizes
from kronecell.formats.recipes import ONE_MODE
from kronecell.nn.linear import TensorLinear

KINDS = ("lowrank", "kt", "cp", "tucker", "tt", "tr", "bt", "ht", "kcp")
MOST_ORDERS = 12  # orders of the output modes that are tried per number of modes
DOPED = "doped+"
DENSITIES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
LARGEST = 4096  # no size parameter beyond this is tried
SCREEN_SWEEPS = 3  # refinement of a fit that only ranks candidates
NEED_SWEEPS = ("cp", "bt", "tr", "kcp")  # formats whose start is not within a small factor of the best error


def sized(kind: str, m: Sequence[int], n: Sequence[int], s: int) -> Format:
    """The format of a kind whose ranks are all s, clipped to what its network can use."""
    m, n = tuple(m), tuple(n)
    doping, structure = split_doping(kind)
    if doping is not None:
        return Doped(sized(structure, m, n, s), *doping)
    if kind == "kcp":
        return KCP(m, n, K=s, CA=s, CB=max(1, s // 2), clip=True)
    if kind == "kt":
        return KT(m, n, K=s, clip=True)
    if kind == "bt":
        return BT(m, n, r=s, P=2, clip=True)
    families: dict[str, Callable[..., Format]] = {
        "lowrank": LowRank, "cp": CP, "tucker": Tucker, "tt": TT, "tr": TR, "ht": HT,
    }  # fmt: skip
    if kind not in families:
        raise RankError(f"no format of kind {kind!r} has a size; expected one of {', '.join(KINDS)}")
    return families[kind](m, n, r=s, clip=True)


@lru_cache(maxsize=1024)
def mode_choices(kind: str, M: int, N: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Pairs (m, n): balanced factors for every d that has them, the output modes in their distinct orders."""
    kind = split_doping(kind)[1]
    if kind in ONE_MODE:
        return (((M,), (N,)),)
    choices = []
    for d in (2, 3, 4):
        if not (factorizes(M, d) and factorizes(N, d)) or min(M, N) < 2**d:
            continue
        m, n = factorize(M, d)[::-1], factorize(N, d)
        orders = [n] if kind == "tr" else sorted(set(permutations(n)))[:MOST_ORDERS]
        choices += [(m, order) for order in orders]
    return tuple(choices)


def with_densities(kind: str, known: bool) -> list[str]:
    """A doped kind at every density, or, where the matrix is not known, at a middle one; another kind alone."""
    if not kind.startswith(DOPED):
        return [kind]
    return [f"doped:{density}+{kind.removeprefix(DOPED)}" for density in (DENSITIES if known else DENSITIES[2:3])]


def stored_numbers(fmt: Format) -> int:
    """Parameters, and indices as the parts of a parameter of four bytes that they take."""
    sparse = fmt.sparse()
    return fmt.num_params + (0 if sparse is None else -(-sparse.index_bytes // 4))


def largest_within(kind: str, m: Sequence[int], n: Sequence[int], fits: Callable[[Format], bool]) -> Format | None:
    """The format of the largest s that `fits` accepts (it must accept smaller ones too); None if not even s = 1."""
    if not fits(sized(kind, m, n, 1)):
        return None
    low, high = 1, 2
    while high <= LARGEST and sized(kind, m, n, high) != sized(kind, m, n, low) and fits(sized(kind, m, n, high)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(sized(kind, m, n, middle)) else (low, middle)
    return sized(kind, m, n, low)


@dataclass(frozen=True)
class Suggestion:
    """One format at one size; multiply-adds and latency are for one gate's product with `rows` rows of x."""

    format: Format
    params: int
    ratio: float
    macs: int
    latency_ms: float
    error: float | None
    pareto: bool = False

    def record(self) -> dict[str, Any]:
        """In JSON's types."""
        return asdict(self) | {"format": str(self.format)}


@dataclass(frozen=True)
class Suggestions:
    """The table; `best` is its first Pareto-best row, by error if known, else by latency."""

    rows: tuple[Suggestion, ...]

    @property
    def best(self) -> Suggestion:
        front = [row for row in self.rows if row.pareto]
        return min(front, key=lambda row: (row.error if row.error is not None else 0.0, row.latency_ms))

    def to_json(self) -> str:
        """An array of rows."""
        return json.dumps([row.record() for row in self.rows], indent=1)

    def __iter__(self) -> Any:
        return iter(self.rows)

    def __str__(self) -> str:
        header = ("", "format", "parameters", "ratio", "multiply-adds", "ms", "error")
        lines = [header]
        for row in self.rows:
            error = "" if row.error is None else f"{row.error:.4f}"
            cells = ("*" if row.pareto else "", str(row.format), f"{row.params:,}", f"{row.ratio:,.1f}")
            lines.append((*cells, f"{row.macs:,}", f"{row.latency_ms:.3f}", error))
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        shown = [
            "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        ]
        note = "* no other row is at least as good in parameters, latency and error and better in one"
        return "\n".join(line.rstrip() for line in [*shown, note])


def suggest(
    M: int,
    N: int,
    *,
    budget: int | None = None,
    error: float | None = None,
    latency: float | None = None,
    W: Tensor | None = None,
    inputs: Tensor | None = None,
    formats: Iterable[str] = KINDS,
    rows: int = 32,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Suggestions:
    """Modes and ranks per format for one matrix W (M, N), x @ W.

    Give one target: `budget` (parameters at most), `error` (|W - W'| / |W| at most, needs W; on `inputs` X it is
    |X (W - W')| / |X W|) or `latency` (milliseconds at most for `rows` rows, measured here).

    >>> print(suggest(1024, 256, budget=4000, formats=("tt", "kcp")).best.format.kind in ("tt", "kcp"))
    True
    """
    kinds = _check(M, N, budget, error, latency, W, formats)
    found = []
    for kind in kinds:
        if progress is not None:
            progress(f"suggest: {kind}")
        each = with_densities(kind, W is not None)
        options = [_choose(one, M, N, budget, error, latency, W, inputs, rows, seed) for one in each]
        useful = [fmt for fmt in options if fmt is not None]
        if useful:
            found.append(_measure(_best(useful, error, W, inputs, seed), W, inputs, rows, seed))
    if not found:
        target = f"budget={budget}" if budget else f"error={error}" if error is not None else f"latency={latency}"
        raise RankError(f"no format of {', '.join(kinds)} reaches {target} for a {M} x {N} matrix; relax the target")
    return Suggestions(tuple(_mark(sorted(found, key=lambda row: (row.params, row.latency_ms)))))


def _best(formats: Sequence[Format], error: float | None, W: Tensor | None, inputs: Tensor | None, seed: int) -> Format:
    """Of one kind at several densities: the smallest that reaches the error, or the one with the least."""
    if len(formats) == 1 or W is None:
        return formats[0]
    return min(formats, key=stored_numbers if error is not None else lambda fmt: screened(fmt, W, inputs, seed))


def _choose(
    kind: str,
    M: int,
    N: int,
    budget: int | None,
    error: float | None,
    latency: float | None,
    W: Tensor | None,
    inputs: Tensor | None,
    rows: int,
    seed: int,
) -> Format | None:
    """The best modes and size of one kind for the target."""
    if error is not None:
        assert W is not None
        modes = best_modes(kind, W, inputs, M * N // 10, seed)
        return None if modes is None else smallest_reaching(kind, *modes, error, W, inputs, seed)
    if budget is not None and W is not None:
        modes = best_modes(kind, W, inputs, budget, seed)
        return None if modes is None else largest_within(kind, *modes, lambda fmt: stored_numbers(fmt) <= budget)

    def accepts(fmt: Format) -> bool:
        if budget is not None:
            return stored_numbers(fmt) <= budget
        return stored_numbers(fmt) < M * N and measured_ms(fmt, rows) <= (latency or 0.0)

    choices = (largest_within(kind, m, n, accepts) for m, n in mode_choices(kind, M, N))
    useful = [fmt for fmt in choices if fmt is not None and stored_numbers(fmt) < M * N]
    if W is not None:
        return min(useful, key=lambda fmt: screened(fmt, W, inputs, seed), default=None)
    return min(useful, key=lambda fmt: macs_per_row(fmt, rows), default=None)


def best_modes(
    kind: str, W: Tensor, inputs: Tensor | None, budget: int, seed: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The modes with the smallest error at the largest size within the budget; None if nothing fits it."""
    M, N = W.shape
    scores = []
    choices = mode_choices(kind, M, N)
    for m, n in choices:
        fmt = largest_within(kind, m, n, lambda fmt: stored_numbers(fmt) <= budget)
        if fmt is not None and stored_numbers(fmt) < M * N:
            error = screened(fmt, W, inputs, seed) if len(choices) > 1 else 0.0
            scores.append((round(error, 6), stored_numbers(fmt), m, n))
    return min(scores)[2:] if scores else None


def smallest_reaching(
    kind: str, m: Sequence[int], n: Sequence[int], error: float, W: Tensor, inputs: Tensor | None, seed: int
) -> Format | None:
    """The format of the smallest s whose fit has at most this error; None if no useful size has."""
    M, N = W.shape

    def misses(fmt: Format) -> bool:
        return stored_numbers(fmt) < M * N and screened(fmt, W, inputs, seed) > error

    last = largest_within(kind, m, n, misses)  # the largest that is still too coarse
    if last is None:
        first = sized(kind, m, n, 1)
        return first if stored_numbers(first) < M * N else None
    size = next((s for s in range(1, LARGEST) if sized(kind, m, n, s) == last), LARGEST)
    following = sized(kind, m, n, size + 1)
    return following if stored_numbers(following) < M * N and not misses(following) else None


def screened(fmt: Format, W: Tensor, inputs: Tensor | None, seed: int) -> float:
    """The error of a quick fit: a few sweeps, or none where the closed form is good by itself."""
    kind = fmt.structure.kind if isinstance(fmt, Doped) else fmt.kind
    refine = kind in NEED_SWEEPS or inputs is not None
    factors, error = fmt.from_dense(
        W, inputs=inputs, refine=refine, sweeps=SCREEN_SWEEPS, joint=False, starts=0, seed=seed
    )
    return error if inputs is None else fmt.error(W, factors, inputs=inputs)


def macs_per_row(fmt: Format, rows: int) -> int:
    """Multiply-adds of the cheapest order for this number of rows, work done once per weight update excluded."""
    sparse = fmt.sparse()
    return fmt.plan("optimal", rows).macs + (0 if sparse is None else sparse.num_values)


@torch.no_grad()
def measured_ms(fmt: Format, rows: int, repeats: int = 5) -> float:
    """Median milliseconds of a layer's x @ W for `rows` rows, in eval mode, as a user of the layer sees it."""
    layer = TensorLinear(fmt, bias=False).eval()
    x = torch.zeros(rows, fmt.M, dtype=next(layer.parameters()).dtype)
    times = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        layer(x)
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times[2:])  # the first runs are slower: plans are made and caches are cold


def _measure(fmt: Format, W: Tensor | None, inputs: Tensor | None, rows: int, seed: int) -> Suggestion:
    error = None
    if W is not None:
        factors, error = fmt.from_dense(W, inputs=inputs, starts=0, seed=seed)
        error = error if inputs is None else fmt.error(W, factors, inputs=inputs)
    macs = macs_per_row(fmt, rows)
    params = stored_numbers(fmt)
    return Suggestion(fmt, params, fmt.M * fmt.N / params, macs, measured_ms(fmt, rows), error)


def _mark(rows: Sequence[Suggestion]) -> list[Suggestion]:
    """Rows with `pareto` set where no other row is as good in everything and better in something."""

    def costs(row: Suggestion) -> tuple[float, ...]:
        return (row.params, row.latency_ms, *(() if row.error is None else (row.error,)))

    marked = []
    for row in rows:
        mine = costs(row)
        beaten = any(
            costs(other) != mine and all(a <= b for a, b in zip(costs(other), mine, strict=True)) for other in rows
        )
        marked.append(Suggestion(**{**row.__dict__, "pareto": not beaten}))
    return marked


def _check(
    M: int, N: int, budget: int | None, error: float | None, latency: float | None, W: Tensor | None,
    formats: Iterable[str],
) -> list[str]:  # fmt: skip
    Dense((M,), (N,))  # refuses sizes that are not positive integers
    given = [name for name, value in (("budget", budget), ("error", error), ("latency", latency)) if value is not None]
    if len(given) != 1:
        raise KronecellError(f"suggest needs one of budget, error and latency, got {', '.join(given) or 'none'}")
    if any(value is not None and value <= 0 for value in (budget, error, latency)):
        raise KronecellError(f"suggest: {given[0]} must be positive")
    if error is not None and W is None:
        raise KronecellError("suggest(error=...) needs the matrix: give W")
    if W is not None and tuple(W.shape) != (M, N):
        raise ShapeError(f"suggest: W must be ({M}, {N}) and acts as x @ W, got {tuple(W.shape)}")
    kinds = [formats] if isinstance(formats, str) else [*formats]
    unknown = [kind for kind in kinds if kind.removeprefix(DOPED) not in KINDS]
    if unknown or not kinds:
        raise KronecellError(f"unknown formats {unknown}; expected some of {', '.join(KINDS)}, or doped+ and one")
    return kinds
