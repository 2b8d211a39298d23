"""From the fields of the form to everything the page shows. All numbers are made here, by the library."""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

import torch

from kronecell.compress.suggest import mode_choices
from kronecell.errors import KronecellError, ShapeError
from kronecell.formats import FORMATS, Format, Shared, parse
from kronecell.formats.describe import describe
from kronecell.formats.recipes import ONE_MODE
from kronecell.nn.linear import TensorLinear
from kronecell.ops.choose import Product, candidates, prices
from kronecell.ops.tune import choices
from kronecell.report.drawing import draw, step_rows

LARGEST = {"M": 10**8, "N": 10**8, "rows": 10**6, "gates": 16, "rank": 10_000}
MOST_ELEMENTS = 10**13  # of the dense matrices
MOST_FACTORS = 14
MOST_TEXT = 120  # characters of a field
MEASURED_MACS = 2e10  # most multiply-adds of a product that is measured
MEASURED_ELEMENTS = 2**27  # most elements of x and of an intermediate, 512 MB in float32
RANKS = {"kcp": ("K", "CA", "CB", "tie"), "kt": ("K",), "bt": ("r", "P"), "dense": ()}


def ranks_of(kind: str) -> tuple[str, ...]:
    """Names of the rank fields of a format."""
    return RANKS.get(kind, ("r",))


class Question:
    """The fields, checked: a format and how it is used. Raises a KronecellError that names the field."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        for name, value in fields.items():
            if len(value) > MOST_TEXT:
                raise KronecellError(f"{name[:20]} has {len(value)} characters; at most {MOST_TEXT} are read")
        self.kind = fields.get("kind", "kcp")
        if self.kind not in FORMATS:
            raise KronecellError(f"unknown format {self.kind!r}; expected one of {', '.join(FORMATS)}")
        self.gates = _whole(fields, "gates", 4, LARGEST["gates"])
        self.rows = _whole(fields, "rows", 96, LARGEST["rows"])
        self.M = _whole(fields, "M", 57600, LARGEST["M"])
        self.N = _whole(fields, "N", 256, LARGEST["N"])
        if self.gates * self.M * self.N > MOST_ELEMENTS:
            raise KronecellError(
                f"{self.gates} matrices of {self.M:,} x {self.N:,} are more than {MOST_ELEMENTS:,} numbers; "
                "choose smaller sizes"
            )
        self.choices = _modes_for(self.kind, self.M, self.N)
        self.m, self.n = self._modes(fields)
        ranks = {name: fields[name].strip() for name in ranks_of(self.kind) if fields.get(name, "").strip()}
        for name, value in ranks.items():
            if name != "tie" and any(piece.isdecimal() and int(piece) > LARGEST["rank"] for piece in value.split("x")):
                raise KronecellError(f"{name} = {value} is beyond {LARGEST['rank']:,}, the largest rank here")
        options = [f"m={'x'.join(map(str, self.m))}", f"n={'x'.join(map(str, self.n))}"]
        self.format: Format = parse(f"{self.kind}:" + ",".join([*options, *(f"{k}={v}" for k, v in ranks.items())]))
        if getattr(self.format, "tie", "") == "all" and self.format.d > 4:
            raise KronecellError(f"tie=all is explored with at most 4 modes, got {self.format.d}")
        self.shared = self._sharing(fields)
        self.network = self.format.network(self.gates, self.shared)
        if len(self.network.factors) > MOST_FACTORS:
            raise KronecellError(f"{len(self.network.factors)} factors; at most {MOST_FACTORS} are explored here")
        names = [*self.format.orders(), "optimal"]
        self.order = fields.get("order") or names[0]
        if self.order not in names:  # the order of another format is still chosen
            self.order = names[0]

    def _modes(self, fields: Mapping[str, str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        given = {name: _numbers(fields, name) for name in ("m", "n")}
        for name, size in (("m", self.M), ("n", self.N)):
            modes = given[name]
            if modes and prod(modes) != size:
                raise ShapeError(
                    f"modes {name} = {'x'.join(map(str, modes))} multiply to {prod(modes):,}, "
                    f"but {name.upper()} is {size:,}"
                )
        if given["m"] and given["n"]:
            return given["m"], given["n"]
        for m, n in self.choices:
            if (not given["m"] or given["m"] == m) and (not given["n"] or given["n"] == n):
                return m, n
        raise ShapeError(
            f"no balanced modes for {self.M:,} x {self.N:,} were found; type m and n, such as 8x20x20x18 and 4x4x4x4"
        )

    @staticmethod
    def _sharing(fields: Mapping[str, str]) -> Shared:
        text = fields.get("shared", "no").strip()
        if text in ("no", "", "false"):
            return False
        if text in ("paper", "true"):
            return True
        return tuple(name.strip() for name in text.split(",") if name.strip())

    @property
    def product(self) -> Product:
        """The product for which the library chooses a plan."""
        with torch.no_grad():
            return TensorLinear(self.format, bias=False, device="meta", gates=self.gates, shared=self.shared).product(
                self.rows
            )


def answer(fields: Mapping[str, str]) -> dict[str, Any]:
    """Counts (the very document of `kronecell count --json`), plans, prediction, drawing, modes and lines to copy."""
    question = Question(fields)
    fmt, gates, shared, rows = question.format, question.gates, question.shared, question.rows
    plan = fmt.plan(question.order, rows, gates=gates, shared=shared)
    return {
        "count": describe(fmt, rows, gates, shared, None),
        "order": question.order,
        "m": [*question.m],
        "n": [*question.n],
        "steps": [[*row] for row in step_rows(plan)],
        "drawing": draw(plan, steps=False),
        "predicted": _predicted(question),
        "modes": [{"m": [*m], "n": [*n]} for m, n in question.choices[:12]],
        "ranks": [*ranks_of(question.kind)],
        "python": _python(question),
        "command": _command(question),
    }


def _predicted(question: Question) -> list[dict[str, Any]]:
    """Every way to run the product, cheapest first, in multiply-adds and in milliseconds of this machine."""
    product = question.product
    chosen, plans = choices.plan(product), candidates(product)
    rate = machine_rate()
    rows = [
        {"name": name, "price": price, "ms": 1e3 * price / rate, "chosen": plans[name] is chosen}
        for name, price in prices(product).items()
    ]
    return sorted(rows, key=lambda row: float(row["price"]))


@lru_cache(maxsize=1)
def machine_rate() -> float:
    """Multiply-adds a second of this machine in a matrix product of moderate size: what a price is divided by."""
    a = torch.ones(512, 512)
    times = []
    for _ in range(20):  # the fastest counts: other processes only ever slow it down
        started = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - started)
    return 512**3 / min(times)


def measured(fields: Mapping[str, str]) -> dict[str, Any]:
    """Milliseconds of the product as a layer runs it, and of a dense layer where that is small enough."""
    question = Question(fields)
    plan = choices.plan(question.product)
    weights = question.gates * question.format.num_params
    elements = max(plan.peak, question.rows * question.M, weights)
    if plan.macs * question.rows > MEASURED_MACS or elements > MEASURED_ELEMENTS:
        return {"ms": None, "dense_ms": None, "why": "too large to be measured while you wait; choose fewer rows"}
    layer = TensorLinear(question.format, gates=question.gates, shared=question.shared, bias=False).eval()
    x = torch.randn(question.rows, question.M, generator=torch.Generator().manual_seed(0))
    dense = question.gates * question.M * question.N
    dense_ms = None
    if dense <= MEASURED_ELEMENTS // 2 and dense * question.rows <= MEASURED_MACS:
        weight = torch.zeros(question.gates * question.N, question.M)
        dense_ms = _milliseconds(lambda x: torch.nn.functional.linear(x, weight), x)
    name = next(name for name, other in candidates(question.product).items() if other is plan)
    return {"ms": _milliseconds(layer, x), "dense_ms": dense_ms, "why": "", "how": f"run as {name}"}


@torch.no_grad()
def _milliseconds(layer: Callable[[torch.Tensor], object], x: torch.Tensor, seconds: float = 0.4) -> float:
    """Median over as many calls as fit into the time, from 2 to 50; the first one makes plans and warms caches."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (len(times) < 51 and time.perf_counter() < end):
        started = time.perf_counter()
        layer(x)
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times[1:])


@lru_cache(maxsize=256)
def _modes_for(kind: str, M: int, N: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The suggested modes, most modes first."""
    choices = mode_choices(kind, M, N)
    if not choices and kind in ONE_MODE:
        return [((M,), (N,))]
    return sorted(choices, key=lambda pair: -len(pair[0]))


def _python(question: Question) -> str:
    """Lines that make the layer."""
    text, shared = str(question.format), question.shared
    sharing = "" if shared is False else f", shared={shared!r}"
    lines = ["import kronecell as kc", "", f'fmt = kc.parse("{text}")']
    rnn = {4: "LSTM", 3: "GRU"}.get(question.gates)
    if rnn:
        lines.append(f"rnn = kc.{rnn}({question.M}, {question.N}, batch_first=True, input_format=fmt{sharing})")
    else:
        gates = f", gates={question.gates}" if question.gates > 1 else ""
        lines.append(f"layer = kc.TensorLinear(fmt{gates}{sharing})")
    return "\n".join(lines)


def _command(question: Question) -> str:
    """The command that prints the same counts."""
    words = ["kronecell", "count", str(question.format), "--gates", str(question.gates), "--rows", str(question.rows)]
    if question.shared is True:
        words.append("--shared")
    elif question.shared:
        words += ["--unshared", ",".join(question.shared)]
    return shlex.join([*words, "--json"])


def _whole(fields: Mapping[str, str], name: str, default: int, largest: int) -> int:
    text = fields.get(name, "").strip().replace(",", "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit():
        raise KronecellError(f"{name} must be a whole number, got {text!r}")
    value = int(text) if len(text) <= 15 else largest + 1
    if not 1 <= value <= largest:
        raise KronecellError(f"{name} must be from 1 to {largest:,}, got {text}")
    return value


def _numbers(fields: Mapping[str, str], name: str) -> tuple[int, ...]:
    text = fields.get(name, "").strip().lower().replace("×", "x")
    if not text:
        return ()
    pieces = [piece.strip() for piece in text.split("x")]
    if len(pieces) > 8 or not all(piece.isascii() and piece.isdigit() and len(piece) <= 9 for piece in pieces):
        raise KronecellError(f"modes {name} must be at most 8 whole numbers joined by x, such as 8x20, got {text!r}")
    return tuple(map(int, pieces))
