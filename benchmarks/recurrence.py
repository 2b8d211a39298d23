"""Recurrent layers of everyday sizes, W and U compressed: beside torch.nn, its dynamic int8 and ONNX Runtime.

    python -m benchmarks.recurrence [--quick] [--results FOLDER] [--only layers|decoders]

Inference is of frozen modules. A training step is forward, the sum of the outputs, and backward to all parameters. A
dense layer of ours stands beside torch.nn's: what a layer costs whose U cannot be compressed well. A decoder takes its
steps by hand: frozen cells, beside our layer called for one step at a time or once for all, and torch.nn's cell. One
thread.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kronecell as kc
from benchmarks.results import Options, machine, main, table, write
from benchmarks.timing import Call, inference, interleave, ratio, summary, threads, training

CELLS: dict[str, tuple[type[nn.Module], Callable[..., nn.Module]]] = {
    "LSTM": (nn.LSTM, kc.LSTM),
    "GRU": (nn.GRU, kc.GRU),
}
PEERS = ("torch.nn", "torch int8", "ONNX Runtime", "ONNX Runtime int8")


@dataclass(frozen=True)
class Group:
    """One cell, size and format, batch and number of steps."""

    cell: str
    size: int
    recipe: str  # of W and U
    batch: int
    steps: int
    grad: bool

    @property
    def title(self) -> str:
        """For people."""
        what = "training" if self.grad else "inference"
        return f"{self.cell} {self.size}, {self.recipe}, {self.batch} x {self.steps}, {what}"


def groups(quick: bool) -> list[Group]:
    """Everything that is measured."""
    if quick:
        return [Group(cell, 16, "lowrank:r=2", 2, 3, grad) for cell in CELLS for grad in (False, True)]
    formats = [
        (256, "lowrank:r=16"),
        (512, "lowrank:r=32"),
        (1024, "lowrank:r=32"),
        (512, "kcp:K=6,CA=4,CB=4"),
        (256, "dense"),
        (1024, "dense"),
    ]
    shapes = [(1, 1, False), (1, 50, False), (16, 50, False), (16, 50, True)]
    return [Group(cell, size, recipe, *shape) for cell in CELLS for size, recipe in formats for shape in shapes]


def ours(group: Group) -> nn.Module:
    """Our layer, frozen for inference."""
    recipe = None if group.recipe == "dense" else group.recipe
    layer = CELLS[group.cell][1](group.size, group.size, input_format=recipe, hidden_format=recipe)
    return layer if group.grad else kc.freeze(layer.eval())


def torch_int8(module: nn.Module) -> nn.Module:
    """torch's dynamic quantisation."""
    whole = nn.Sequential(module).eval()
    return torch.ao.quantization.quantize_dynamic(whole, {type(module)}, dtype=torch.qint8)


def onnx_runtime(module: nn.Module, x: Tensor, folder: Path) -> dict[str, Call]:
    """ONNX Runtime with float32 and, where it has such an operator, with its dynamic int8."""
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    given = {"x": x.numpy()}
    path, small = folder / "float.onnx", folder / "int8.onnx"
    torch.onnx.export(module.eval(), (x,), path, input_names=["x"], dynamo=False)
    files = {"ONNX Runtime": path}
    if isinstance(module, nn.LSTM):
        quantize_dynamic(path, small)
        files["ONNX Runtime int8"] = small
    sessions = {
        name: onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        for name, file in files.items()
    }
    return {name: lambda session=session: session.run(None, given) for name, session in sessions.items()}


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Time one group: seconds, and ratios of every peer over our layer."""
    torch.manual_seed(0)
    x = torch.randn(group.steps, group.batch, group.size)
    peer, layer = CELLS[group.cell][0](group.size, group.size), ours(group)
    reasons: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of quantisation and of the exporter, about themselves
        if group.grad:
            cases = {"ours": training(layer.train(), x), "torch.nn": training(peer.train(), x)}
        else:
            cases = {"ours": inference(lambda: layer(x)), "torch.nn": inference(lambda: peer(x))}
            small = torch_int8(peer)
            cases["torch int8"] = inference(lambda: small(x))
            try:
                cases |= onnx_runtime(peer, x, Path(folder))
            except ImportError as error:
                reasons["ONNX Runtime"] = str(error)
    samples = interleave(cases, 1 if quick else 15, case_seconds=0.0 if quick else 0.5)
    faster = {name: ratio(samples, name, "ours").as_dict() for name in cases if name != "ours"}
    found = {name: summary(samples[name]).as_dict() for name in cases}
    return {"title": group.title, **vars(group), "cases": found, "faster": faster, "not run": reasons}


def decode(module: Callable[..., Any], x: Tensor, one_step: bool = False) -> Callable[[], object]:
    """All steps of x by hand, from a state of zeros; `one_step` calls a layer with sequences of one step."""

    def run() -> object:
        state = None
        for t in range(len(x)):
            state = module(x[t : t + 1], state)[1] if one_step else module(x[t], state)
        return state

    return inference(run)


def decoder(group: Group, quick: bool) -> dict[str, Any]:
    """Time the ways to run a decoder: seconds, and ratios of every other way over our cell."""
    torch.manual_seed(0)
    size, recipe = group.size, None if group.recipe == "dense" else group.recipe
    layer = CELLS[group.cell][1](size, size, input_format=recipe, hidden_format=recipe)
    cell = getattr(kc, f"{group.cell}Cell")(size, size, input_format=recipe, hidden_format=recipe)
    cell.load_state_dict({name.replace("_l0", ""): tensor for name, tensor in layer.state_dict().items()})
    layer, cell = kc.freeze(layer), kc.freeze(cell)
    x = torch.randn(group.steps, group.batch, size)
    cases = {
        "cell": decode(cell, x),
        "layer, step by step": decode(layer, x, one_step=True),
        "layer, all steps": inference(lambda: layer(x)),
        "torch.nn cell": decode(getattr(nn, f"{group.cell}Cell")(size, size), x),
    }
    samples = interleave(cases, 1 if quick else 15, case_seconds=0.0 if quick else 1.0)
    over = {name: ratio(samples, name, "cell").as_dict() for name in cases if name != "cell"}
    found = {name: summary(samples[name]).as_dict() for name in cases}
    return {"title": group.title, **vars(group), "cases": found, "over the cell": over}


def run_decoders(options: Options) -> None:
    """Measure decoders of one row."""
    shapes = [(16, "lowrank:r=2", 3)] if options.quick else [
        (256, "dense", 100), (256, "lowrank:r=16", 100), (512, "kcp:K=6,CA=4,CB=4", 100), (1024, "lowrank:r=32", 100)
    ]  # fmt: skip
    results = []
    for cell in CELLS:
        for size, recipe, steps in shapes:
            group = Group(cell, size, recipe, 1, steps, False)
            options.say(f"decoder: {group.title}")
            with threads(1):
                results.append(decoder(group, options.quick))
    names = [*results[0]["over the cell"]]
    rows = []
    for result in results:
        each = 1e6 * result["cases"]["cell"]["seconds"] / result["steps"]
        rows.append((result["title"], f"{each:.1f}", *(f"{result['over the cell'][n]['seconds']:.2f}" for n in names)))
    text = f"""# Decoders by hand

{machine()}

A loop over frozen cells; the other columns are times over that of the cell in the same round: above 1, the cell is
faster; medians.

"""
    head = ("layer, batch x steps", "cell, microseconds a step", *names)
    write(options, "decoders", {"groups": results}, text + table(head, rows))


def run(options: Options) -> None:
    """Measure everything."""
    run_layers(options)
    run_decoders(options)


def run_layers(options: Options) -> None:
    """Measure every group and report."""
    results = []
    for group in groups(options.quick):
        options.say(f"recurrence: {group.title}")
        with threads(1):
            results.append(measure(group, options.quick))
    text = f"""# Recurrent layers of everyday sizes

{machine()}

Input size and hidden size are the same; W and U are in the format, `dense` is our layer without one. The columns of
peers are their time over ours in the same round: above 1, ours is faster; medians.

"""
    rows = []
    for result in results:
        cells = [f"{result['faster'][name]['seconds']:.2f}" if name in result["faster"] else "" for name in PEERS]
        rows.append((result["title"], f"{result['cases']['ours']['seconds'] * 1e3:.3f}", *cells))
    text += table(("layer, batch x steps", "ours, ms", *PEERS), rows)
    for result in results:
        text += "".join(f"\n- not run: {result['title']}: {name}: {why}\n" for name, why in result["not run"].items())
    write(options, "recurrence", {"groups": results}, text)


if __name__ == "__main__":
    main(run, __doc__, {"layers": run_layers, "decoders": run_decoders})
