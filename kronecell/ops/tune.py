"""Choices of plans that were measured here and now, instead of predicted by the cost model.

By default the cost model decides: the same choice in every run, so that training resumes bit for bit. `kc.tune(module,
example)` measures, and what it finds is used from then on in this process. `kc.save_choices` and `kc.load_choices`
carry choices to other processes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kronecell.errors import PlanError
from kronecell.ops.choose import Product, candidates, predicted, prices
from kronecell.ops.contract import apply, prepare
from kronecell.ops.execute import execute
from kronecell.plans.plan import Plan


@dataclass(frozen=True)
class Choice:
    """A candidate: its predicted price in multiply-adds, and its seconds where measured."""

    name: str
    predicted: float
    measured: float | None = None


TIE = 1.05  # times closer than this are the same
CLEAR = 1.1  # what a measurement must gain to overrule the model: noise alone gains more than TIE now and then
SAMPLE_SECONDS = 0.001  # quick calls are timed several at a time


@dataclass
class Choices:
    """What was measured in this process: the name of the fastest candidate of a product, and all times."""

    names: dict[str, str] = field(default_factory=dict)  # by the key of the product
    seconds: dict[str, dict[str, float | None]] = field(default_factory=dict)
    recording: list[Product] | None = None  # while `tune` finds out which products a module makes
    edition: int = 0  # grows with every change, so that layers can remember their plans

    def update(self, names: Mapping[str, str]) -> None:
        """Use these from now on."""
        self.names.update(names)
        self.edition += 1

    def forget(self) -> None:
        """Drop all measured choices."""
        self.names.clear()
        self.seconds.clear()
        self.edition += 1

    def plan(self, product: Product) -> Plan:
        """The measured choice if there is one, else the cost model's."""
        if self.recording is not None:
            self.recording.append(product)
        name = self.names.get(product.key) if self.names else None
        return candidates(product)[predicted(product)] if name is None else self.named(product, name)

    def named(self, product: Product, name: str) -> Plan:
        """The candidate of this name."""
        plans = candidates(product)
        if name not in plans:
            raise PlanError(
                f"a saved choice names {name!r}, but there are {', '.join(plans)} for {product.key}; tune again"
            )
        return plans[name]

    def measure(self, product: Product, repeats: int = 7) -> list[Choice]:
        """Time the candidates of a product and use the fastest from now on."""
        with ThreadPoolExecutor(1) as pool:  # a new thread has none of the modes and hooks that may be active here
            found = pool.submit(measure, product, repeats).result()
        seconds = {choice.name: choice.measured for choice in found}
        self.seconds[product.key] = seconds
        self.update({product.key: pick({name: seconds[name] for name in candidates(product)}, predicted(product))})
        return found


choices = Choices()


def bucket(rows: int) -> int:
    """The next power of two: choices are made once per bucket, not once per number of rows."""
    return 1 << max(0, rows - 1).bit_length()


def measure(product: Product, repeats: int = 7, give_up: float = 4.0, skip: float = 16.0) -> list[Choice]:
    """The candidates timed in turn on random data, fastest first; `measured` is None where it was not worth while.

    Those predicted to take `skip` times the cheapest are not run, those that take `give_up` times the fastest not
    repeated. Training is timed as forward and backward to the factors, with the work that needs no x as in inference;
    frozen, with that work done before. The order changes in every round: what ran before decides what is in the caches.
    """
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"dtype": product.dtype, "device": product.device}
    width = prod(product.network.shape(product.network.inputs))
    shapes = product.network.shapes
    factors = {name: torch.randn(shape, generator=generator).to(**options) for name, shape in shapes.items()}
    x = torch.randn(product.rows, width, generator=generator).to(**options)
    plans, price = candidates(product), prices(product)
    tried = [name for name in sorted(price, key=price.__getitem__) if price[name] <= skip * min(price.values())]
    calls = {name: _call(plans[name], x, factors, product) for name in tried}
    first = {name: _timed(call) for name, call in calls.items()}  # maps memory, too: a rough estimate
    hopeful = [name for name in tried if first[name] <= give_up * min(first.values())]
    seconds: dict[str, list[float]] = {name: [] for name in hopeful}
    turns = random.Random(0)
    times = max(1, round(SAMPLE_SECONDS / min(first.values())))  # a clock cannot tell microseconds apart
    for _ in range(repeats):
        for name in turns.sample(hopeful, len(hopeful)):
            calls[name]()  # as in use, a call follows one of the same kind, and finds its memory mapped
            seconds[name].append(_timed(calls[name], times))
    medians = {name: median(values) for name, values in seconds.items()}
    found = [Choice(name, price[name], medians.get(name, first.get(name))) for name in plans]
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


def _call(plan: Plan, x: Tensor, factors: Mapping[str, Tensor], product: Product) -> Callable[[], object]:
    if product.grad:
        leaves = {name: tensor.requires_grad_() for name, tensor in factors.items()}
        return lambda: torch.autograd.grad(execute(plan, x, leaves).sum(), [*leaves.values()], allow_unused=True)
    with torch.no_grad():
        held = prepare(plan.text, factors)

    def infer() -> None:
        with torch.no_grad():
            apply(plan.text, x, held if product.frozen else prepare(plan.text, factors))

    return infer


def tune(
    module: torch.nn.Module, example: Tensor, *, grad: bool | None = None, repeats: int = 7
) -> dict[str, list[Choice]]:
    """Measure every compressed product that module(example) makes; the fastest is used from now on.

    `grad` says whether to tune for training (the module's own mode when None); without it, what `kc.freeze` makes of
    the module is tuned, too. Returns the candidates of every product.
    """
    grad = module.training if grad is None else grad
    choices.recording = []
    choices.edition += 1  # layers choose again, and are recorded
    try:
        with torch.set_grad_enabled(grad):
            module(example)
        met = [*dict.fromkeys(choices.recording)]
        met += [replace(product, frozen=True) for product in met if not grad]  # for kc.freeze of the module
    finally:
        choices.recording = None
        choices.edition += 1
    if not met:
        raise PlanError(
            f"{type(module).__name__} made no compressed product with order='auto'; "
            "tune() is for modules that hold a TensorLinear, LSTM or GRU of this package, and not frozen"
        )
    return {product.key: choices.measure(product, repeats) for product in met}


def explain(product: Product) -> str:
    """Candidates, predicted and measured, and which is chosen and why."""
    name = choices.names.get(product.key)
    why = "measurement" if name else "the cost model"
    name = name or predicted(product)
    price, measured = prices(product), choices.seconds.get(product.key, {})
    width = max(len(key) for key in price)
    head = f"{'candidate'.ljust(width)}  predicted (million multiply-adds)"
    lines = [product.key, head + ("  measured (ms)" if measured else "")]
    for key in sorted(price, key=lambda key: (price[key], key)):
        seconds = measured.get(key)
        shown = "" if not measured else "  " + ("not run" if seconds is None else f"{seconds * 1e3:,.3f}").rjust(13)
        mark = f"  <- chosen by {why}" if key == name else ""
        lines.append(f"{key.ljust(width)}  {f'{price[key] / 1e6:,.3f}'.rjust(33)}{shown}{mark}")
    return "\n".join([*lines, "", str(choices.named(product, name))])
