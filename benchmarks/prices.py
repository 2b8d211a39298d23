"""The constants of the cost model, fitted to timings of all candidates of all formats.

    python -m benchmarks.prices [--quick] [--results FOLDER]

The model is linear in its constants. They are fitted to the logarithm of the times, so that a candidate of 1 ms weighs
as much as one of 100 ms, with one free factor for training (forward and backward) against inference; then moved in
small steps as long as that lowers the regret: the time of the model's choice over the best time measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from statistics import mean, median

import torch
from torch import Tensor

from benchmarks.results import Options, machine, main, table, write
from benchmarks.shapes import GATES, formats, product_of, small_formats
from benchmarks.timing import Call, inference, interleave, threads
from kronecell.formats import Format
from kronecell.ops.choose import Prices, candidates, default_prices, predict, work
from kronecell.ops.contract import apply, prepare
from kronecell.ops.execute import execute
from kronecell.plans.plan import Plan

PRICES = default_prices()
NAMES = ("batched", "read", "written", "fresh", "copied", "matrix", "call")
ROWS = (1, 6, 96, 384)
SKIP = 8.0  # candidates predicted this many times the best are not run
GIVE_UP = 3.0
CASE_SECONDS = 0.12


@dataclass(frozen=True)
class Case:
    """One product and all its candidates: what they do, and how long it takes."""

    label: str
    shared: bool
    rows: int
    grad: bool
    done: dict[str, dict[str, float]]
    seconds: dict[str, float]

    @property
    def best(self) -> float:
        """Seconds of the fastest candidate."""
        return min(self.seconds.values())

    def regret(self, prices: Prices) -> float:
        """Time of the candidate the model takes, over the best."""
        name = min(self.done, key=lambda name: priced(self.done[name], prices))
        return self.seconds[name] / self.best


def priced(done: dict[str, float], prices: Prices) -> float:
    """The model's price in multiply-adds."""
    return done["macs"] + sum(getattr(prices, name) * done[name] for name in NAMES)


def calls_of(
    plans: dict[str, Plan], fmt: Format, rows: int, shared: bool | tuple[str, ...], grad: bool
) -> dict[str, Call]:
    """One call of every candidate on the same random data, as `kronecell.ops.tune` runs it.

    Where two candidates make the same of the weights, they read the same memory: otherwise the better
    aligned one would be faster.
    """
    generator = torch.Generator().manual_seed(0)
    factors = fmt.init(generator, gates=GATES, shared=shared)
    x = torch.randn(rows, fmt.M, generator=generator)
    leaves = {name: tensor.requires_grad_(grad) for name, tensor in factors.items()}

    def train(plan: Plan) -> Call:
        return lambda: torch.autograd.grad(execute(plan, x, leaves).sum(), [*leaves.values()], allow_unused=True)

    made: list[Tensor] = []

    def once(tensor: Tensor) -> Tensor:
        for other in made:
            if other.shape == tensor.shape and other.stride() == tensor.stride() and torch.equal(other, tensor):
                return other
        made.append(tensor)
        return tensor

    def infer(plan: Plan) -> Call:
        with torch.no_grad():
            operands = [once(tensor) for tensor in prepare(plan.text, factors)]
        return inference(lambda: apply(plan.text, x, operands))

    return {name: train(plan) if grad else infer(plan) for name, plan in plans.items()}


def measure(fmt: Format, label: str, rows: int, shared: bool, grad: bool, repeats: int) -> Case:
    """Time the candidates of one product that are not predicted to be hopeless."""
    plans = candidates(product_of(fmt, rows, shared, grad))
    price = {name: predict(plan, rows, grad, frozen=not grad) for name, plan in plans.items()}
    kept = [name for name in plans if price[name] <= SKIP * min(price.values())]
    calls = calls_of({name: plans[name] for name in kept}, fmt, rows, shared, grad)
    samples = interleave(calls, repeats, CASE_SECONDS, GIVE_UP)
    done = {name: work(plans[name], rows, grad, not grad) for name in kept}
    return Case(label, shared, rows, grad, done, {name: median(samples[name]) for name in kept})


def cases(chosen: dict[str, Format], rows: Iterable[int], repeats: int) -> Iterator[Case]:
    """All products, one after the other."""
    for label, fmt in chosen.items():
        for shared in (False, True):
            for count in rows:
                for grad in (False, True) if count < 384 else (False,):
                    yield measure(fmt, label, count, shared, grad, repeats)


def fit(found: list[Case]) -> Prices:
    """Constants by least squares on logarithms, all positive."""
    import numpy as np
    from scipy.optimize import least_squares

    lines = [(case.grad, case.done[name], case.seconds[name]) for case in found for name in case.seconds]
    amounts = np.array([[done["macs"], *(done[name] for name in NAMES)] for _, done, _ in lines])
    seconds = np.log([time for _, _, time in lines])
    grad = np.array([float(grad) for grad, _, _ in lines])
    start = np.log([2e-11, *(2e-11 * max(getattr(PRICES, name), 0.01) for name in NAMES), 3.0])

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.log(amounts @ np.exp(logs[:-1])) + logs[-1] * grad - seconds

    start[-1] = 1.0
    logs = least_squares(residuals, start, loss="soft_l1").x
    unit = logs[0]
    return Prices(**{name: math.exp(value - unit) for name, value in zip(NAMES, logs[1:-1], strict=True)})


def lower_regret(found: list[Case], prices: Prices, rounds: int = 4) -> Prices:
    """Constants changed one at a time by factors up to 4 while the mean logarithm of the regret falls."""
    factors = (0.25, 0.5, 0.7, 0.85, 1.2, 1.4, 2.0, 4.0)
    best, values = score(found, prices), asdict(prices)
    for _ in range(rounds):
        for name in NAMES:
            for factor in factors:
                tried = {**values, name: values[name] * factor}
                if score(found, Prices(**tried)) < best - 1e-4:
                    best, values = score(found, Prices(**tried)), tried
    return Prices(**values)


def score(found: list[Case], prices: Prices) -> float:
    """Mean logarithm of the regret."""
    return mean(math.log(case.regret(prices)) for case in found)


def correlation(found: list[Case], prices: Prices) -> float:
    """Mean rank correlation between prices and times over the products with at least three candidates."""
    from scipy.stats import spearmanr

    values = []
    for case in found:
        if len(case.seconds) >= 3:
            predicted = [priced(case.done[name], prices) for name in case.seconds]
            values.append(float(spearmanr(predicted, [*case.seconds.values()]).statistic))
    values = [value for value in values if not math.isnan(value)]
    return mean(values) if values else 1.0


def quality(found: list[Case], prices: Prices) -> dict[str, float]:
    """How good the model is with these constants."""
    regrets = sorted(case.regret(prices) for case in found)
    return {
        "rank correlation": correlation(found, prices),
        "median regret": median(regrets),
        "mean regret": mean(regrets),
        "90 % regret": regrets[int(0.9 * (len(regrets) - 1))],
        "worst regret": regrets[-1],
        "within 1.15": mean(value <= 1.15 for value in regrets),
    }


def run(options: Options) -> None:
    """Measure, fit, report."""
    chosen = small_formats() if options.quick else formats("UCF11")
    rows, repeats = ((1, 6), 1) if options.quick else (ROWS, 9)
    found: list[Case] = []
    with threads(1):
        for case in cases(chosen, rows, repeats):
            if not found or found[-1].label != case.label:
                options.say(f"prices: {case.label}")
            found.append(case)
    fitted = fit(found)
    suggested = lower_regret(found, fitted)
    sets = {"in use": PRICES, "fitted": fitted, "suggested": suggested}
    constants = table(("constants", *NAMES), [(k, *(f"{getattr(p, n):,.1f}" for n in NAMES)) for k, p in sets.items()])
    qualities = {name: quality(found, prices) for name, prices in sets.items()}
    measures = [*qualities["in use"]]
    good = table(("constants", *measures), [(k, *(f"{q[m]:.3f}" for m in measures)) for k, q in qualities.items()])
    lines = []
    for case in sorted(found, key=lambda case: -case.regret(suggested)):
        taken = min(case.done, key=lambda name: priced(case.done[name], suggested))
        best = min(case.seconds, key=lambda name: case.seconds[name])
        how = f"{'shared' if case.shared else 'unshared'}, {'training' if case.grad else 'inference'}"
        regrets = (f"{case.regret(PRICES):.2f}", f"{case.regret(suggested):.2f}")
        lines.append((case.label, how, case.rows, *regrets, taken, best, f"{case.best * 1e3:.3f}"))
    head = ("format", "how", "rows", "regret in use", "regret suggested", "suggested takes", "best", "best in ms")
    text = f"""# The cost model

{machine()} Prices are in units of one multiply-add. Regret is the time of the model's choice over the best time.

{constants}
{good}
{table(head, lines)}"""
    data = {
        "prices": {name: asdict(prices) for name, prices in sets.items()},
        "quality": qualities,
        "cases": [asdict(case) for case in found],
    }
    write(options, "prices", data, text)


if __name__ == "__main__":
    main(run, __doc__)
