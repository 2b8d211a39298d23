"""How time grows with the size of the input, the rank, K and the rows: fitted exponents beside the predicted ones.

    python -m benchmarks.growth [--quick] [--results FOLDER]

One quantity grows, the others stay. Inference of all four gates with order="auto", untuned. The prediction is the
exponent of the counted multiply-adds and, because small ranks are bound by memory, of the cost model's price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

import kronecell as kc
from benchmarks.results import Options, machine, main, table, write
from benchmarks.shapes import GATES, product_of
from benchmarks.timing import Call, inference, interleave, threads
from kronecell.deploy.atomic import write_atomically
from kronecell.formats import Format
from kronecell.ops.choose import candidates, predict

N = (4, 4, 4, 4)
M = (8, 20, 20, 18)
ROWS = 32


@dataclass(frozen=True)
class Curve:
    """Seconds, multiply-adds and price of one format while one quantity grows."""

    quantity: str
    format: str
    values: list[int]
    seconds: list[float]
    macs: list[float]
    price: list[float]

    def exponent(self, what: Sequence[float]) -> float:
        """Slope of the straight line through the logarithms, over the upper half of the values."""
        half = len(self.values) // 2
        x = [math.log(value) for value in self.values[half:]]
        y = [math.log(value) for value in what[half:]]
        if len(x) < 2:
            return float("nan")
        mx, my = sum(x) / len(x), sum(y) / len(y)
        return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def shape_of(bits: int) -> tuple[int, ...]:
    """2^bits as four modes that differ by at most a factor of two."""
    low, more = divmod(bits, 4)
    return tuple(2 ** (low + (i < more)) for i in range(4))


Make = Callable[[int], tuple[Format, int]]


def studies(quick: bool) -> dict[str, tuple[list[int], dict[str, Make]]]:
    """Quantity -> its values, and for every format how to make it (and the number of rows)."""
    makers: dict[str, Callable[[tuple[int, ...], int, int], Format]] = {
        "TT": lambda m, r, K: kc.TT(m, N, r),
        "TR": lambda m, r, K: kc.TR(m, N, r),
        "BT": lambda m, r, K: kc.BT(m, N, r, P=2),
        "HT": lambda m, r, K: kc.HT(m, N, r),
        "CP": lambda m, r, K: kc.CP(m, N, 2 * r),
        "LowRank": lambda m, r, K: kc.LowRank(m, N, 2 * r),
        "KCP": lambda m, r, K: kc.KCP(m, N, K, r, r),
    }
    sizes = [6, 8] if quick else [12, 14, 16, 18, 20]
    ranks = [1, 2] if quick else [2, 4, 8, 16]
    rows = [1, 2] if quick else [1, 4, 16, 64, 256]
    few = {"TT", "KCP"} if quick else {*makers}
    m = shape_of(8) if quick else M

    def of(make: Callable[[tuple[int, ...], int, int], Format], quantity: str) -> Make:
        return {
            "M": lambda bits: (make(shape_of(bits), 4, 4), ROWS),
            "rank": lambda r: (make(m, r, 4), ROWS),
            "K": lambda K: (make(m, 4, K), ROWS),
            "rows": lambda count: (make(m, 4, 4), count),
        }[quantity]

    def chosen(quantity: str, names: set[str]) -> dict[str, Make]:
        return {name: of(make, quantity) for name, make in makers.items() if name in names}

    return {
        "M": (sizes, chosen("M", few)),
        "rank": (ranks, chosen("rank", few - {"BT"})),
        "K": (ranks, chosen("K", {"KCP"})),
        "rows": (rows, chosen("rows", few)),
    }


def measure(quantity: str, values: list[int], makers: dict[str, Make], quick: bool) -> list[Curve]:
    """All formats and all values of one quantity, timed in turn."""
    cases: dict[str, Call] = {}
    counted: dict[str, tuple[float, float]] = {}
    inputs: dict[tuple[int, int], torch.Tensor] = {}
    for name, make in makers.items():
        for value in values:
            fmt, rows = make(value)
            x = inputs.setdefault((rows, fmt.M), torch.randn(rows, fmt.M))
            layer = kc.freeze(kc.TensorLinear(fmt, gates=GATES), rows=(rows,))
            cases[f"{name} {value}"] = inference(lambda layer=layer, x=x: layer(x))
            plans = candidates(product_of(fmt, rows))
            cheapest = min(predict(plan, rows, training=False, frozen=True) for plan in plans.values())
            fewest = min(fmt.plan("optimal", rows, gates=GATES).macs * rows, 4 * fmt.M * fmt.N * rows)
            counted[f"{name} {value}"] = (float(fewest), cheapest)
    samples = interleave(cases, 1 if quick else 9, 0.0 if quick else 0.1)
    curves = []
    for name in makers:
        names = [f"{name} {value}" for value in values]
        seconds = [median(samples[case]) for case in names]
        amounts = [2**value for value in values] if quantity == "M" else values
        macs, price = [counted[case][0] for case in names], [counted[case][1] for case in names]
        curves.append(Curve(quantity, name, amounts, seconds, macs, price))
    return curves


def plot(curves: list[Curve]) -> str:
    """The four quantities side by side on logarithmic axes, as SVG."""
    import io

    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kronecell"
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter

    quantities = [*dict.fromkeys(curve.quantity for curve in curves)]
    formats = [*dict.fromkeys(curve.format for curve in curves)]  # one colour each, in every panel
    figure, axes = pyplot.subplots(1, len(quantities), figsize=(4 * len(quantities), 3.6), layout="constrained")
    for axis, quantity in zip(axes, quantities, strict=True):
        here = [curve for curve in curves if curve.quantity == quantity]
        for curve in here:
            colour, milliseconds = f"C{formats.index(curve.format)}", [1e3 * s for s in curve.seconds]
            axis.loglog(curve.values, milliseconds, color=colour, marker="o", ms=3, label=curve.format)
        values = here[0].values
        axis.set_xticks(values, [f"$2^{{{v.bit_length() - 1}}}$" if v > 1024 else str(v) for v in values])
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.yaxis.set_major_formatter("{x:g}")
        low, high = axis.get_ylim()
        short = high < 10 * low  # then there may be no power of ten to label
        axis.yaxis.set_minor_formatter("{x:g}" if short else NullFormatter())
        axis.set_xlabel(quantity)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    axes[0].set_ylabel("ms")
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def run(options: Options) -> None:
    """Measure, fit, plot, report."""
    curves: list[Curve] = []
    with threads(1):
        for quantity, (values, makers) in studies(options.quick).items():
            options.say(f"growth: {quantity}")
            curves += measure(quantity, values, makers, options.quick)
    lines, found = [], []
    for curve in curves:
        slopes = {what: curve.exponent(getattr(curve, what)) for what in ("seconds", "macs", "price")}
        found.append({**asdict(curve), "exponents": slopes})
        spread = ", ".join(f"{1e3 * s:.3g}" for s in curve.seconds)
        span = f"{curve.values[0]:,} to {curve.values[-1]:,}"
        shown = (f"{slopes[what]:.2f}" for what in ("seconds", "price", "macs"))
        lines.append((curve.quantity, curve.format, span, *shown, spread))
    head = ("grows", "format", "values", "exponent of time", "of the cost model", "of multiply-adds", "ms")
    text = f"""# How time grows

{machine()} Inference, four gates, unshared, {ROWS} rows of 57,600 -> 4 x 256 unless that is what grows. Exponents are
fitted to the upper half of the values, where calls no longer count. Multiply-adds are those of the order with the
fewest; the cost model's price adds the memory that is moved.

![time against size, rank, K and rows](growth.svg)

{table(head, lines)}"""
    data: dict[str, Any] = {"curves": found}
    options.results.mkdir(parents=True, exist_ok=True)
    picture = plot(curves)
    write_atomically(options.results / "growth.svg", lambda path: path.write_text(picture))
    write(options, "growth", data, text)


if __name__ == "__main__":
    main(run, __doc__)
