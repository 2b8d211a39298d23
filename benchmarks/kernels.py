"""Which kernel where: BLAS, oneDNN or compiled for products of few columns; ways to run the recurrence.

    python -m benchmarks.kernels [--quick] [--results FOLDER]

The limits in kronecell/narrow.py come from here. "matrices" is what takes the place of BLAS where that uses half of the
processor (kronecell/matrices.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.results import Options, machine, main, table, write
from benchmarks.timing import Call, inference, interleave, threads
from kronecell.nn.recurrence import State, Step, can_pack, lstm_step, pack, run_loop, run_native, run_packed
from kronecell.ops import compiled, lstm_kernel, matrices, narrow

PRODUCTS = [(160, 360), (960, 360), (15360, 360), (61440, 360), (96, 57600)]
PRODUCTS += [(15360, 128), (276480, 20), (15360, 20), (96, 1024), (768, 1024)]
COLUMNS = (1, 2, 4, 8, 16, 32, 64, 256)
HIDDEN = (64, 256, 1024, 2304)
SEQUENCES = ((1, 1), (6, 1), (6, 2), (1, 16), (6, 16), (20, 16), (6, 96))  # steps, batch


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
            if matrices.suits(x, weight.t(), None):
                cases["matrices"] = partial(matrices.multiply, x, weight.t())
                cases["gradient, matrices"] = partial(matrices.multiply, gradient.t(), x)
            samples = interleave({name: inference(call) for name, call in cases.items()}, 1 if quick else 9, 0.1)
            seconds = {name: median(values) for name, values in samples.items()}
            taken = narrow.kernel(x, weight)
            taken = "matrices" if taken == "BLAS" and "matrices" in cases else taken
            found.append({"rows": rows, "depth": depth, "columns": columns, "taken": taken, **seconds})
    return found


def recurrences(quick: bool) -> list[dict[str, float | bool]]:
    """An LSTM over 64 projected columns: torch's kernel, the same with weights packed before, ours, and a loop; then
    torch's and ours with the gradients of all weights."""
    found: list[dict[str, float | bool]] = []
    for hidden in HIDDEN[:1] if quick else HIDDEN:
        for steps, batch in SEQUENCES[:2] if quick else SEQUENCES:
            source, out = torch.randn(steps, batch, 64), torch.randn(4 * hidden, 64)
            weight, biases = torch.randn(4 * hidden, hidden), [torch.randn(4 * hidden) for _ in range(2)]
            state = (
                torch.randn(batch, hidden),
                torch.randn(batch, hidden),
            )  # zeros would cost the compiled one nothing
            step = partial(lstm_step, hidden=partial(F.linear, weight=weight, bias=biases[1]), project=None)
            native = partial(run_native, 4, source, None, state, [out, weight, *biases])
            calls: dict[str, Call] = {
                "native": partial(native, False),
                "loop": partial(_loop, step, source, out, biases[0], state),
            }
            if can_pack((source, out, weight)):
                calls["packed"] = partial(run_packed, source, state, pack(out, weight, batch), biases)
            if lstm_kernel.available():
                calls["compiled"] = partial(_compiled, source, out, biases, lstm_kernel.packed(weight), state)
            calls = {name: inference(call) for name, call in calls.items()}
            leaves = [out, weight, *biases]
            calls["training, native"] = partial(_gradients, partial(native, True), leaves)
            if lstm_kernel.available():
                ours = partial(_compiled, source, out, biases, weight, state, training=True)
                calls["training, compiled"] = partial(_gradients, ours, leaves)
            samples = interleave(calls, 1 if quick else 7, 0.3)
            seconds = {name: median(values) for name, values in samples.items()}
            found.append({"hidden": hidden, "steps": steps, "batch": batch, **seconds})
    return found


def _loop(step: Step, source: Tensor, out: Tensor, bias: Tensor, state: State) -> object:
    return run_loop(step, F.linear(source, out, bias), None, state)


def _compiled(
    source: Tensor, out: Tensor, biases: list[Tensor], U: Tensor, state: State, training: bool = False
) -> tuple[Tensor, ...]:
    gates = F.linear(source, out, biases[0] + biases[1])
    return (lstm_kernel.train if training else lstm_kernel.infer)(gates, U, *state)


def _gradients(call: Callable[[], tuple[Any, ...]], leaves: list[Tensor]) -> object:
    for leaf in leaves:
        leaf.requires_grad_()
    try:
        return torch.autograd.grad(call()[0].sum(), leaves)
    finally:
        for leaf in leaves:
            leaf.requires_grad_(False)


def product_lines(found: list[dict[str, Any]]) -> str:
    """Milliseconds of all kernels, and how much the one taken loses."""
    kernels = ("BLAS", "oneDNN", "matrices", "compiled", "gradient, BLAS", "gradient, matrices", "gradient, compiled")
    kernels = tuple(kernel for kernel in kernels if any(kernel in case for case in found))
    products = [kernel for kernel in kernels if "gradient" not in kernel]
    rows = []
    for case in found:
        times = (f"{case[kernel] * 1e3:.3f}" if kernel in case else "" for kernel in kernels)
        lost = case[case["taken"]] / min(case[kernel] for kernel in products if kernel in case)
        rows.append((case["rows"], case["depth"], case["columns"], *times, case["taken"], f"{lost:.2f}"))
    head = (f"{kernel}, ms" for kernel in kernels)
    return table(("rows", "depth", "columns", *head, "taken", "over the fastest"), rows)


def recurrence_lines(found: list[dict[str, float | bool]]) -> str:
    """Milliseconds of all ways."""
    ways = ("native", "packed", "compiled", "loop", "training, native", "training, compiled")
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
## An LSTM over 64 projected columns

The first state is not zero. Compiled is taken where it is built; without it, packed for an LSTM in eval mode. Training
is forward and backward to all weights.

{recurrence_lines(ways)}"""
    write(options, "kernels", {"products": few_columns, "recurrences": ways}, text)


if __name__ == "__main__":
    main(run, __doc__)
