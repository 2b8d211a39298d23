"""What LSTM and GRU have in common: parameters named as torch.nn's, matrices W (input) and U (hidden) in any format.

x W + b for all gates and all time steps is one product before the recurrence, which is one operator for all steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence as Items
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from kronecell.errors import PlanError, ShapeError
from kronecell.formats.recipes import FormatSpecs, layer_formats
from kronecell.nn import convert
from kronecell.nn.hidden import explain_hidden, hidden_matrices, is_split, prepared_hidden
from kronecell.nn.linear import TRACED_ROWS, LayerSharing, TensorLinear, of_layer, settled_layers
from kronecell.nn.products import dense_product
from kronecell.nn.quantized import QuantizedHidden, QuantizedLinear, integer_weights
from kronecell.nn.sequences import Sequence, State, open_sequence
from kronecell.nn.torch_kernel import run_torch
from kronecell.plans.order import Tree

Self = TypeVar("Self", bound="Recurrent")
Weight = nn.Parameter | TensorLinear
Affine = tuple[Tensor | float, Tensor | float]
RECURRENCES = ("auto", "native", "loop")  # our operator; torch's kernel; our operator's reference


class Direction(NamedTuple):
    """The weights of one layer and direction: what `run_layers` needs beside x."""

    weight: Tensor | nn.Module  # W, dense or a module that maps (x, bias) to x W + bias
    bias: Tensor | None  # all biases that the gates take from the start
    hidden: Items[Tensor] | QuantizedHidden
    bias_n: Tensor | None  # of a GRU: the part of b_hh on which the reset gate acts
    project: Tensor | None


class Cell:
    """What distinguishes the cells: a recurrence over finished gates."""

    GATES: ClassVar[int]
    STATES: ClassVar[int]

    @staticmethod
    def run(
        gates: Tensor, weights: Direction, state: State, batch_sizes: Tensor | None, reverse: bool, loop: bool
    ) -> tuple[Tensor, State]:
        """All steps of one layer and direction: the output and the last state; `loop` runs the reference."""
        raise NotImplementedError


def run_layers(
    cell: type[Cell],
    layers: Items[Items[Direction]],
    sequence: Sequence,
    states: Items[State],
    dropout: float,
    recurrence: str = "auto",
    affine: Affine | None = None,
) -> tuple[Tensor | PackedSequence, Any]:
    """All layers and directions; x is projected where it lies and only then made time-major, because it may be huge."""
    x = sequence.data
    lasts: list[State] = []
    for number, directions in enumerate(layers):
        outputs = []
        for reverse, weights in enumerate(directions):
            gates = project(x, weights, affine if number == 0 else None)
            if number == 0 and sequence.batch_first:
                gates = gates.transpose(0, 1)
            state = states[len(lasts)]
            if recurrence == "native" or (recurrence == "auto" and gates.is_cuda):
                output, last = run_torch(gates, *weights[2:], state, sequence.batch_sizes, bool(reverse))
            else:
                loop = recurrence == "loop"
                output, last = cell.run(gates, weights, state, sequence.batch_sizes, bool(reverse), loop)
            outputs.append(output)
            lasts.append(last)
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        if dropout and number < len(layers) - 1:
            x = F.dropout(x, dropout)
    final = sequence.final_state(lasts)
    return sequence.close(x), final if len(final) > 1 else final[0]


def project(x: Tensor, weights: Direction, affine: Affine | None = None) -> Tensor:
    """x W + b for all gates and all rows of x; with `affine`, (scale x + shift) W + b without a copy of x."""
    if affine is not None:
        scale, shift = affine
        plain = weights._replace(bias=None)
        ones = torch.ones(1, x.shape[-1], dtype=weights.hidden[0].dtype, device=x.device)
        gates = project(x, plain) * scale + shift * project(ones, plain)
        return gates if weights.bias is None else gates + weights.bias
    if isinstance(weights.weight, nn.Module):
        missing = int(weights.weight.in_features) - x.shape[-1]  # type: ignore[arg-type]
        return weights.weight(F.pad(x, (0, missing)) if missing else x, weights.bias)
    return dense_product(x, weights.weight, weights.bias)


class Recurrent(Cell, nn.Module):
    """What LSTM and GRU have in common; the arguments are those of torch.nn's, then ours."""

    AUTOCAST_LOWERS: ClassVar[bool]  # whether torch.nn's layer gives autocast's dtype for float32 input, too
    KEEP_GATE: ClassVar[int]  # the gate whose bias makes a fresh network remember
    DENSE: ClassVar[type[nn.Module]]
    NUMBERED: ClassVar[bool] = True  # names of parameters end in the number of their layer, such as _l0

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        proj_size: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        *,
        input_format: FormatSpecs,
        hidden_format: FormatSpecs,
        shared: LayerSharing,
        hidden_shared: LayerSharing | None,
        order: str | Tree,
        forget_bias: float | None,
        pad_input: bool,
        recurrence: str,
    ) -> None:
        super().__init__()
        self.frozen: dict[str, list[str]] = {}  # names of the buffers that hold what a direction runs with; freeze.py
        self.frozen_rows: tuple[int, ...] = ()
        _check_sizes(input_size, hidden_size, num_layers, dropout, proj_size)
        if recurrence not in RECURRENCES:
            raise PlanError(f"recurrence must be one of {', '.join(RECURRENCES)}, got {recurrence!r}")
        if forget_bias is not None and not bias:
            raise ShapeError(f"forget_bias={forget_bias} needs bias=True")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout = bias, batch_first, float(dropout)
        self.bidirectional, self.proj_size, self.forget_bias = bidirectional, proj_size, forget_bias
        self.pad_input, self.order, self.recurrence = pad_input, order, recurrence
        self.shared = settled_layers(shared, num_layers)
        self.hidden_shared = self.shared if hidden_shared is None else settled_layers(hidden_shared, num_layers)
        self.directions = 2 if bidirectional else 1
        self.output_size = proj_size or hidden_size
        self.state_sizes = (self.output_size, hidden_size)[: self.STATES]  # of h and c, or of h
        directions = ("", "_reverse")[: self.directions]
        self.ends = tuple(
            tuple((f"_l{layer}" if self.NUMBERED else "") + end for end in directions) for layer in range(num_layers)
        )
        widths = [input_size] + [self.directions * self.output_size] * (num_layers - 1)
        inputs = layer_formats(input_format, [(M, hidden_size) for M in widths], "input_format", pad_input)
        hidden = layer_formats(hidden_format, [(self.output_size, hidden_size)] * num_layers, "hidden_format", False)
        self.input_formats, self.hidden_formats = (*inputs,), (*hidden,)
        if dropout and num_layers == 1:
            warnings.warn(
                f"dropout={dropout} acts between layers and does nothing with num_layers=1", UserWarning, stacklevel=3
            )
        rows = self.GATES * hidden_size
        for layer, width in enumerate(widths):
            for end in self.ends[layer]:
                factory = {"device": device, "dtype": dtype}
                for name, shape, fmt, sharing in (
                    ("weight_ih", (rows, width), inputs[layer], of_layer(self.shared, layer)),
                    ("weight_hh", (rows, self.output_size), hidden[layer], of_layer(self.hidden_shared, layer)),
                ):
                    if fmt is None:
                        weight: Weight = nn.Parameter(torch.empty(shape, **factory))  # type: ignore[arg-type]
                    else:
                        weight = nn.utils.skip_init(  # reset_parameters, below, draws with the scale of the layer
                            TensorLinear,
                            fmt,
                            bias=False,
                            order=order if name == "weight_ih" else "auto",
                            device=device or torch.get_default_device(),
                            dtype=dtype,
                            gates=self.GATES,
                            shared=sharing,
                        )
                    setattr(self, name + end, weight)
                for name in ("bias_ih", "bias_hh") if bias else ():
                    setattr(self, name + end, nn.Parameter(torch.empty(rows, **factory)))  # type: ignore[arg-type]
                if proj_size:
                    matrix = torch.empty(proj_size, hidden_size, **factory)  # type: ignore[arg-type]
                    setattr(self, "weight_hr" + end, nn.Parameter(matrix))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """torch.nn's distribution, or a random network of the same rms; dense weights are those torch.nn draws."""
        bound = 1.0 / math.sqrt(self.hidden_size)  # as torch.nn computes it, to the last bit
        for end in (end for ends in self.ends for end in ends):
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr"):
                weight = getattr(self, name + end, None)
                if isinstance(weight, TensorLinear):
                    weight.reset_parameters((3 * self.hidden_size) ** -0.5)
                elif weight is not None:
                    nn.init.uniform_(weight, -bound, bound)
            if self.forget_bias is not None:
                keep = slice(self.KEEP_GATE * self.hidden_size, (self.KEEP_GATE + 1) * self.hidden_size)
                getattr(self, "bias_ih" + end)[keep] = self.forget_bias
                getattr(self, "bias_hh" + end)[keep] = 0.0

    # Forward -----------------------------------------------------------------------------------------------------

    def forward(
        self, input: Tensor | PackedSequence, hx: Any = None, *, affine: Affine | None = None
    ) -> tuple[Tensor | PackedSequence, Any]:
        """As torch.nn's: input (time, batch, M), (batch, time, M), (time, M) or packed -> output and last state.

        With affine=(scale, shift), numbers or tensors with one for each row (such as (batch, time, 1)), the layer reads
        scale * input + shift. A large input, or one of bytes, is then not copied to be normalised.
        """
        sequence = open_sequence(input, self.input_size, self.batch_first)
        device = sequence.data.device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return self._run(sequence, hx, affine)
        lower = torch.get_autocast_dtype(device)
        start = hx if isinstance(hx, Tensor) else sequence.data  # whose dtype the state of torch's GRU keeps
        with torch.autocast(device, enabled=False):
            result = self._run(sequence, hx, affine, convert=True)
            if not self.AUTOCAST_LOWERS and start.dtype != lower:
                return result
            return _to_dtype(result, lower)

    def _run(
        self, sequence: Sequence, hx: Any, affine: Affine | None, convert: bool = False
    ) -> tuple[Tensor | PackedSequence, Any]:
        layers = self.weights()
        dtype = layers[0][0].hidden[0].dtype
        sequence = sequence.of_dtype(dtype, convert)
        states = sequence.initial_states(hx, self.num_layers * self.directions, self.state_sizes, dtype, convert)
        dropout = self.dropout if self.training else 0.0
        return run_layers(type(self), layers, sequence, states, dropout, self.recurrence, affine)

    def weights(self) -> list[list[Direction]]:
        """What every layer and direction runs with, made of the parameters; differentiable."""
        return [[self._direction(end) for end in ends] for ends in self.ends]

    def _direction(self, end: str) -> Direction:
        if self.frozen:
            bias, bias_n, project, *hidden = [self._buffers.get(name) for name in self.frozen[end]]
            return Direction(
                self._modules.get("weight_ih" + end, self._parameters.get("weight_ih" + end)),  # type: ignore[arg-type]
                bias,
                hidden or getattr(self, "weight_hh" + end).hidden(),  # type: ignore[arg-type]  # of integers
                bias_n,
                project,
            )
        biases = (getattr(self, "bias_ih" + end), getattr(self, "bias_hh" + end)) if self.bias else None
        bias, bias_n = (None, None) if biases is None else self._start_bias(*biases)
        U = hidden_matrices(getattr(self, "weight_hh" + end))
        project = getattr(self, "weight_hr" + end) if self.proj_size else None
        project = project.dense_weight() if isinstance(project, QuantizedLinear) else project
        return Direction(getattr(self, "weight_ih" + end), bias, U, bias_n, project)

    @torch.no_grad()
    def freeze_products(self, rows: Items[int]) -> None:
        """Keep what the recurrence reads of the weights as buffers; see freeze.py."""
        self.requires_grad_(False)
        names = {}
        for end in (end for ends in self.ends for end in ends):
            weights = self._direction(end)
            hidden = () if isinstance(weights.hidden, QuantizedHidden) else prepared_hidden(weights.hidden)
            held = (weights.bias, weights.bias_n, weights.project, *hidden)
            parts = ("bias", "bias_n", "project", *(f"hidden{i}" for i in range(len(hidden))))
            names[end] = [f"frozen_{part}{end}" for part in parts]
            for name, tensor in zip(names[end], held, strict=True):
                if tensor is not None:  # torch.export counts buffers that are None, and loses its way
                    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
                    self.register_buffer(name, copy, persistent=False)
            if isinstance(weights.weight, TensorLinear):
                weights.weight.freeze_products(rows)
        self.frozen = names

    def train(self: Self, mode: bool = True) -> Self:
        """As torch's; a frozen layer refuses to train."""
        if mode and self.frozen:
            raise PlanError("a frozen layer does not train: train the module that kc.freeze was called with")
        return super().train(mode)

    def _start_bias(self, b_ih: Tensor, b_hh: Tensor) -> tuple[Tensor, Tensor | None]:
        """The biases that gates take from the start, and that of a GRU's reset product."""
        raise NotImplementedError

    # Dense -------------------------------------------------------------------------------------------------------

    def to_dense(self) -> Any:
        """torch.nn's module with the same function."""
        return convert.as_dense(self)

    @classmethod
    def from_dense(
        cls: type[Self],
        trained: nn.LSTM | nn.GRU,
        *,
        input_format: FormatSpecs = None,
        hidden_format: FormatSpecs = None,
        shared: LayerSharing = False,
        hidden_shared: LayerSharing | None = None,
        order: str | Tree = "auto",
        pad_input: bool = False,
        recurrence: str = "auto",
        **fit_options: Any,
    ) -> Self:
        """The closest layer in these formats: dense parameters are copied, the others fitted by `format.from_dense`.

        `fit_options` go there; every fitted matrix keeps its relative error as `.fit_error`.
        """
        return convert.fitted(
            cls, trained, fit_options, input_format=input_format, hidden_format=hidden_format, shared=shared,
            hidden_shared=hidden_shared, order=order, pad_input=pad_input, recurrence=recurrence,
        )  # fmt: skip

    def flatten_parameters(self) -> None:
        """As torch.nn's modules have it; there is nothing to do here."""

    # Text --------------------------------------------------------------------------------------------------------

    def explain(self, rows: int = TRACED_ROWS) -> str:
        """How every matrix runs: W for this many rows of x (batch * time), U at every step."""
        parts = []
        for end in (end for ends in self.ends for end in ends):
            for name in ("weight_ih", "weight_hh"):
                weight = getattr(self, name + end)
                if isinstance(weight, QuantizedLinear):
                    text = f"dense, {weight.bits_text()}: {weight.num_weights:,} multiply-adds a row"
                elif not isinstance(weight, TensorLinear):
                    text = f"dense: {weight.numel():,} multiply-adds a row"
                else:
                    text = weight.explain(rows) if name == "weight_ih" else explain_hidden(weight)
                parts.append(f"{name}{end}\n{text}")
        return "\n\n".join(parts)

    def extra_repr(self) -> str:
        words = [f"{self.input_size}, {self.hidden_size}"]
        defaults: dict[str, Any] = {
            "num_layers": 1,
            "bias": True,
            "batch_first": False,
            "dropout": 0.0,
            "bidirectional": False,
        }
        defaults |= {"proj_size": 0, "pad_input": False, "forget_bias": None, "recurrence": "auto"}
        words += [f"{name}={getattr(self, name)}" for name, usual in defaults.items() if getattr(self, name) != usual]
        lines = [", ".join(words)]
        for layer in range(self.num_layers):
            fmt, hidden = self.input_formats[layer], self.hidden_formats[layer]
            how = ""
            if hidden is not None:
                split = is_split(getattr(self, "weight_hh" + self.ends[layer][0]))
                how = ", run as two narrow products a step" if split else ", made dense once per forward"
            number = f"layer {layer}: " if self.NUMBERED else ""
            lines.append(f"{number}W {fmt or 'dense'}, U {hidden or 'dense'}{how}")
        stored = sum(p.numel() for p in self.parameters()) + integer_weights(self)
        dense = convert.parameters_of(self)
        lines.append(f"{stored:,} parameters, {dense / stored:,.1f}x fewer than dense ({dense:,})")
        return "\n".join(lines)


def _to_dtype(result: Any, dtype: torch.dtype) -> Any:
    """Output and states in another dtype."""
    if isinstance(result, PackedSequence):
        return result.to(dtype)
    return result.to(dtype) if isinstance(result, Tensor) else tuple(_to_dtype(part, dtype) for part in result)


def _check_sizes(input_size: int, hidden_size: int, num_layers: int, dropout: float, proj_size: int) -> None:
    for name, value, least in (
        ("input_size", input_size, 1),
        ("hidden_size", hidden_size, 1),
        ("num_layers", num_layers, 1),
        ("proj_size", proj_size, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ShapeError(f"{name} must be an integer of at least {least}, got {value!r}")
    if proj_size >= hidden_size:
        raise ShapeError(f"proj_size must be smaller than hidden_size = {hidden_size}, got {proj_size}")
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
        raise ShapeError(f"dropout must be a probability from 0 to 1, got {dropout!r}")
