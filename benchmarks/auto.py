"""Is `order="auto"` the best there is? Every candidate of every format, measured, beside what `auto` takes.

    python -m benchmarks.auto [--quick] [--results FOLDER]

`kronecell.tune.measure` times all candidates. Those within twice the best are then timed again, in turn, together with
the choice of the cost model and the paper's own order: from these come the ratios, so that no choice is judged by the
times that made it. Both the tuned choice and the cost model's, without measurement, are given.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from benchmarks.prices import calls_of
from benchmarks.results import Options, machine, main, table, write
from benchmarks.shapes import GATES, formats, small_formats
from benchmarks.timing import interleave, ratio, summary, threads
from kronecell import tune
from kronecell.candidates import predict
from kronecell.formats import Format
from kronecell.paper import paper_order

ROWS = (1, 6, 96, 384)
TRAINING_ROWS = (96,)
NEAR = 2.0
CASE_SECONDS = 0.4


@dataclass(frozen=True)
class Found:
    """One product: the best candidate, and how far from it the two choices and the paper's order are."""

    dataset: str
    format: str
    shared: bool
    rows: int
    grad: bool
    candidates: int
    best: str
    best_seconds: float
    tuned: str
    tuned_ratio: float
    model: str
    model_ratio: float
    paper: str
    paper_ratio: float | None


def judge(dataset: str, label: str, fmt: Format, rows: int, shared: bool, grad: bool, quick: bool) -> Found:
    """Measure all candidates, choose, and measure the serious ones again."""
    product = tune.Product(fmt, tune.bucket(rows), GATES, shared, grad)
    runners = product.runners()
    first = tune.measure(product, repeats=1 if quick else 5)
    tuned = first[0].name
    model = min(runners, key=lambda name: predict(runners[name], product.rows, grad))
    paper = paper_order(fmt) or next(iter(fmt.orders()))
    seconds = {choice.name: choice.measured or 0.0 for choice in first}
    near = [name for name in seconds if seconds[name] <= NEAR * seconds[tuned]]
    again = dict.fromkeys([*near, tuned, model])
    if paper in seconds and seconds[paper] < 20 * seconds[tuned]:
        again[paper] = None
    calls = calls_of({name: runners[name] for name in again}, fmt, product.rows, shared, grad)
    samples = interleave(calls, 1 if quick else 15, CASE_SECONDS)
    medians = {name: summary(values).seconds for name, values in samples.items()}
    best = min(medians, key=lambda name: medians[name])
    slow = seconds[paper] / seconds[tuned] if paper in seconds else None
    return Found(
        dataset, label, shared, rows, grad, len(seconds), best, medians[best],
        tuned, ratio(samples, tuned, best).seconds,
        model, ratio(samples, model, best).seconds,
        paper, ratio(samples, paper, best).seconds if paper in samples else slow,
    )  # fmt: skip


def products(quick: bool) -> Iterator[tuple[str, str, Format, int, bool, bool]]:
    """(data set, label, format, rows, shared, grad) of everything that is judged."""
    chosen = {"small": small_formats()} if quick else {"UCF11": formats("UCF11")}
    for dataset, known in chosen.items():
        for label, fmt in known.items():
            for shared in (False, True):
                for grad, counts in ((False, (1,) if quick else ROWS), (True, (6,) if quick else TRAINING_ROWS)):
                    for rows in counts:
                        yield dataset, label, fmt, rows, shared, grad


def run(options: Options) -> None:
    """Judge every product and report."""
    found: list[Found] = []
    start, shown = time.perf_counter(), ""
    with threads(1):
        for dataset, label, fmt, rows, shared, grad in products(options.quick):
            if label != shown:
                options.say(f"auto: {dataset} {label} ({time.perf_counter() - start:.0f} s)")
                shown = label
            found.append(judge(dataset, label, fmt, rows, shared, grad, options.quick))
    lines = []
    for item in sorted(found, key=lambda item: -item.model_ratio):
        how = f"{'shared' if item.shared else 'unshared'}, {'training' if item.grad else 'inference'}"
        paper = f"{item.paper_ratio:.2f} ({item.paper})" if item.paper_ratio is not None else "not run"
        lines.append(
            (item.format, how, item.rows, item.candidates, f"{item.best_seconds * 1e3:.3f} ({item.best})",
             f"{item.tuned_ratio:.2f} ({item.tuned})", f"{item.model_ratio:.2f} ({item.model})", paper)
        )  # fmt: skip
    head = ("format", "how", "rows", "candidates", "best, ms", "auto tuned", "auto untuned", "paper's order")
    within = {
        name: sum(getattr(item, name) <= 1.15 for item in found) / len(found) for name in ("tuned_ratio", "model_ratio")
    }
    text = f"""# order="auto" against every candidate

{machine()} Layer of 57,600 -> 4 x 256 (UCF11). Times over that of the best candidate.
Within 1.15 of the best: tuned {within["tuned_ratio"]:.0%}, untuned {within["model_ratio"]:.0%}.
Products are made for the next power of two of the rows, as `auto` does. Sorted by how far the cost model's choice is off.

{table(head, lines)}"""
    write(options, "auto", {"within 1.15": within, "products": [asdict(item) for item in found]}, text)


if __name__ == "__main__":
    main(run, __doc__)
