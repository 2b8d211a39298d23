"""Peak memory of forward and backward in every format, above x itself, each in a process of its own.

    python -m benchmarks.memory [--quick] [--results FOLDER]

The child makes x and the layer, runs tiny products to load what is loaded once, then reads the peak of its resident
memory before and after one forward and backward at full size. Linux only: there the peak can be reset.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import kronecell as kc
from benchmarks.results import Options, machine, main, table, write
from benchmarks.shapes import GATES, formats, small_formats
from benchmarks.timing import training

ROWS = 96
MEGABYTE = 2**20
TIMEOUT = 120  # seconds


def resident(field: str) -> int:
    """VmHWM (peak) or VmRSS (now) of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in the status of a process")


def reset_peak() -> None:
    """Make VmHWM start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def child(spec: str, shared: bool, rows: int) -> dict[str, float]:
    """Bytes above x that one forward and backward needs at its peak, and those of the parameters' gradients."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fmt = kc.parse(spec)
    if isinstance(fmt, kc.Dense):
        layer: nn.Module = nn.Linear(fmt.M, GATES * fmt.N)
    else:
        layer = kc.TensorLinear(fmt, gates=GATES, shared=shared)
    training(nn.Linear(8, 8), torch.randn(2, 8))()
    training(kc.TensorLinear(small_formats()["TT"], gates=GATES), torch.randn(2, 36))()
    x = torch.randn(rows, fmt.M)
    reset_peak()
    before = resident("VmRSS")
    training(layer, x)()
    parameters = sum(p.numel() for p in layer.parameters())
    return {"x": 4 * x.numel(), "above_x": resident("VmHWM") - before, "parameters": parameters}


def attempt(case: tuple[str, bool, int]) -> dict[str, Any]:
    """What the child finds; a failure is reported with its reason."""
    try:
        return child(*case)
    except Exception as error:
        return {"reason": f"{type(error).__name__}: {error}"}


def parent() -> None:
    """Cases as JSON in, a line of JSON for each out. This process loads all modules once, and does nothing else."""
    cases = json.load(sys.stdin)
    kc.TensorLinear(small_formats()["TT"], device="meta")  # loads what torch loads when it first runs without data
    # A new process for every case; two at a time do not add to each other's memory.
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        for answer in [pool.apply_async(attempt, (case,)) for case in cases]:
            try:
                found = answer.get(TIMEOUT)
            except multiprocessing.TimeoutError:  # such as one that was killed for its memory
                found = {"reason": f"no answer within {TIMEOUT} s"}
            print(json.dumps(found), flush=True)


def measure(cases: list[tuple[str, bool, int]]) -> Iterator[dict[str, Any]]:
    """What every case needs, in order."""
    code = "from benchmarks.memory import parent; parent()"
    root = Path(__file__).resolve().parents[1]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(cases))
        process.stdin.close()
        for _ in cases:
            line = process.stdout.readline()
            yield json.loads(line) if line else {"reason": "the process ended early"}


def run(options: Options) -> None:
    """Measure every format and report."""
    known = (
        {"TT": small_formats()["TT"]} if options.quick else {"dense": kc.Dense((57600,), (256,)), **formats("UCF11")}
    )
    rows, found, lines = ROWS, [], []
    cases = [
        (label, shared)
        for label in known
        for shared in ((False, True) if label != "dense" and not options.quick else (False,))
    ]
    results = measure([(str(known[label]), shared, rows) for label, shared in cases])
    for (label, shared), case in zip(cases, results, strict=True):
        options.say(f"memory: {label} {'shared' if shared else 'unshared'}")
        found.append({"format": label, "shared": shared, "rows": rows, **case})
        if "reason" in case:
            lines.append((label, shared, "", "", f"not run: {case['reason']}"))
        else:
            above, x = case["above_x"] / MEGABYTE, case["x"] / MEGABYTE
            lines.append((label, "yes" if shared else "no", f"{above:.1f}", f"{above / x:.2f}", case["parameters"]))
    head = ("format", "gates share", "peak above x, MB", "over the size of x", "parameters")
    text = f"""# Peak memory of forward and backward, {rows} rows, four gates

{machine()} Layer of 57,600 -> 4 x 256 (UCF11), x has {4 * rows * 57600 / MEGABYTE:.1f} MB. A process for each line.

{table(head, lines)}"""
    write(options, "memory", {"cases": found}, text)


if __name__ == "__main__":
    main(run, __doc__)
