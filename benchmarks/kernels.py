"""Which kernel where: oneDNN or BLAS for products of few columns, a loop or torch's kernel for few rows.

    python -m benchmarks.kernels [--quick] [--results FOLDER]

The limits in kronecell/narrow.py and the constants of `loop_is_faster` in kronecell/recurrence.py come from here.
"""

from __future__ import annotations

from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from benchmarks.results import Options, machine, main, table, write
from benchmarks.timing import Call, inference, interleave, threads
from kronecell import narrow
from kronecell.recurrence import loop_is_faster, lstm_step, run_loop, run_native

PRODUCTS = [(160, 360), (960, 360), (15360, 360), (61440, 360), (96, 57600), (15360, 128), (15360, 20), (96, 1024)]
COLUMNS = (1, 4, 8, 16, 24, 32)
HIDDEN = (64, 256, 1024, 2304)
SEQUENCES = ((1, 1), (6, 1), (6, 2), (1, 16), (6, 16), (20, 16))  # steps, batch


def products(quick: bool) -> list[dict[str, float | bool]]:
    """x (rows, depth) times a few columns by both kernels."""
    found: list[dict[str, float | bool]] = []
    for rows, depth in PRODUCTS[:1] if quick else PRODUCTS:
        for columns in COLUMNS[:2] if quick else COLUMNS:
            x, weight = torch.randn(rows, depth), torch.randn(columns, depth)
            cases: dict[str, Call] = {"BLAS": inference(lambda x=x, w=weight: F.linear(x, w))}
            if narrow._kernel is not None:
                onednn = partial(narrow._kernel, x, weight, None, "none", [], "")
                cases["oneDNN"] = inference(onednn)
            samples = interleave(cases, 1 if quick else 9, 0.2)
            seconds = {name: median(values) for name, values in samples.items()}
            taken = narrow.suits(x, weight)
            found.append({"rows": rows, "depth": depth, "columns": columns, "oneDNN taken": taken, **seconds})
    return found


def recurrences(quick: bool) -> list[dict[str, float | bool]]:
    """An LSTM over projected gates by both ways, without gradients."""
    found: list[dict[str, float | bool]] = []
    for hidden in HIDDEN[:1] if quick else HIDDEN:
        for steps, batch in SEQUENCES[:2] if quick else SEQUENCES:
            source, out, weight = (
                torch.randn(steps, batch, 64),
                torch.randn(4 * hidden, 64),
                torch.randn(4 * hidden, hidden),
            )
            biases = (torch.randn(4 * hidden), torch.randn(4 * hidden))
            state = (torch.zeros(batch, hidden), torch.zeros(batch, hidden))
            native = partial(run_native, 4, source, None, state, [out, weight, *biases], False)

            def loop(
                source=source,
                out=out,
                weight=weight,
                biases=biases,
                state=state,  # type: ignore[no-untyped-def]
            ) -> object:
                step = partial(lstm_step, hidden=lambda h: F.linear(h, weight, biases[1]), project=None)
                return run_loop(step, F.linear(source, out, biases[0]), None, state)

            samples = interleave({"native": inference(native), "loop": inference(loop)}, 1 if quick else 7, 0.3)
            seconds = {name: median(values) for name, values in samples.items()}
            taken = loop_is_faster(steps, steps * batch, 4 * hidden**2)
            found.append({"hidden": hidden, "steps": steps, "batch": batch, "loop taken": taken, **seconds})
    return found


def lines(found: list[dict[str, float | bool]], first: str, second: str) -> str:
    """A table of both kernels' milliseconds, and how much the one taken loses."""
    rows = []
    for case in found:
        *shape, _, _, _ = case
        if second not in case:
            continue
        taken = case[second] if case[f"{second} taken"] else case[first]
        lost = taken / min(case[first], case[second])
        times = (f"{case[first] * 1e3:.3f}", f"{case[second] * 1e3:.3f}")
        rows.append(
            (*(case[name] for name in shape), *times, second if case[f"{second} taken"] else first, f"{lost:.2f}")
        )
    return table((*shape, f"{first}, ms", f"{second}, ms", "taken", "over the faster"), rows)


def run(options: Options) -> None:
    """Measure both and report."""
    with threads(1):
        options.say("kernels: products of few columns")
        few_columns = products(options.quick)
        options.say("kernels: recurrences of few rows")
        few_rows = recurrences(options.quick)
    text = f"""# Kernels

{machine()}

## x times a few columns

{lines(few_columns, "BLAS", "oneDNN")}
## An LSTM over 64 projected columns, without gradients

{lines(few_rows, "native", "loop")}"""
    write(options, "kernels", {"products": few_columns, "recurrences": few_rows}, text)


if __name__ == "__main__":
    main(run, __doc__)
