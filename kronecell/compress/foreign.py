"""Weights from other places: NumPy archives, ONNX graphs and Keras files, as a state dict with torch.nn's names.

Gates are put into torch's order. ONNX and HDF5 need their packages, which are imported where they are used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kronecell.errors import CheckpointError

ARCHIVES, GRAPHS, KERAS = (".npz",), (".onnx",), (".h5", ".hdf5", ".keras.h5")
SHORT = re.compile(r"^(?:(.*?)[._/])?(w|weight|b|bias)(?:_(ih|hh))?((?:_l\d+)?(?:_reverse)?)$")
# The gates of other frameworks in torch's order: i f g o of an LSTM, r z n of a GRU.
ONNX_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2)}
KERAS_GATES = {4: (0, 1, 2, 3), 3: (1, 0, 2)}


def read_archive(path: Path) -> dict[str, Tensor]:
    """A .npz: arrays by name. Short names such as enc_w_ih and fc_b become enc.weight_ih_l0 and fc.bias."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(f"{path}: cannot be read as a NumPy archive ({error})") from None
    except Exception as error:  # zipfile and zlib have errors of their own for damaged archives
        raise CheckpointError(f"{path}: is damaged ({type(error).__name__}: {error})") from None
    numbers = {name: array for name, array in arrays.items() if array.dtype.kind in "fiub"}
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in numbers.items()}
    named = {_long_name(name): tensor for name, tensor in tensors.items()}
    return named if len(named) == len(tensors) else tensors


def _long_name(name: str) -> str:
    found = SHORT.match(name)
    if not found:
        return name
    prefix, what, side, end = found.groups()
    leaf = {"w": "weight", "b": "bias"}.get(what, what)
    leaf = f"{leaf}_{side}{end or '_l0'}" if side else leaf + end
    return f"{prefix}.{leaf}" if prefix else leaf


def read_graph(path: Path) -> dict[str, Tensor]:
    """An ONNX file: LSTM, GRU, and MatMul or Gemm with a constant matrix, each under the name of its node."""
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError:
        raise CheckpointError(f"reading {path.name} needs the package onnx: pip install onnx") from None
    try:
        graph = onnx.load(str(path)).graph
    except Exception as error:  # protobuf and onnx have errors of their own
        raise CheckpointError(f"{path}: cannot be read as ONNX ({type(error).__name__})") from None
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    tensors: dict[str, Tensor] = {}
    for number, node in enumerate(graph.node):
        name = (node.name or f"{node.op_type}_{number}").strip("/").replace("/", ".")
        if node.op_type in ONNX_GATES:
            tensors |= _recurrent_node(name, node, constants, path)
        elif node.op_type in ("MatMul", "Gemm") and node.input[1] in constants and constants[node.input[1]].ndim == 2:
            weight = constants[node.input[1]]
            turned = any(a.name == "transB" and a.i for a in node.attribute)
            weight = weight if turned else weight.T
            bias = constants.get(node.input[2]) if len(node.input) > 2 else None
            tensors[f"{name}.weight"] = _tensor(weight)
            tensors[f"{name}.bias"] = _tensor(np.zeros(len(weight), weight.dtype) if bias is None else bias.reshape(-1))
    if not tensors:
        raise CheckpointError(f"{path}: no LSTM, GRU, MatMul or Gemm with constant weights is inside")
    return tensors


def _recurrent_node(name: str, node: Any, constants: Mapping[str, np.ndarray], path: Path) -> dict[str, Tensor]:
    inputs = [*node.input, "", "", ""]
    W, R, B = (constants.get(key) for key in inputs[1:4])
    if W is None or R is None:
        raise CheckpointError(f"{path}: the weights of {name} are not constants of the graph")
    order, tensors = ONNX_GATES[node.op_type], {}
    for direction in range(len(W)):
        end = "_l0" + ("_reverse" if direction else "")
        tensors[f"{name}.weight_ih{end}"] = _reordered(W[direction], order)
        tensors[f"{name}.weight_hh{end}"] = _reordered(R[direction], order)
        if B is not None:
            for side, bias in zip(("ih", "hh"), np.split(B[direction], 2), strict=True):
                tensors[f"{name}.bias_{side}{end}"] = _reordered(bias, order)
    return tensors


def read_keras(path: Path) -> dict[str, Tensor]:
    """A Keras .h5: layers with a recurrent kernel as LSTM or GRU (reset_after), with a kernel alone as Linear."""
    try:
        import h5py
    except ImportError:
        raise CheckpointError(f"reading {path.name} needs the package h5py: pip install h5py") from None
    layers: dict[str, dict[str, np.ndarray]] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            *steps, leaf = name.split("/")
            kept = [step for step in steps if step not in ("model_weights", "layers", "vars", "cell")]
            layers.setdefault(".".join(dict.fromkeys(kept)), {})[leaf.split(":")[0]] = item[()]

    try:
        with h5py.File(path, "r") as file:
            file.visititems(visit)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read as HDF5 ({error})") from None
    tensors: dict[str, Tensor] = {}
    for name, parts in layers.items():
        tensors |= _keras_layer(name, parts)
    if not tensors:
        raise CheckpointError(f"{path}: no layer with a kernel is inside")
    return tensors


def _keras_layer(name: str, parts: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    kernel, recurrent, bias = parts.get("kernel"), parts.get("recurrent_kernel"), parts.get("bias")
    if kernel is None or kernel.ndim != 2:
        return {f"{name}.{leaf}": _tensor(array) for leaf, array in parts.items() if array.dtype.kind == "f"}
    if recurrent is None:
        zeros = np.zeros(kernel.shape[1], kernel.dtype)
        return {f"{name}.weight": _tensor(kernel.T), f"{name}.bias": _tensor(zeros if bias is None else bias)}
    order = KERAS_GATES[recurrent.shape[1] // recurrent.shape[0]]
    zeros = np.zeros(kernel.shape[1], kernel.dtype)
    both = [zeros, zeros] if bias is None else [*bias] if bias.ndim == 2 else [bias, zeros]
    return {
        f"{name}.weight_ih_l0": _reordered(kernel.T, order),
        f"{name}.weight_hh_l0": _reordered(recurrent.T, order),
        f"{name}.bias_ih_l0": _reordered(both[0], order),
        f"{name}.bias_hh_l0": _reordered(both[1], order),
    }


def _reordered(array: np.ndarray, order: tuple[int, ...]) -> Tensor:
    """Blocks of rows in torch's order."""
    blocks = np.split(array, len(order))
    return _tensor(np.concatenate([blocks[i] for i in order]))


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array, order="C"))
