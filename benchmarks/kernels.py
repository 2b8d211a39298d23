"""The compiled operators beside what torch alone does: products of few columns, and the recurrence of an LSTM.

    python -m benchmarks.kernels [--quick] [--results FOLDER]

Products are timed operator against operator. Recurrences are whole dense LSTMs over 64 inputs, ours and torch's,
forward and as a training step: the product with x is small there, so the steps through time are what differs.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kronecell as kc
from benchmarks.results import Options, machine, main, table, write
from benchmarks.timing import Call, inference, interleave, threads, training
from kronecell.ops.kernels import column_sums, few_columns

PRODUCTS = [(160, 360), (960, 360), (15360, 360), (61440, 360), (96, 57600)]
PRODUCTS += [(15360, 128), (276480, 20), (15360, 20), (96, 1024), (768, 1024)]
COLUMNS = (1, 2, 4, 8, 16, 32, 64, 256)
HIDDEN = (64, 256, 1024, 2304)
SEQUENCES = ((1, 1), (6, 1), (6, 2), (1, 16), (6, 16), (20, 16), (6, 96))  # steps, batch
INPUTS = 64


def products(quick: bool) -> list[dict[str, Any]]:
    """x (rows, depth) times a few columns, and the gradient for these."""
    found: list[dict[str, Any]] = []
    for rows, depth in PRODUCTS[:1] if quick else PRODUCTS:
        for columns in COLUMNS[:2] if quick else COLUMNS:
            x, weight, upstream = torch.randn(rows, depth), torch.randn(columns, depth), torch.randn(rows, columns)
            calls: dict[str, Call] = {
                "torch": partial(F.linear, x, weight),
                "ours": partial(few_columns, x, weight),
                "gradient, torch": partial(_transposed_product, upstream, x),
                "gradient, ours": partial(column_sums, x, upstream),
            }
            samples = interleave({name: inference(call) for name, call in calls.items()}, 1 if quick else 9, 0.1)
            seconds = {name: median(values) for name, values in samples.items()}
            found.append({"rows": rows, "depth": depth, "columns": columns, **seconds})
    return found


def _transposed_product(upstream: Tensor, x: Tensor) -> Tensor:
    return upstream.mT @ x


def recurrences(quick: bool) -> list[dict[str, Any]]:
    """Dense LSTMs of the same weights: torch's and ours."""
    found: list[dict[str, Any]] = []
    for hidden in HIDDEN[:1] if quick else HIDDEN:
        for steps, batch in SEQUENCES[:2] if quick else SEQUENCES:
            x = torch.randn(steps, batch, INPUTS)
            theirs = nn.LSTM(INPUTS, hidden)
            layers = {"torch": theirs, "ours": kc.LSTM.from_dense(theirs)}
            calls = {name: inference(partial(layer, x)) for name, layer in layers.items()}
            calls |= {f"training, {name}": training(layer, x) for name, layer in layers.items()}
            samples = interleave(calls, 1 if quick else 7, 0.3)
            seconds = {name: median(values) for name, values in samples.items()}
            found.append({"hidden": hidden, "steps": steps, "batch": batch, **seconds})
    return found


def lines(found: list[dict[str, Any]], sizes: tuple[str, ...]) -> str:
    """Milliseconds of every case, and torch's time over ours for each pair."""
    names = [name for name in found[0] if name not in sizes]
    pairs = [(name, name.replace("torch", "ours")) for name in names if "torch" in name]
    rows = []
    for case in found:
        times = [f"{case[name] * 1e3:.3f}" for name in names]
        ratios = [f"{case[theirs] / case[ours]:.2f}" for theirs, ours in pairs]
        rows.append((*(case[size] for size in sizes), *times, *ratios))
    head = (*sizes, *(f"{name}, ms" for name in names), *(f"{theirs} over ours" for theirs, _ in pairs))
    return table(head, rows)


def run(options: Options) -> None:
    """Measure both and report."""
    with threads(1):
        options.say("kernels: products of few columns")
        few = products(options.quick)
        options.say("kernels: recurrences")
        lstms = recurrences(options.quick)
    text = f"""# Kernels

{machine()}

## x times a few columns

{lines(few, ("rows", "depth", "columns"))}
## A dense LSTM with {INPUTS} inputs

Training is forward and backward to all weights.

{lines(lstms, ("hidden", "steps", "batch"))}"""
    write(options, "kernels", {"products": few, "recurrences": lstms}, text)


if __name__ == "__main__":
    main(run, __doc__)
