"""Which way to run a product. `order="auto"` asks here.

By default the cost model decides, with constants that depend on the kind of processor alone: the same choice in every
run, so that training resumes bit for bit. `kc.tune(module, example)` measures here and now instead, and what it finds
is used from then on in this process; `measure_on_first_use` does so for every product that is met. `save_choices` and
`load_choices` carry the choices to other processes.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kronecell.deploy.atomic import write_atomically
from kronecell.ops.candidates import PRICES, Runner, Sharing, candidates, predict, splits
from kronecell.errors import PlanError
from kronecell.formats.base import Format
from kronecell.ops.split import Split


@dataclass(frozen=True)
class Product:
    """What a choice depends on. `columns` asks for x In of a thin split instead of the whole x W."""

    format: Format
    rows: int
    gates: int
    shared: Sharing
    grad: bool
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    columns: bool = False

    def runners(self) -> Mapping[str, Runner]:
        """The candidates for it."""
        choose = splits if self.columns else candidates
        return choose(self.format, self.rows, self.gates, self.shared)

    def predict(self, runner: Runner) -> float:
        """The price of a candidate in multiply-adds."""
        return predict(runner, self.rows, self.grad, PRICES.for_dtype(self.dtype))

    @property
    def key(self) -> str:
        """One line of text; the number of threads belongs to it."""
        what = "columns" if self.columns else "product"
        how = "training" if self.grad else "inference"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{what} {self.format} gates={self.gates} shared={self.shared} rows={self.rows} {how} {dtype} "
            f"{self.device} threads={torch.get_num_threads()}"
        )


@dataclass(frozen=True)
class Choice:
    """A candidate: its predicted price in multiply-adds, and its seconds where measured."""

    name: str
    predicted: float
    measured: float | None = None


SAME = 1.002  # prices closer than this are the same
TIE = 1.05  # times closer than this are the same
CLEAR = 1.1  # what a measurement must gain to overrule the model: noise alone gains more than TIE now and then
SAMPLE_SECONDS = 0.001  # quick calls are timed several at a time

_chosen: dict[str, str] = {}  # product key -> name of the runner, from measurements
_measured: dict[str, dict[str, float | None]] = {}  # product key -> seconds of its candidates, for explain
_recording: list[Product] | None = None
_measuring = False
_edition = 0  # grows whenever a choice may have changed, so that modules can remember theirs cheaply


def edition() -> int | None:
    """A number that stays the same as long as all choices do; None while they must not be remembered."""
    return None if _recording is not None else _edition


def _changed() -> None:
    global _edition
    _edition += 1


def bucket(rows: int) -> int:
    """The next power of two: choices are made once per bucket, not once per number of rows."""
    return 1 << max(0, rows - 1).bit_length()


def choose(product: Product) -> Runner:
    """The measured choice if there is one, else the cost model's."""
    if _recording is not None:
        _recording.append(product)
    if _chosen:
        name = _chosen.get(product.key)
        if name is not None:
            return _known(product, name)
    if _measuring and _recording is None and product.device != "meta":
        return _known(product, _measured_choice(product)[0])
    return product.runners()[predicted(product)]


def measure_on_first_use(on: bool = True) -> None:
    """From now on measure every product when it is first met, instead of trusting the cost model; or stop that.

    The first call of a layer with a new number of rows (by powers of two) then takes some tenths of a second to
    seconds. What was measured stays in use until `forget`.
    """
    global _measuring
    _measuring = on
    _changed()


def _known(product: Product, name: str) -> Runner:
    runners = product.runners()
    if name not in runners:
        raise PlanError(
            f"a saved choice names {name!r}, but there are {', '.join(runners)} for {product.key}; tune again"
        )
    return runners[name]


_by_model: dict[Product, str] = {}


def predicted(product: Product) -> str:
    """The candidate with the lowest price; the first of those that cost the same, which are the format's own orders."""
    if product not in _by_model:
        price = {name: product.predict(runner) for name, runner in product.runners().items()}
        _by_model[product] = next(name for name in price if price[name] <= SAME * min(price.values()))
    return _by_model[product]


def measure(product: Product, repeats: int = 7, give_up: float = 4.0, skip: float = 16.0) -> list[Choice]:
    """The candidates timed in turn on random data, fastest first; `measured` is None where it was not worth while.

    Those predicted to take `skip` times the cheapest are not run, those that take `give_up` times the fastest not
    repeated. Training is timed as forward and backward to the factors with the work that needs no x, inference with
    prepared weights. The order changes in every round: what ran before decides what is in the caches.
    """
    fmt, rows = product.format, product.rows
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"dtype": product.dtype, "device": product.device}
    factors = fmt.init(generator, gates=product.gates, shared=product.shared, **options)
    x = torch.randn(rows, fmt.M, generator=generator, device="cpu").to(**options)
    runners = product.runners()
    price = {name: product.predict(runner) for name, runner in runners.items()}
    tried = [name for name in sorted(price, key=price.__getitem__) if price[name] <= skip * min(price.values())]
    calls = {name: _call(runners[name], x, factors, product) for name in tried}
    first = {name: _timed(call) for name, call in calls.items()}  # pays for memory too: only a sign
    hopeful = [name for name in tried if first[name] <= give_up * min(first.values())]
    seconds: dict[str, list[float]] = {name: [] for name in hopeful}
    turns = random.Random(0)
    times = max(1, round(SAMPLE_SECONDS / min(first.values())))  # a clock cannot tell microseconds apart
    for _ in range(repeats):
        for name in turns.sample(hopeful, len(hopeful)):
            calls[name]()  # as in use, a call follows its like: the memory it finds mapped is its own
            seconds[name].append(_timed(calls[name], times))
    medians = {name: median(values) for name, values in seconds.items()}
    found = [Choice(name, price[name], medians.get(name, first.get(name))) for name in runners]
    return sorted(found, key=lambda choice: float("inf") if choice.measured is None else choice.measured)


def pick(seconds: Mapping[str, float | None], predicted: str | None = None) -> str:
    """The fastest, unless a measurement can hardly tell it from another: then that which the model predicted, or the
    first of those that are equal, which are the format's own orders."""
    known = {name: value for name, value in seconds.items() if value is not None}
    best = min(known.values())
    if predicted in known and known[predicted] <= CLEAR * best:
        return predicted
    return next(name for name, value in known.items() if value <= TIE * best)


def _timed(call: Callable[[], object], times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def _call(runner: Runner, x: Tensor, factors: Mapping[str, Tensor], product: Product) -> Callable[[], object]:
    if product.columns:
        assert isinstance(runner, Split)
        runner = runner.inner
    if product.grad:
        leaves = {name: tensor.requires_grad_() for name, tensor in factors.items()}
        return lambda: torch.autograd.grad(runner.execute(x, leaves).sum(), [*leaves.values()], allow_unused=True)
    with torch.no_grad():
        prepared = runner.prepare(factors)

    def infer() -> None:
        with torch.no_grad():
            runner.apply(x, prepared)

    return infer


def tune(
    module: torch.nn.Module, example: Tensor, *, grad: bool | None = None, repeats: int = 7
) -> dict[str, list[Choice]]:
    """Measure every compressed product that module(example) makes; the fastest is used from now on.

    `grad` says whether to tune for training (the module's own mode when None). Returns the candidates of every product.
    """
    global _recording
    grad = module.training if grad is None else grad
    _recording = []
    try:
        with torch.set_grad_enabled(grad):
            module(example)
        met = [*dict.fromkeys(_recording)]
    finally:
        _recording = None
    if not met:
        raise PlanError(
            f"{type(module).__name__} made no compressed product with order='auto'; "
            "tune() is for modules that hold a TensorLinear, LSTM or GRU of this package"
        )
    results = {product.key: _measured_choice(product, repeats)[1] for product in met}
    _changed()
    return results


def _measured_choice(product: Product, repeats: int = 7) -> tuple[str, list[Choice]]:
    """Measure a product and remember its fastest candidate."""
    # A new thread has none of the modes, contexts and hooks that may be active here.
    with ThreadPoolExecutor(1) as pool:
        choices = pool.submit(measure, product, repeats).result()
    seconds = {choice.name: choice.measured for choice in choices}
    _measured[product.key] = seconds
    _chosen[product.key] = pick({name: seconds[name] for name in product.runners()}, predicted(product))
    return _chosen[product.key], choices


def explain(product: Product) -> str:
    """Candidates, predicted and measured, and which is chosen and why."""
    runners = product.runners()
    name = _chosen.get(product.key)
    why = "measurement" if name else "the cost model"
    name = name or predicted(product)
    measured = _measured.get(product.key, {})
    width = max(len(key) for key in runners)
    head = f"{'candidate'.ljust(width)}  predicted (million multiply-adds)"
    lines = [product.key, head + ("  measured (ms)" if measured else "")]
    for price, key in sorted((product.predict(runner), key) for key, runner in runners.items()):
        seconds = measured.get(key)
        shown = "" if not measured else "  " + ("not run" if seconds is None else f"{seconds * 1e3:,.3f}").rjust(13)
        mark = f"  <- chosen by {why}" if key == name else ""
        lines.append(f"{key.ljust(width)}  {f'{price / 1e6:,.3f}'.rjust(33)}{shown}{mark}")
    return "\n".join([*lines, "", str(_known(product, name))])


def forget() -> None:
    """Drop all measured choices."""
    _chosen.clear()
    _measured.clear()
    _changed()


def save_choices(path: Path | str) -> None:
    """Write the measured choices of this process to a JSON file."""
    text = json.dumps({"kronecell_choices": 1, "torch": torch.__version__, "choices": _chosen}, indent=2)
    write_atomically(Path(path), lambda temporary: temporary.write_text(text))


def load_choices(path: Path | str) -> int:
    """Read choices that `save_choices` wrote; returns how many. Unknown candidates are refused when they are used."""
    try:
        document = json.loads(Path(path).read_text())
        choices = document["choices"]
        if document["kronecell_choices"] != 1 or not all(isinstance(v, str) for v in choices.values()):
            raise ValueError
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PlanError(f"{path} is not a file of choices; write one with kronecell.ops.tune.save_choices") from None
    _chosen.update(choices)
    _changed()
    return len(choices)
