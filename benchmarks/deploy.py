"""Every way out of Python: bytes, memory and time at batch 1; and one step of C files beside our operators.

    python -m benchmarks.deploy [--quick] [--results FOLDER] [--only ways|steps]

One thread. AOTInductor and the checks of C files compile: about fifteen minutes.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kronecell as kc
from benchmarks.results import Options, machine, main, table, write
from benchmarks.timing import Call, inference, interleave, ratio, summary, threads
from kronecell.deploy.c_source.check import find_compiler
from kronecell.ops.library import LIBRARY

PAPER = "kcp:m=8x20x20x18,n=4x4x4x4,K=4,CA=4,CB=2"
STEPS = 50
Make = Callable[[], nn.Module]
NETWORKS: dict[str, Make] = {
    "paper": lambda: kc.LSTM(57600, 256, input_format=PAPER),
    "256": lambda: kc.LSTM(256, 256, input_format="lowrank:r=16", hidden_format="lowrank:r=16"),
}
TITLES = {
    "paper": "LSTM 57,600 to 256, W in KCP(4,4,2), U dense",
    "256": "LSTM 256 to 256, W and U of rank 16",
    "quick": "LSTM 16 to 16, W and U of rank 2",
}
OF_256 = {
    "dense": {},
    "low rank 16": {"input_format": "lowrank:r=16", "hidden_format": "lowrank:r=16"},
    "TT, rank 8": {"input_format": "tt:r=8", "hidden_format": "tt:r=8"},
    "TR, rank 6": {"input_format": "tr:r=6", "hidden_format": "tr:r=6"},
    "KCP(4,2,2)": {"input_format": "kcp:K=4,CA=2,CB=2", "hidden_format": "kcp:K=4,CA=2,CB=2"},
}
ABOUT = f"""A file is what the device gets beside the libraries of its way: arrays and machine code of C, the files of
`kc.save`, a file of ONNX, a package of AOTInductor. Memory is the most that a process of its own holds which loads it
and runs {STEPS} steps, libraries included. C is compiled with `-O3 -march=native`; batch 1; medians."""
FLAGS = ("-O3", "-march=native")
LOOP = """#include "net.h"
static net_state state;
static float y[NET_OUTPUTS];
void start(void) { net_reset(&state); }
void loop(const float *x, size_t steps, size_t skip)
{
    for (size_t i = 0; i < steps; i++)
        net_step(&state, x + i * skip, y);
}
"""
ALONE = """#include <stdio.h>
#include "net.h"
static net_state state;
static float x[NET_INPUTS], y[NET_OUTPUTS];
int main(void)
{
    char line[256];
    FILE *status;
    net_reset(&state);
    for (int i = 0; i < %d; i++)
        net_step(&state, x, y);
    status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        fputs(line, stdout);
    return y[0] > 2.0f;
}
"""
STATUS = "\nprint(open('/proc/self/status').read())\n"


@dataclass(frozen=True)
class Way:
    """One way to run a network: its file, how a process of its own runs it, and a call for so many steps."""

    bytes: int
    alone: tuple[str, ...]
    step: Call
    steps: Call
    note: str = ""


# C ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """A compiled C file: bytes of arrays and of code, RAM of its state, and its loop."""

    arrays: int
    text: int
    state: int
    loop: Callable[[int, int, int], None]


def build(module: nn.Module, folder: Path, prefer: str) -> Built:
    """Export, compile, load."""
    compiler = find_compiler()
    assert compiler is not None
    exported = kc.export_c(module, folder, "net", prefer=prefer)
    (folder / "loop.c").write_text(LOOP)
    (folder / "alone.c").write_text(ALONE % STEPS)
    for target in (["-shared", "-fPIC", "net.c", "loop.c", "-o", "net.so"], ["net.c", "alone.c", "-o", "alone"]):
        subprocess.run([compiler, *FLAGS, *target], cwd=folder, check=True)
    subprocess.run([compiler, *FLAGS, "-c", "net.c", "-o", "net.o"], cwd=folder, check=True)
    listed = subprocess.run(["size", "-A", "-d", "net.o"], cwd=folder, check=True, capture_output=True, text=True)
    text = sum(int(size) for size in re.findall(r"^\.text\S*\s+(\d+)", listed.stdout, re.M))
    library = ctypes.CDLL(str(folder / "net.so"))
    library.loop.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    library.start()
    return Built(exported.report.array_bytes, text, exported.report.ram, library.loop)


def steps_of_c(options: Options) -> None:
    """One step of float and integer C files beside a frozen call of one step, and a step of a frozen call of 50."""
    cases: dict[str, Make] = {
        "the paper's, W unshared, U dense": NETWORKS["paper"],
        "the paper's, W shared, U dense": lambda: kc.LSTM(57600, 256, input_format=PAPER, shared=True),
        "the paper's, W shared, U of rank 16": lambda: kc.LSTM(
            57600, 256, input_format=PAPER, hidden_format="lowrank:r=16", shared=True
        ),
    }
    for cell in ("LSTM", "GRU"):
        for title, formats in OF_256.items():
            cases[f"{cell} 256, {title}"] = lambda cell=cell, formats=formats: getattr(kc, cell)(256, 256, **formats)
    if options.quick:
        cases = {"LSTM 16": lambda: kc.LSTM(16, 16, hidden_format="lowrank:r=2")}
    rows = []
    for title, make in cases.items():
        for bits in (None, 8, 4):
            torch.manual_seed(0)
            module = make().eval()
            module = module if bits is None else kc.quantize(module, bits=bits)
            options.say(f"deploy: {title}, {bits or 'float'}")
            rows.append({"network": title, "bits": bits, **_one_step(module, options.quick)})
    text = f"""# One step of a C file

{machine()}

A step of the C file, in a loop of C, over the time of our operators in the same round: in a call of the frozen layer
for one step, which is what a stream of single steps costs in Python, and in one call for {STEPS} steps, where the
product with x runs once for all steps. Below 1, the C file is faster; medians. Code is `.text` with
`{" ".join(FLAGS)}`.

"""
    head = ("network", "weights", "microseconds a step", "over a call", "over a step of a sequence", "code, bytes")
    lines = [
        (row["network"], f"{row['bits']} bits" if row["bits"] else "float", f"{1e6 * row['seconds']:.1f}",
         f"{row['over_call']['seconds']:.2f}", f"{row['over_sequence']['seconds']:.2f}", f"{row['text']:,}")
        for row in rows
    ]  # fmt: skip
    write(options, "deploy_steps", {"steps": rows}, text + table(head, lines))


def _one_step(module: Any, quick: bool) -> dict[str, Any]:
    frozen, size = kc.freeze(module), module.input_size
    one, many = torch.randn(1, 1, size), torch.randn(STEPS, 1, size)
    with tempfile.TemporaryDirectory() as folder, threads(1):
        built = build(module, Path(folder), "speed")
        cases: dict[str, Call] = {
            "C": lambda: built.loop(one.data_ptr(), STEPS, 0),
            "call": inference(lambda: frozen(one)),
            "sequence": inference(lambda: frozen(many)),
        }
        samples = interleave(cases, 1 if quick else 15, case_seconds=0.0 if quick else 0.5)
    each = {name: [s / (1 if name == "call" else STEPS) for s in found] for name, found in samples.items()}
    over = {f"over_{name}": ratio(each, "C", name).as_dict() for name in ("call", "sequence")}
    facts = {"arrays": built.arrays, "text": built.text, "state": built.state}
    return {"seconds": summary(each["C"]).seconds, **over, **facts}


# Ways ---------------------------------------------------------------------------------------------------------------


def ways_of(module: Any, folder: Path, quick: bool) -> tuple[dict[str, Way], dict[str, str]]:
    """Every way that this machine has, and why others are not there."""
    found: dict[str, Way] = {}
    missing: dict[str, str] = {}
    size, hidden = module.input_size, module.hidden_size
    one, many = torch.randn(1, 1, size), torch.randn(STEPS, 1, size)

    def of_torch(name: str, run: nn.Module, load: str, file: Path | None) -> None:
        bytes_ = sum(t.nbytes for t in run.state_dict().values()) if file is None else _size(file)
        code = f"import torch\n{load}\ntorch.set_num_threads(1)\nx = torch.zeros({STEPS}, 1, {size})\n"
        code += f"with torch.no_grad():\n    model(x)\n{STATUS}"
        calls = inference(lambda: run(one)), inference(lambda: run(many))
        found[name] = Way(bytes_, (sys.executable, "-W", "ignore", "-c", code), *calls)

    of_torch("torch.nn, dense", nn.LSTM(size, hidden).eval(), f"model = torch.nn.LSTM({size}, {hidden})", None)
    kc.save(module, folder / "model")
    load = f"import kronecell as kc\nmodel = kc.load({str(folder / 'model')!r}).eval()"
    of_torch("kronecell in torch", module, load, folder / "model")
    of_torch("kc.freeze", kc.freeze(module), f"{load}\nmodel = kc.freeze(model)", folder / "model")
    small = {bits: kc.quantize(module, bits=bits) for bits in (8, 4)}
    for bits, quantized in small.items():
        place = folder / f"model{bits}"
        kc.save(quantized, place)
        of_torch(f"kc.quantize, {bits} bits", quantized, load.replace(str(folder / "model"), str(place)), place)
    if find_compiler() is None or shutil.which("size") is None:
        missing["C"] = "no C compiler with binutils"
    else:
        for name, which in (("C, float", module), ("C, 8 bits", small[8]), ("C, 4 bits", small[4])):
            found[name] = _way_of_c(which, folder / name, one, many)
    try:
        for name, which in (("ONNX Runtime, float", module), ("ONNX Runtime, 8 bits", small[8])):
            found[name] = _way_of_onnx(which, folder / f"{len(found)}.onnx", one, many)
    except ImportError as error:
        missing["ONNX Runtime"] = str(error)
    if quick:
        missing["AOTInductor"] = "it compiles too long for --quick"
    else:
        found["AOTInductor"] = _way_of_aoti(module, folder / "model.pt2", one, many)
    return found, missing


def _size(place: Path) -> int:
    return sum(file.stat().st_size for file in place.iterdir()) if place.is_dir() else place.stat().st_size


def _way_of_c(module: nn.Module, folder: Path, one: Tensor, many: Tensor) -> Way:
    built, size = build(module, folder, "balance"), one.shape[-1]
    return Way(
        built.arrays + built.text,
        (str(folder / "alone"),),
        lambda: built.loop(one.data_ptr(), 1, 0),
        lambda: built.loop(many.data_ptr(), STEPS, size),
        f"{built.text:,} bytes of code, {built.state:,} of state",
    )


def _way_of_onnx(module: nn.Module, file: Path, one: Tensor, many: Tensor) -> Way:
    import onnxruntime

    kc.export_onnx(module, file, many)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    code = f"""import numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.add_session_config_entry("session.disable_quant_qdq", "1")
session = onnxruntime.InferenceSession({str(file)!r}, options, providers=["CPUExecutionProvider"])
session.run(None, {{{name!r}: numpy.zeros({tuple(many.shape)}, "float32")}}){STATUS}"""
    first, second = {name: one.numpy()}, {name: many.numpy()}
    command = (sys.executable, "-c", code)
    return Way(_size(file), command, lambda: session.run(None, first), lambda: session.run(None, second))


def _way_of_aoti(module: nn.Module, file: Path, one: Tensor, many: Tensor) -> Way:
    program = kc.export_program(module, (many,), ({0: torch.export.Dim("time", min=1)},))
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=str(file))
    run = torch._inductor.aoti_load_package(str(file))
    code = f"""import torch
torch.set_num_threads(1)
torch.ops.load_library({str(LIBRARY)!r})
model = torch._inductor.aoti_load_package({str(file)!r})
with torch.no_grad():
    model(torch.zeros{tuple(many.shape)}){STATUS}"""
    calls = inference(lambda: run(one)), inference(lambda: run(many))
    return Way(_size(file), (sys.executable, "-W", "ignore", "-c", code), *calls)


def memory(command: tuple[str, ...]) -> int:
    """Bytes that a process held at most; 0 where the system does not say."""
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    held = re.search(r"VmHWM:\s+(\d+) kB", printed)
    return 1024 * int(held[1]) if held else 0


def run_ways(options: Options) -> None:
    """Measure every way for every network."""
    makes: Mapping[str, Make] = NETWORKS
    if options.quick:
        makes = {"quick": lambda: kc.LSTM(16, 16, input_format="lowrank:r=2", hidden_format="lowrank:r=2")}
    results = []
    for key, make in makes.items():
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), threads(1):
            warnings.simplefilter("ignore")  # of exporters, about themselves
            options.say(f"deploy: {TITLES[key]}")
            ways, missing = ways_of(make().eval(), Path(folder), options.quick)
            times = {}
            for part in ("step", "steps"):
                calls = {name: getattr(way, part) for name, way in ways.items()}
                times[part] = interleave(calls, 1 if options.quick else 15, case_seconds=0.0 if options.quick else 0.5)
            rows = {
                name: {
                    "bytes": way.bytes,
                    "memory": memory(way.alone),
                    "step": summary(times["step"][name]).as_dict(),
                    "steps": summary(times["steps"][name]).as_dict(),
                    "note": way.note,
                }
                for name, way in ways.items()
            }
        results.append({"network": key, "title": TITLES[key], "ways": rows, "not run": missing})
    text = f"""# Every way out of Python

{machine()}

{ABOUT}

"""
    for result in results:
        lines = [
            (name, f"{row['bytes']:,}", f"{row['memory'] / 2**20:.1f}", f"{1e6 * row['step']['seconds']:.1f}",
             f"{1e6 * row['steps']['seconds']:.0f}", row["note"])
            for name, row in result["ways"].items()
        ]  # fmt: skip
        head = ("way", "bytes of file", "memory, MB", "one step, us", f"{STEPS} steps, us", "")
        text += f"## {result['title']}\n\n{table(head, lines)}\n"
        text += "".join(f"- not run: {name}: {why}\n" for name, why in result["not run"].items())
    write(options, "deploy", {"networks": results, "steps": STEPS}, text)


def run(options: Options) -> None:
    """Measure everything."""
    run_ways(options)
    steps_of_c(options)


if __name__ == "__main__":
    main(run, __doc__, {"ways": run_ways, "steps": steps_of_c})
