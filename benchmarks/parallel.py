"""What running at the same time brings: the paper's simulation of K branches, and our products on two threads.

    python -m benchmarks.parallel [--quick] [--results FOLDER]

The simulation runs Algorithm 1's branches one after the other, in threads and in processes, beside our single call.
Products and LSTMs are timed in elapsed seconds with one thread and with two, in turn.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

import kronecell as kc
from benchmarks.results import Options, machine, main, table, write
from benchmarks.shapes import GATES, MAIN, formats, small_formats
from benchmarks.timing import Call, inference, training
from kronecell.paper.branch_study import WAYS, study

RANKS = (2, 8, 32)
ROWS = (1, 96, 384)
REPEATS = 15


def two_threads(call: Call, repeats: int) -> dict[str, float]:
    """Median elapsed seconds with one thread and with two, taken in turn."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    before = torch.get_num_threads()
    try:
        for _ in range(repeats):
            for count, found in seconds.items():
                torch.set_num_threads(count)
                call()
                start = time.perf_counter()
                call()
                found.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return {"one": median(seconds[1]), "two": median(seconds[2])}


def cases(quick: bool) -> dict[str, Call]:
    """The layer and the LSTM in our main format."""
    fmt = (small_formats() if quick else formats("UCF11"))[MAIN]
    found: dict[str, Call] = {}
    for rows in ROWS:
        layer, x = kc.TensorLinear(fmt, gates=GATES).eval(), torch.randn(rows, fmt.M)
        found[f"x W, {rows} rows, forward"] = inference(lambda layer=layer, x=x: layer(x))
    layer, x = kc.TensorLinear(fmt, gates=GATES), torch.randn(96, fmt.M)
    found["x W, 96 rows, forward and backward"] = training(layer, x)
    lstm, clips = kc.LSTM(fmt.M, fmt.N, input_format=fmt), torch.randn(6, 16, fmt.M)
    found["LSTM, 16 x 6 frames, training step"] = training(lstm, clips)
    return found


def run(options: Options) -> None:
    """Measure both and report."""
    options.say("parallel: the paper's simulation")
    studies = study("UCF11", RANKS[:1] if options.quick else RANKS, 1 if options.quick else 3)
    options.say("parallel: two threads")
    times: dict[str, Any] = {
        name: two_threads(call, 1 if options.quick else REPEATS) for name, call in cases(options.quick).items()
    }
    branches = [(s.C, *(f"{s.seconds[way] * 1e3:.2f}" for way in WAYS)) for s in studies]
    lines = [
        (name, f"{t['one'] * 1e3:.3f}", f"{t['two'] * 1e3:.3f}", f"{t['one'] / t['two']:.2f}")
        for name, t in times.items()
    ]
    text = f"""# At the same time

{machine((1, 2))}

## The paper's simulation: UCF11, K = 4, one row, milliseconds by CP rank

{table(("C", *WAYS), branches)}
## {MAIN} on two threads, elapsed milliseconds

{table(("what", "one thread", "two threads", "times faster"), lines)}"""
    data = {"branches": [{"C": s.C, **s.seconds} for s in studies], "threads": times}
    write(options, "parallel", data, text)


if __name__ == "__main__":
    main(run, __doc__)
