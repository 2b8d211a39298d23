"""Is `order="auto"` the best there is? Every candidate of every format, measured, beside what `auto` takes.

    python -m benchmarks.auto [--quick] [--results FOLDER]

All candidates are timed, except those predicted to take more than 3 times the cheapest (the paper's order: 8 times).
Those within 1.3 of the best are then timed again, in turn, together with the choice of the cost model and the paper's
own order: from these come the ratios, so that no choice is judged by the times that made it. Both the tuned choice and
the cost model's, without measurement, are given. The tuned choices are kept in choices.json, which
`kc.load_choices` reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.prices import calls_of
from benchmarks.results import Options, machine, main, table, write
from benchmarks.shapes import formats, product_of, small_formats
from benchmarks.timing import interleave, ratio, threads
from kronecell.deploy.choices import save_choices
from kronecell.formats import Format
from kronecell.formats.paper_counting import paper_order
from kronecell.ops.choose import Product, candidates, predicted, prices
from kronecell.ops.tune import choices as measured
from kronecell.ops.tune import pick

CHOICES = "choices.json"
ROWS = (1, 6, 96, 384)
TRAINING_ROWS = (96,)
SKIP = 3.0  # times the cheapest prediction: not run; the best of 154 products was at 2.0 at most
SKIP_PAPER = 8.0
GIVE_UP = 2.0  # times the fastest: not repeated
NEAR = 1.3
CASE_SECONDS = 0.2


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


def judge(dataset: str, label: str, fmt: Format, shared: bool, product: Product, rows: int, quick: bool) -> Found:
    """Measure all candidates, choose, and measure the serious ones again."""
    grad, plans, price = product.grad, candidates(product), prices(product)
    paper = paper_order(fmt) or next(iter(fmt.orders()))
    limit = {name: (SKIP_PAPER if name == paper else SKIP) * min(price.values()) for name in plans}
    tried = {name: plan for name, plan in plans.items() if price[name] <= limit[name]}
    calls = calls_of(tried, fmt, rows, shared, grad)
    seconds = {name: median(values) for name, values in interleave(calls, 9, 0.1, GIVE_UP, fewest=2).items()}
    model = predicted(product)
    tuned = pick({name: seconds[name] for name in plans if name in seconds}, model)
    serious = [name for name in seconds if seconds[name] <= NEAR * seconds[tuned] or name == model]
    if paper in seconds and seconds[paper] <= 4 * seconds[tuned] and paper not in serious:
        serious.append(paper)
    again = {name: calls[name] for name in serious}
    samples = interleave(again, 1 if quick else 15, CASE_SECONDS, called=seconds)
    medians = {name: median(values) for name, values in samples.items()}
    best = min(medians, key=lambda name: medians[name])
    far = seconds[paper] / seconds[tuned] if paper in seconds else None
    return Found(
        dataset, label, shared, rows, grad, len(seconds), best, medians[best],
        tuned, ratio(samples, tuned, best).seconds,
        model, ratio(samples, model, best).seconds,
        paper, ratio(samples, paper, best).seconds if paper in samples else far,
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
    choices: dict[str, str] = {}
    with threads(1):
        for dataset, label, fmt, rows, shared, grad in products(options.quick):
            if label != shown:
                options.say(f"auto: {dataset} {label} ({time.perf_counter() - start:.0f} s)")
                shown = label
            product = product_of(fmt, rows, shared, grad)
            found.append(judge(dataset, label, fmt, shared, product, rows, options.quick))
            choices[product.key] = found[-1].tuned
    report(options, found, choices)


def report(options: Options, found: list[Found], choices: dict[str, str]) -> None:
    """Write the table and the choices."""
    lines = []
    for item in sorted(found, key=lambda item: -item.model_ratio):
        how = f"{'shared' if item.shared else 'unshared'}, {'training' if item.grad else 'inference'}"
        paper = f"{item.paper_ratio:.2f}" if item.paper_ratio is not None else f"predicted over {SKIP_PAPER:.0f}"
        paper += f" ({item.paper})"
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
Plans are made for the next power of two of the rows, as `auto` does. Sorted by how far the cost model's choice is off.

{table(head, lines)}"""
    measured.forget()
    measured.update(choices)
    save_choices(options.results / CHOICES)
    measured.forget()
    write(options, "auto", {"within 1.15": within, "products": [asdict(item) for item in found]}, text)


if __name__ == "__main__":
    main(run, __doc__)
