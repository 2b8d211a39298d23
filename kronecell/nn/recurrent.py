"""What LSTM and GRU have in common: parameters named as torch.nn's, matrices W (input) and U (hidden) in any format.

x W for all gates and all time steps is one call before the recurrence. Where the format splits thinly (FINDINGS: M -> R
-> gates), torch's native kernel needs only x -> R, and R -> gates is its `weight_ih`; the compiled one reads gates.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from kronecell.nn import convert as dense_rnn

from kronecell.ops import lstm_kernel
from kronecell.ops.bytes import SCALE
from kronecell.errors import PlanError, ShapeError
from kronecell.formats import Shared
from kronecell.ops.kept import Kept
from kronecell.formats.recipes import FormatSpecs, layer_formats
from kronecell.nn.linear import TRACED_ROWS, TensorLinear, compute_dtype, settled
from kronecell.plans.order import Tree
from kronecell.nn.recurrence import (
    Packed,
    State,
    can_pack,
    lstm_step,
    pack,
    run_loop,
    run_native,
    run_onnx,
    run_packed,
    run_scan,
)
from kronecell.nn.sequences import Sequence, open_sequence
from kronecell.ops.watched import ordinary, unwatched

Self = TypeVar("Self", bound="Recurrent")
Weight = nn.Parameter | TensorLinear

# Measured on two CPU cores (docs/recurrent.md): an identity weight_ih costs rows * (gates H)^2 multiply-adds, a loop a
# fixed time per step. A factored U saves 1 - 1/ratio of the loop's work, densifying it is paid once per forward.
IDENTITY_LIMIT = 64  # hidden size up to which projected gates go through the native kernel with weight_ih = 1
DENSIFY_LIMIT = 384  # hidden size up to which a factored U is made dense once per forward


class NativeInput(NamedTuple):
    """What a native kernel reads, its weight_ih, and the Out it was made of: the same tensor until a factor changes."""

    source: Tensor
    weight_ih: Tensor
    out: Tensor | None = None


class Recurrent(nn.Module):
    """What LSTM and GRU have in common; the arguments are those of torch.nn's, then ours."""

    GATES: ClassVar[int]
    KEEP_GATE: ClassVar[int]  # the gate whose bias makes a fresh network remember
    DENSE: ClassVar[type[nn.LSTM] | type[nn.GRU]]
    STEP: ClassVar[Callable[..., State]]

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
        shared: Shared,
        hidden_shared: Shared | None,
        order: str | Tree,
        forget_bias: float | None,
        pad_input: bool,
        recurrence: str,
    ) -> None:
        super().__init__()
        _check_sizes(input_size, hidden_size, num_layers, dropout, proj_size)
        if recurrence not in ("auto", "native", "loop"):
            raise PlanError(f'recurrence must be "auto", "native" or "loop", got {recurrence!r}')
        if forget_bias is not None and not bias:
            raise ShapeError(f"forget_bias={forget_bias} needs bias=True")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout = bias, batch_first, float(dropout)
        self.bidirectional, self.proj_size, self.forget_bias = bidirectional, proj_size, forget_bias
        self.pad_input, self.order, self.recurrence = pad_input, order, recurrence
        self.shared = settled(shared)
        self.hidden_shared = self.shared if hidden_shared is None else settled(hidden_shared)
        self.directions = 2 if bidirectional else 1
        self.output_size = proj_size or hidden_size
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
            for direction in range(self.directions):
                end = _suffix(layer, direction)
                factory = {"device": device, "dtype": dtype}
                for name, shape, fmt, sharing in (
                    ("weight_ih", (rows, width), inputs[layer], self.shared),
                    ("weight_hh", (rows, self.output_size), hidden[layer], self.hidden_shared),
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
        self._kept = {end: Kept() for end in self._ends()}
        self.recurrences = tuple(self._choose_recurrence(layer) for layer in range(num_layers))
        self.reset_parameters()

    def _choose_recurrence(self, layer: int) -> str:
        """ "native" or "loop", from sizes alone, so that the choice can be printed."""
        if self.recurrence != "auto":
            return self.recurrence
        if self.hidden_formats[layer] is not None and self.hidden_size > DENSIFY_LIMIT:
            return "loop"
        return "native" if self._thin(layer) or self.hidden_size <= IDENTITY_LIMIT else "loop"

    def _thin(self, layer: int) -> bool:
        """Whether a native kernel can hold the end of the product x W as its weight_ih."""
        weight: Weight = getattr(self, f"weight_ih_l{layer}")
        return not isinstance(weight, TensorLinear) or weight.split(1) is not None

    def _ends(self) -> list[str]:
        """The endings of parameter names, in torch's order: _l0, _l0_reverse, _l1, ..."""
        return [_suffix(layer, direction) for layer in range(self.num_layers) for direction in range(self.directions)]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """torch.nn's distribution, or a random network of the same rms; dense weights are those torch.nn draws."""
        bound = self.hidden_size**-0.5
        for end in self._ends():
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

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Tensor | PackedSequence, Any]:
        """As torch.nn's: input (time, batch, M), (batch, time, M), (time, M) or packed -> output and last state."""
        sequence = open_sequence(input, self.input_size, self.batch_first)
        x, lasts, dtype = sequence.data, [], self._compute_dtype(sequence.data)
        states = sequence.initial_states(hx, self.num_layers * self.directions, self._state_sizes(), dtype)
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(self.directions):
                y, last = self._run(layer, direction, x, sequence, states[layer * self.directions + direction], dtype)
                outputs.append(y)
                lasts.append(last)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
            if self.dropout and layer < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        final = sequence.final_state([_joined(parts) for parts in zip(*lasts, strict=True)])
        return sequence.close(x), final if len(final) > 1 else final[0]

    def _run(
        self, layer: int, direction: int, x: Tensor, sequence: Sequence, state: State, dtype: torch.dtype
    ) -> tuple[Tensor, State]:
        """One layer, one direction. x is projected where it lies and only then made time-major: x may be huge."""
        end = _suffix(layer, direction)
        way = self._way(layer, end, x, sequence, dtype)
        x = self._padded(layer, x)
        native = self._native_input(end, x) if way in ("native", "onnx") else None
        U, bias = self._compiled_weights(end) if way == "compiled" else (None, getattr(self, "bias_ih" + end, None))
        source = self._gates(end, x, bias) if native is None else native.source
        source = sequence.time_major(source) if layer == 0 else source
        turn = direction == 1 and way != "onnx"  # ONNX's operator runs backwards by itself
        source = sequence.turned(source) if turn else source
        if U is not None:
            output, last = self._run_compiled(end, source, U, state)
        elif native is not None:
            output, last = self._run_kernel(way, end, native._replace(source=source), sequence.batch_sizes, state)
        else:
            step = partial(type(self).STEP, hidden=self._hidden_map(end, layer, state[0]), project=self._project(end))
            if way == "scan":
                output, last = run_scan(step, source, state)
            else:
                output, last = run_loop(step, source, sequence.batch_sizes, state)
        return sequence.turned(output) if turn else output, last

    def _compiled_weights(self, end: str) -> tuple[Tensor, Tensor | None]:
        """U for the kernel of this package, packed if no gradient is wanted, and b_ih + b_hh; in eval mode kept."""
        biases = self._biases(end)

        def make() -> tuple[Tensor, Tensor | None]:
            U = self._dense_hidden(end)
            bias = biases[0] + biases[1] if biases else None
            return U if torch.is_grad_enabled() else lstm_kernel.packed(U), bias

        parameters = [*self._hidden_parameters(end), *biases]
        return self._kept[end].get(("compiled", True), parameters, self.training, make)

    def _run_compiled(self, end: str, gates: Tensor, U: Tensor, state: State) -> tuple[Tensor, State]:
        """The recurrence by that kernel, which wants finished gates."""
        if not lstm_kernel.suits(gates, *state):  # they may be a subclass of tensors, too
            step = partial(lstm_step, hidden=partial(F.linear, weight=self._dense_hidden(end)), project=None)
            return run_loop(step, gates, None, state)
        if not torch.is_grad_enabled():
            output, *last = lstm_kernel.infer(gates, U, *state)
        elif any(t.requires_grad for t in (gates, U, *state)):
            output, *last = lstm_kernel.train(gates, U, *state)
        else:
            output, *last = lstm_kernel.infer(gates, lstm_kernel.packed(U), *state)
        return output, tuple(last)

    def _run_kernel(
        self, way: str, end: str, native: NativeInput, batch_sizes: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """The recurrence in one call of a kernel, or as one node of an ONNX graph."""
        biases = self._biases(end)
        if way == "native" and batch_sizes is None:
            packed = self._packed(end, native, state)
            if packed is not None:
                return run_packed(native.source, state, packed, biases)
        weights = [native.weight_ih, self._dense_hidden(end), *biases]
        weights += [getattr(self, "weight_hr" + end)] if self.proj_size else []
        if way == "onnx":
            return run_onnx(self.GATES, native.source, state, weights, end.endswith("reverse"))
        return run_native(self.GATES, native.source, batch_sizes, state, weights, self.training)

    def _packed(self, end: str, native: NativeInput, state: State) -> Packed | None:
        """The weights packed for the kernel, kept until a parameter changes; None where torch must be asked."""
        source, weight_ih, out = native
        free = not (self.training or torch.is_grad_enabled() or self.proj_size) and self.GATES == 4
        if not free or not can_pack((source, weight_ih, state[0])):
            self._kept[end].drop()
            return None
        parameters = self._hidden_parameters(end)
        if not isinstance(getattr(self, "weight_ih" + end), TensorLinear):
            parameters.append(weight_ih)
        batch = source.shape[1]
        return self._kept[end].get(
            (out, batch == 1), parameters, False, lambda: pack(weight_ih, self._dense_hidden(end), batch)
        )

    def _hidden_parameters(self, end: str) -> list[Tensor]:
        """What U is made of."""
        hidden: Weight = getattr(self, "weight_hh" + end)
        return [*hidden.factors().values()] if isinstance(hidden, TensorLinear) else [hidden]

    def flatten_parameters(self) -> None:
        """Drops what is kept of the weights: needed only after edits through `parameter.data`, which torch hides."""
        for kept in self._kept.values():
            kept.drop()
        for weight in self.children():
            if isinstance(weight, TensorLinear):
                weight.drop_kept()

    def train(self: Self, mode: bool = True) -> Self:
        """As torch's; packed weights are dropped."""
        self.flatten_parameters()
        return super().train(mode)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._kept = {end: Kept() for end in self._ends()}

    def _way(self, layer: int, end: str, x: Tensor, sequence: Sequence, dtype: torch.dtype) -> str:
        """How this call runs: as chosen at construction, unless a tracer or a dtype needs otherwise."""
        steps = sequence.steps
        if torch.compiler.is_exporting():
            has_node = torch.onnx.is_in_onnx_export() and not self.proj_size  # ONNX's LSTM has no projection
            if has_node and self._thin(layer):
                return "onnx"
            return "loop" if isinstance(steps, int) and steps == 1 else "scan"
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return "loop"  # the native kernel has no graph that the compiler could differentiate, and no batches
        if x.is_cpu and dtype not in (torch.float32, torch.float64):
            return "loop"  # products of one dtype each, as autocast has them; the kernel wants weights and state alike
        # A tracer is asked for first: it would take a look at sizes for a condition.
        plain = ordinary(x) and unwatched(x) and x.is_cpu and dtype == torch.float32
        if plain and sequence.batch_sizes is None and self.compiles(layer):
            fast = torch.is_grad_enabled() or lstm_kernel.faster(sequence.batch, self.hidden_size)
            if fast:  # the loop is for a subclass of tensors among the parameters, for example
                return "compiled" if lstm_kernel.suits(*self._hidden_parameters(end), *self._biases(end)) else "loop"
        return self.recurrences[layer]

    def compiles(self, layer: int) -> bool:
        """Whether the compiled kernel runs this layer: float32 on a CPU, sequences of one length."""
        usual = self.GATES == 4 and not self.proj_size and self.recurrence == "auto"
        return usual and self.densifies(layer) and lstm_kernel.available()

    def _compute_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of the recurrence; bytes are read by the first product, which gives numbers."""
        return compute_dtype(next(self.parameters()) if x.dtype == torch.uint8 else x)

    def _padded(self, layer: int, x: Tensor) -> Tensor:
        fmt = self.input_formats[layer]
        missing = 0 if fmt is None else fmt.M - x.shape[-1]
        return F.pad(x, (0, missing)) if missing else x

    def _native_input(self, end: str, x: Tensor) -> NativeInput:
        """x and W, x In and Out of a split, or x W and the identity."""
        weight: Weight = getattr(self, "weight_ih" + end)
        if not isinstance(weight, TensorLinear):
            return NativeInput(numbers(x, weight.dtype), weight)
        split = weight.split(TRACED_ROWS if torch.compiler.is_compiling() else x.numel() // x.shape[-1])
        if split is not None:
            source, out = weight.columns(x, split)
            return NativeInput(source, out.t(), out)
        gates = weight(x)
        return NativeInput(gates, torch.eye(gates.shape[-1], dtype=gates.dtype, device=gates.device))

    def _biases(self, end: str) -> list[Tensor]:
        """b_ih and b_hh, if there are any."""
        return [getattr(self, "bias_ih" + end), getattr(self, "bias_hh" + end)] if self.bias else []

    def _gates(self, end: str, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W + bias for all gates and all time steps."""
        weight: Weight = getattr(self, "weight_ih" + end)
        if not isinstance(weight, TensorLinear):
            return F.linear(numbers(x, weight.dtype), weight, bias)
        gates: Tensor = weight(x, bias)
        return gates

    def _dense_hidden(self, end: str) -> Tensor:
        weight: Weight = getattr(self, "weight_hh" + end)
        return weight.dense_weight() if isinstance(weight, TensorLinear) else weight

    def _hidden_map(self, end: str, layer: int, h: Tensor) -> Callable[[Tensor], Tensor]:
        """h -> h U + b_hh; what can be done once for all steps is done here."""
        weight: Weight = getattr(self, "weight_hh" + end)
        bias = getattr(self, "bias_hh" + end) if self.bias else None
        traced = torch.compiler.is_compiling()
        if not isinstance(weight, TensorLinear) or (self.densifies(layer) and not traced):
            dense = self._dense_hidden(end)
            return lambda h: F.linear(h, dense, bias)
        return weight.prepared(TRACED_ROWS if traced else h.shape[0], bias)

    def densifies(self, layer: int) -> bool:
        """Whether a compressed U of this layer is made dense once per forward."""
        return self.recurrences[layer] == "native" or self.hidden_size <= DENSIFY_LIMIT

    def _project(self, end: str) -> Callable[[Tensor], Tensor] | None:
        weight = getattr(self, "weight_hr" + end) if self.proj_size else None
        return None if weight is None else lambda h: F.linear(h, weight)

    def _state_sizes(self) -> tuple[int, ...]:
        raise NotImplementedError

    # Dense -------------------------------------------------------------------------------------------------------

    def to_dense(self) -> Any:
        """torch.nn's module with the same function."""
        return dense_rnn.as_dense(self)

    @classmethod
    def from_dense(
        cls: type[Self],
        trained: nn.LSTM | nn.GRU,
        *,
        input_format: FormatSpecs = None,
        hidden_format: FormatSpecs = None,
        shared: Shared = False,
        hidden_shared: Shared | None = None,
        order: str | Tree = "auto",
        pad_input: bool = False,
        recurrence: str = "auto",
        **fit_options: Any,
    ) -> Self:
        """The closest layer in these formats: dense parameters are copied, the others fitted by `format.from_dense`.

        `fit_options` go there; every fitted matrix keeps its relative error as `.fit_error`.
        """
        if not isinstance(trained, cls.DENSE):
            raise ShapeError(
                f"{cls.__name__}.from_dense takes a torch.nn.{cls.DENSE.__name__}, got {type(trained).__name__}"
            )
        like = next(trained.parameters())
        module = cls(
            **dense_rnn.arguments_of(trained), device=like.device, dtype=like.dtype, input_format=input_format,
            hidden_format=hidden_format, shared=shared, hidden_shared=hidden_shared, order=order, pad_input=pad_input,
            recurrence=recurrence,
        )  # fmt: skip
        dense_rnn.fit_to(module, trained, fit_options)
        return module.train(trained.training)

    # Text --------------------------------------------------------------------------------------------------------

    def extra_repr(self) -> str:
        words = [f"{self.input_size}, {self.hidden_size}"]
        defaults: dict[str, Any] = {
            "num_layers": 1,
            "bias": True,
            "batch_first": False,
            "dropout": 0.0,
            "bidirectional": False,
        }
        defaults |= {"proj_size": 0, "pad_input": False, "forget_bias": None}
        words += [f"{name}={getattr(self, name)}" for name, usual in defaults.items() if getattr(self, name) != usual]
        lines = [", ".join(words)]
        for layer in range(self.num_layers):
            fmt, hidden = self.input_formats[layer], self.hidden_formats[layer]
            like = next(self.parameters())
            here = like.dtype == torch.float32 and like.is_cpu and self.compiles(layer)
            how = ("compiled, else " if here else "") + self.recurrences[layer]
            if hidden is not None:
                how += ", U made dense once per forward" if self.densifies(layer) else ", U kept factored"
            lines.append(f"layer {layer}: W {fmt or 'dense'}, U {hidden or 'dense'}; recurrence {how}")
        stored = sum(p.numel() for p in self.parameters())
        dense = dense_rnn.parameters_of(self)
        lines.append(f"{stored:,} parameters, {dense / stored:,.1f}x fewer than dense ({dense:,})")
        return "\n".join(lines)


def numbers(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x for a dense product: bytes become numbers from 0 to 1, as the compressed products have it."""
    return x.to(dtype) * SCALE if x.dtype == torch.uint8 else x


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    """The last states of all layers and directions in one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _suffix(layer: int, direction: int) -> str:
    return f"_l{layer}" + ("_reverse" if direction else "")


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
