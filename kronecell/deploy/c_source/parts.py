"""A module taken apart: the matrices and biases of its layers, in the order in which a step runs them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kronecell.errors import CheckpointError
from kronecell.nn.linear import TensorLinear
from kronecell.nn.quantize import is_quantized
from kronecell.nn.quantized import QuantizedLinear
from kronecell.nn.recurrent import Recurrent
from kronecell.nn.rnn import GRU, LSTM

Weight = Tensor | QuantizedLinear | TensorLinear
MOST_NUMBERS = 2**24  # of an input or output: what a compressed matrix has may be more than any memory


@dataclass(frozen=True)
class Matrix:
    """y += W x: a weight in torch's layout (outputs, inputs), integers, or a tensor network."""

    name: str
    weight: Weight
    inputs: int  # of x, which a network may fill up with zeros
    outputs: int

    @property
    def padding(self) -> int:
        """Zeros behind x."""
        return self.weight.in_features - self.inputs if isinstance(self.weight, TensorLinear) else 0

    def of_ones(self) -> Tensor:
        """W times a vector of ones, in double precision."""
        if isinstance(self.weight, TensorLinear):
            layer = copy.deepcopy(self.weight)
            dense = layer.dense_weight().double()
        else:
            dense = (self.weight if isinstance(self.weight, Tensor) else self.weight.matrix()).double()
        return dense[:, : self.inputs].sum(1)


@dataclass(frozen=True)
class Layer:
    """One layer and direction of an LSTM or GRU."""

    name: str  # such as l0 or l1_reverse
    gates: int  # 4 of an LSTM, 3 of a GRU
    hidden: int
    outputs: int  # of h: fewer with a projection
    W: Matrix
    U: Matrix
    bias: Tensor | None
    bias_n: Tensor | None  # of a GRU: what its reset gate acts on
    project: Matrix | None


@dataclass(frozen=True)
class ClassifierParts:
    """What a classifier says of itself: a byte p is read as (p / 255 - mean) * gain, or every frame is normalised."""

    rnn: Recurrent
    head: nn.Module
    normalise: str  # "pixel"; "frame", or "clip": by the moments of a frame, or of all frames of a segment
    mean: float
    gain: float
    classes: tuple[str, ...]
    readout: str  # what the head reads: the "last" state, or the "mean" of all outputs


@runtime_checkable
class Classifier(Protocol):
    """A module that takes clips apart into frames of bytes and scores classes."""

    def classifier_parts(self) -> ClassifierParts: ...


@dataclass(frozen=True)
class Network:
    """What is exported: layers (each a tuple of directions), then a matrix with its bias; either may be missing."""

    module: nn.Module
    layers: tuple[tuple[Layer, ...], ...]
    head: Matrix | None
    head_bias: Tensor | None
    classifier: ClassifierParts | None
    inputs: int
    outputs: int
    bytes: bool  # x is of bytes
    quantized: bool

    @property
    def directions(self) -> int:
        """Of every layer."""
        return len(self.layers[0]) if self.layers else 1

    def matrices(self) -> Iterator[Matrix]:
        """All of them."""
        for layer in (layer for directions in self.layers for layer in directions):
            yield layer.W
            yield layer.U
            if layer.project is not None:
                yield layer.project
        if self.head is not None:
            yield self.head


def take_apart(module: nn.Module) -> Network:
    """The parts of an LSTM, a GRU, a cell, a linear layer or a classifier of clips."""
    network = _take_apart(module)
    for matrix in network.matrices():
        if max(matrix.inputs, matrix.outputs) > MOST_NUMBERS:
            raise CheckpointError(
                f"{matrix.name} has {matrix.inputs:,} inputs and {matrix.outputs:,} outputs, a C file has at most "
                f"{MOST_NUMBERS:,}; nothing was written"
            )
    return network


def _take_apart(module: nn.Module) -> Network:
    if not isinstance(module, nn.Module):
        raise CheckpointError(f"export_c takes a torch module, got {type(module).__name__}")
    module = copy.deepcopy(module).eval()
    _check(module)
    quantized = is_quantized(module)
    if isinstance(module, Classifier):
        parts = module.classifier_parts()
        if parts.rnn.bidirectional:
            raise CheckpointError(
                "a classifier that reads clips backwards, too, would have to hold a whole clip; export its recurrent "
                "layer and its linear layer one by one, or train one of a single direction"
            )
        layers = _layers(parts.rnn)
        head, bias = _linear(parts.head, "head")
        return Network(
            module, layers, head, bias, parts, parts.rnn.input_size, head.outputs, True, quantized
        )  # fmt: skip
    if type(module) in (nn.LSTM, nn.GRU):
        module = (LSTM if isinstance(module, nn.LSTM) else GRU).from_dense(module)  # type: ignore[arg-type]
        module.eval()
    if isinstance(module, Recurrent):
        outputs = module.directions * module.output_size
        return Network(module, _layers(module), None, None, None, module.input_size, outputs, False, quantized)
    if isinstance(module, (TensorLinear, nn.Linear, QuantizedLinear)):
        head, bias = _linear(module, "weight")
        return Network(module, (), head, bias, None, head.inputs, head.outputs, False, quantized)
    raise CheckpointError(
        f"export_c takes LSTM, GRU, their cells, Linear, TensorLinear and VideoClassifier, got "
        f"{type(module).__name__}; export its layers one by one"
    )


def _check(module: nn.Module) -> None:
    tensors = [*module.state_dict().items()]
    dtypes = {t.dtype for _, t in tensors if t.is_floating_point()} - {torch.float32}
    if dtypes:
        raise CheckpointError(f"export_c takes float32 modules, got {sorted(map(str, dtypes))}; call .float() first")
    where = {t.device.type for _, t in tensors} - {"cpu"}
    if where:
        raise CheckpointError(f"export_c takes modules on the CPU, got {sorted(where)}; call .cpu() first")
    for name, tensor in tensors:
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{name} has values that are not finite; nothing was written")


def _layers(rnn: Recurrent) -> tuple[tuple[Layer, ...], ...]:
    width, layers = rnn.input_size, []
    for ends, directions in zip(rnn.ends, rnn.weights(), strict=True):
        layer = []
        for end, weights in zip(ends, directions, strict=True):
            rows = rnn.GATES * rnn.hidden_size
            names = {"W": "weight_ih", "U": "weight_hh", "project": "weight_hr"}
            W = Matrix(f"W{end}", _plain(getattr(rnn, names["W"] + end)), width, rows)
            U = Matrix(f"U{end}", _plain(getattr(rnn, names["U"] + end)), rnn.output_size, rows)
            P = None
            if rnn.proj_size:
                P = Matrix(f"P{end}", _plain(getattr(rnn, names["project"] + end)), rnn.hidden_size, rnn.proj_size)
            name = end.strip("_") or "cell"
            bias, bias_n = _detached(weights.bias), _detached(weights.bias_n)
            layer.append(Layer(name, rnn.GATES, rnn.hidden_size, rnn.output_size, W, U, bias, bias_n, P))
        layers.append(tuple(layer))
        width = rnn.directions * rnn.output_size
    return tuple(layers)


def _linear(layer: nn.Module, name: str) -> tuple[Matrix, Tensor | None]:
    if isinstance(layer, (TensorLinear, QuantizedLinear)):
        return Matrix(name, _plain(layer), layer.in_features, layer.out_features), _detached(layer.bias)
    if type(layer) is not nn.Linear:
        raise CheckpointError(f"export_c knows no layer of type {type(layer).__name__}; expected a linear one")
    return Matrix(name, _plain(layer.weight), layer.in_features, layer.out_features), _detached(layer.bias)


def _plain(weight: Any) -> Weight:
    if isinstance(weight, Tensor):
        return weight.detach()
    if type(weight) not in (TensorLinear, QuantizedLinear):
        raise CheckpointError(f"export_c knows no weights of type {type(weight).__name__}; call to_dense() first")
    return weight


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def flat(parts: Sequence[Sequence[Layer]]) -> list[Layer]:
    """All layers and directions in the order of torch's states."""
    return [layer for directions in parts for layer in directions]
