"""What `kc.quantize` stored, as DequantizeLinear nodes: an ONNX file keeps integers, a byte each, and their scales.

The graph is that of the floats. Where one of its weights is what integers stand for, the integers take its place and a
node makes the same floats of them, so that everything behind it stays as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kronecell.nn.quantized import Integers, QuantizedFactor
from kronecell.ops.quantized import unpack


def keep_integers(path: Path, parts: Sequence[Integers]) -> None:
    """Rewrite an ONNX file so that it holds the integers of these matrices and factors."""
    import onnx

    model = onnx.load(path)
    wanted: dict[tuple[Any, ...], tuple[Integers, tuple[int, ...]]] = {}
    for part in parts:
        floats = _floats(part)
        for axes in permutations(range(floats.ndim)):  # the exporter permutes weights where it can; as they are first
            wanted.setdefault(_key(floats.permute(axes).contiguous().numpy()), (part, axes))
    kept, nodes = [], []
    for weight in model.graph.initializer:
        found = wanted.get(_key(onnx.numpy_helper.to_array(weight)))
        if found is None:
            kept.append(weight)
            continue
        made, more = _dequantized(weight.name, *found)
        kept += more
        nodes += made
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    rest = [*model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *rest])
    onnx.save(model, path)


def _key(values: np.ndarray) -> tuple[Any, ...]:
    return values.shape, values.dtype.str, hashlib.sha256(values.tobytes()).digest()


def _floats(part: Integers) -> Tensor:
    return (part.factor() if isinstance(part, QuantizedFactor) else part.matrix()).contiguous()


def _dequantized(name: str, part: Integers, axes: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    """Nodes that make the weight `name`, its axes in this order, and the constants that they read: scales of rows.

    Groups become rows of their own; a last group that is not full is filled with zeros, which are cut off again.
    """
    from onnx import helper, numpy_helper

    group = part.group or max(1, part.columns)
    groups = -(-part.columns // group)
    integers = unpack(part.integers, part.bits, part.columns)
    integers = torch.nn.functional.pad(integers, (0, groups * group - part.columns)).reshape(-1, group)
    constants = {"integers": integers.numpy(), "scales": part.scales.reshape(-1).numpy()}
    nodes: list[tuple[str, list[str], dict[str, Any]]] = [
        ("DequantizeLinear", [f"{name}_integers", f"{name}_scales"], {"axis": 0})
    ]

    def reshaped(shape: Sequence[int], label: str) -> None:
        constants[label] = np.array(shape, np.int64)
        nodes.append(("Reshape", [f"{name}_{label}"], {}))

    if groups > 1:
        reshaped((part.rows, groups * group), "rows")
        if groups * group > part.columns:
            constants |= {"start": np.array([0]), "end": np.array([part.columns]), "axis": np.array([1])}
            nodes.append(("Slice", [f"{name}_{label}" for label in ("start", "end", "axis")], {}))
    if isinstance(part, QuantizedFactor):
        if part.leg <= 0:
            reshaped(part.shape, "shape")
        else:
            order = [part.leg, *(leg for leg in range(len(part.shape)) if leg != part.leg)]
            reshaped([part.shape[leg] for leg in order], "shape")
            nodes.append(("Transpose", [], {"perm": [order.index(leg) for leg in range(len(order))]}))
    elif groups == 1 and integers.shape != (part.rows, part.columns):
        reshaped((part.rows, part.columns), "shape")
    if axes != tuple(range(len(axes))):
        nodes.append(("Transpose", [], {"perm": [*axes]}))
    made = []
    value = ""
    for number, (kind, inputs, attributes) in enumerate(nodes):
        target = name if number == len(nodes) - 1 else f"{name}_integers_{number}"
        made.append(helper.make_node(kind, [value, *inputs] if value else inputs, [target], **attributes))
        value = target
    return made, [numpy_helper.from_array(array, f"{name}_{label}") for label, array in constants.items()]
