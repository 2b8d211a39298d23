"""Which kernel where: BLAS, oneDNN or compiled for products of few columns; ways to run the recurrence.

    python -m benchmarks.kernels [--quick] [--results FOLDER]

The limits in kronecell/narrow.py come from here.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.results import Options, machine, main, table, write
from benchmarks.timing import Call, inference, interleave, threads
from kronecell import compiled, narrow
from kronecell.recurrence import State, Step, can_pack, lstm_step, pack, run_loop, run_native, run_packed

PRODUCTS = [(160, 360), (960, 360), (15360, 360), (61440, 360), (96, 57600)]
PRODUCTS += [(15360, 128), (276480, 20), (15360, 20), (96, 1024), (768, 1024)]
COLUMNS = (1, 2, 4, 8, 16, 32, 64)
HIDDEN = (64, 256, 1024, 2304)
SEQUENCES = ((1, 1), (6, 1), (6, 2), (1, 16), (6, 16), (20, 16))  # steps, batch


def products(quick: bool) -> list[dict[str, Any]]:
    """x (rows, depth) times a few columns, and the gradient of those, by all kernels."""
    found: list[dict[str, Any]] = []
    for rows, depth in PRODUCTS[:1] if quick else PRODUCTS:
        for columns in COLUMNS[:2] if quick else COLUMNS:
            x, weight, gradient = torch.randn(rows, depth), torch.randn(columns, depth), torch.randn(rows, columns)
            cases: dict[str, Call] = {
                "BLAS": lambda x=x, w=weight: F.linear(x, w),
                "gradient, BLAS": lambda x=x, g=gradient: g.t() @ x,
            }
            if narrow._kernel is not None:
                cases["oneDNN"] = partial(narrow._kernel, x, weight, None, "none", [], "")
            if compiled.library is not None:
                cases["compiled"] = partial(compiled.few_columns, x, weight)
                if depth >= compiled.LEAST_DEPTH:
                    cases["gradient, compiled"] = partial(compiled.column_sums, x, gradient)
            samples = interleave({name: inference(call) for name, call in cases.items()}, 1 if quick else 9, 0.1)
            seconds = {name: median(values) for name, values in samples.items()}
            taken = narrow.kernel(x, weight)
            found.append({"rows": rows, "depth": depth, "columns": columns, "taken": taken, **seconds})
    return found


def recurrences(quick: bool) -> list[dict[str, float | bool]]:
    """An LSTM over 64 projected columns: torch's kernel, the same with weights packed before, and a loop."""
    found: list[dict[str, float | bool]] = []
    for hidden in HIDDEN[:1] if quick else HIDDEN:
        for steps, batch in SEQUENCES[:2] if quick else SEQUENCES:
            source, out = torch.randn(steps, batch, 64), torch.randn(4 * hidden, 64)
            weight, biases = torch.randn(4 * hidden, hidden), [torch.randn(4 * hidden) for _ in range(2)]
            state = (torch.zeros(batch, hidden), torch.zeros(batch, hidden))
            step = partial(lstm_step, hidden=partial(F.linear, weight=weight, bias=biases[1]), project=None)
            calls: dict[str, Call] = {
                "native": partial(run_native, 4, source, None, state, [out, weight, *biases], False),
                "loop": partial(_loop, step, source, out, biases[0], state),
            }
            if can_pack((source, out, weight)):
                calls["packed"] = partial(run_packed, source, state, pack(out, weight, batch), biases)
            calls = {name: inference(call) for name, call in calls.items()}
            samples = interleave(calls, 1 if quick else 7, 0.3)
            seconds = {name: median(values) for name, values in samples.items()}
            found.append({"hidden": hidden, "steps": steps, "batch": batch, **seconds})
    return found


def _loop(step: Step, source: Tensor, out: Tensor, bias: Tensor, state: State) -> object:
    return run_loop(step, F.linear(source, out, bias), None, state)


def product_lines(found: list[dict[str, Any]]) -> str:
    """Milliseconds of all kernels, and how much the one taken loses."""
    kernels = ("BLAS", "oneDNN", "compiled", "gradient, BLAS", "gradient, compiled")
    rows = []
    for case in found:
        times = (f"{case[kernel] * 1e3:.3f}" if kernel in case else "" for kernel in kernels)
        lost = case[case["taken"]] / min(case[kernel] for kernel in kernels[:3] if kernel in case)
        rows.append((case["rows"], case["depth"], case["columns"], *times, case["taken"], f"{lost:.2f}"))
    head = (f"{kernel}, ms" for kernel in kernels)
    return table(("rows", "depth", "columns", *head, "taken", "over the fastest"), rows)


def recurrence_lines(found: list[dict[str, float | bool]]) -> str:
    """Milliseconds of all ways."""
    ways = ("native", "packed", "loop")
    rows = []
    for case in found:
        times = (f"{case[way] * 1e3:.3f}" if way in case else "" for way in ways)
        rows.append((case["hidden"], case["steps"], case["batch"], *times))
    return table(("hidden", "steps", "batch", *(f"{way}, ms" for way in ways)), rows)


def run(options: Options) -> None:
    """Measure both and report."""
    with threads(1):
        options.say("kernels: products of few columns")
        few_columns = products(options.quick)
        options.say("kernels: recurrences")
        ways = recurrences(options.quick)
    text = f"""# Kernels

{machine()}

## x times a few columns

{product_lines(few_columns)}
## An LSTM over 64 projected columns, without gradients

Packed is taken for an LSTM in eval mode.

{recurrence_lines(ways)}"""
    write(options, "kernels", {"products": few_columns, "recurrences": ways}, text)


if __name__ == "__main__":
    main(run, __doc__)
