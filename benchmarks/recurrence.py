"""Recurrent layers of everyday sizes, W and U compressed: beside torch.nn, its dynamic int8 and ONNX Runtime.

    python -m benchmarks.recurrence [--quick] [--results FOLDER]

Inference is of frozen modules. A training step is forward, the sum of the outputs, and backward to all parameters. A
dense layer of ours stands beside torch.nn's: what a layer costs whose U cannot be compressed well. One thread.
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


def run(options: Options) -> None:
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
    main(run, __doc__)
