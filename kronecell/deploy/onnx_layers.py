"""Layers as an ONNX graph has them: products as MatMul, Reshape and Transpose, recurrences as LSTM, GRU or Scan nodes.

Our operators exist in no other runtime, so `export_onnx` puts these in the place of our layers before it traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronecell.nn.cells import RecurrentCell
from kronecell.nn.layer_plans import split_text
from kronecell.nn.linear import TensorLinear
from kronecell.nn.quantized import QuantizedHidden
from kronecell.nn.recurrent import Affine, Direction, Recurrent, project
from kronecell.nn.sequences import State, open_sequence
from kronecell.nn.splitting import matrices_of
from kronecell.nn.torch_kernel import dense_hidden
from kronecell.ops.engine import BYTE
from kronecell.ops.execute import plain_execute
from kronecell.ops.sparse import with_dense_part

# Multiply-adds a step that a split U saves, from which ONNX Runtime is faster with a Scan of two MatMul: for 128
# to 1,024 units: a step of Scan costs as much more than one of a node as about 130,000 multiply-adds (docs/deploy.md).
WORTH_A_SCAN = 2**17
GATE_ORDERS = {4: (0, 3, 1, 2), 3: (1, 0, 2)}  # torch's i f g o as ONNX's i o f c, torch's r z n as ONNX's z r h


class OnnxLinear(nn.Module):
    """A TensorLinear in operations of torch alone; with a bias given, that one is added."""

    def __init__(self, layer: TensorLinear) -> None:
        super().__init__()
        self.layer = layer
        self.in_features = layer.in_features
        with torch.no_grad():
            self.plan = layer.plan(128)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = plain_execute(self.plan, x, self.layer.factors(), self.layer.bias if bias is None else bias)
        return y if self.layer.sparse is None else y + x @ self.layer.sparse.dense().t()


class OnnxRecurrent(nn.Module):
    """An LSTM or GRU: one node of that kind where x W ends in a matrix that the node can hold, else a Scan.

    With `streaming`, a single step is written out.
    """

    def __init__(self, module: Recurrent, streaming: bool) -> None:
        super().__init__()
        self.module, self.streaming = module, streaming

    def forward(self, input: Tensor, hx: Any = None, *, affine: Affine | None = None) -> tuple[Tensor, Any]:
        module = self.module
        if affine is not None:
            scale, shift = affine
            unit = BYTE if input.dtype == torch.uint8 else 1.0
            input = input.to(next(module.parameters()).dtype) * (unit * scale) + shift
        sequence = open_sequence(input, module.input_size, module.batch_first)
        directions = module.directions
        dtype = next(module.parameters()).dtype
        states = sequence.initial_states(hx, module.num_layers * directions, module.state_sizes, dtype)
        x = sequence.data
        lasts: list[State] = []
        for number, layer in enumerate(module.weights()):
            outputs = []
            for reverse, weights in enumerate(layer):
                state = states[len(lasts)]
                time_first = not (number == 0 and sequence.batch_first)
                output, last = self._run(x, weights, state, bool(reverse), time_first)
                outputs.append(output)
                lasts.append(last)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        final = sequence.final_state(lasts)
        return sequence.close(x), final if len(final) > 1 else final[0]  # type: ignore[return-value]

    def _run(
        self, x: Tensor, weights: Direction, state: State, reverse: bool, time_first: bool
    ) -> tuple[Tensor, State]:
        W = weights.weight
        by_step = weights.project is not None or self.streaming or narrow_pays(weights.hidden)
        held = None if by_step else _node_input(x, W)
        if held is not None:
            source, weight = held
            source = source if time_first else source.transpose(0, 1)
            return _node(self.module.GATES, source, weight, weights, state, reverse)
        module = OnnxLinear(W) if isinstance(W, TensorLinear) else W
        gates = project(x, weights._replace(weight=module))
        gates = gates if time_first else gates.transpose(0, 1)
        if self.streaming:
            output, last = step(gates[0], weights, state, self.module.GATES)
            return output.unsqueeze(0), last
        gates = gates.flip(0) if reverse else gates
        output, last = _scan(gates, weights, state, self.module.GATES)
        return output.flip(0) if reverse else output, last


class OnnxCell(nn.Module):
    """An LSTMCell or GRUCell: its step written out."""

    def __init__(self, module: RecurrentCell) -> None:
        super().__init__()
        self.module = module

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        [[weights]] = self.module.weights()
        rows, state = self.module.opened(input, hx, weights.hidden[0].dtype)
        W = OnnxLinear(weights.weight) if isinstance(weights.weight, TensorLinear) else weights.weight
        gates = project(rows, weights._replace(weight=W))
        return self.module.closed(input, step(gates, weights, state, self.module.GATES)[1])


def narrow_pays(hidden: Sequence[Tensor] | QuantizedHidden) -> bool:
    """Whether two narrow products in a Scan take less time than a dense one in an LSTM or GRU node."""
    if isinstance(hidden, QuantizedHidden) or len(hidden) != 2:  # dense, or with a sparse part
        return False
    In, Out = hidden
    between, outputs = In.shape[0], Out.shape[-1] * (Out.shape[0] if Out.ndim == 3 else 1)
    return In.shape[1] * outputs - between * (In.shape[1] + outputs) >= WORTH_A_SCAN


def _node_input(x: Tensor, W: Tensor | nn.Module) -> tuple[Tensor, Tensor] | None:
    """What an LSTM or GRU node reads, and its weight: x and W, or x In and Out; None where W does not split."""
    if not isinstance(W, TensorLinear):
        assert isinstance(W, Tensor)
        return x, W
    split = split_text(W.matrix)
    if split is None or not split.narrow or W.sparse is not None:
        return None
    missing = W.in_features - x.shape[-1]
    x = F.pad(x, (0, missing)) if missing else x
    In, Out = matrices_of(split, W.factors())
    if Out.ndim == 3:  # every gate has columns of its own: Out is block diagonal
        Out = torch.block_diag(*Out)
    return x @ In.t(), Out.t()


def _node(
    gates: int, source: Tensor, weight: Tensor, weights: Direction, state: State, reverse: bool
) -> tuple[Tensor, State]:
    """One LSTM or GRU node. torch's own translation of its kernel fixes the length of the example into the graph."""
    U = dense_hidden(weights.hidden)
    size = U.shape[1]

    def reordered(matrix: Tensor) -> Tensor:
        height = matrix.shape[0] // gates
        return torch.cat([matrix[i * height : (i + 1) * height] for i in GATE_ORDERS[gates]])

    B = None
    if weights.bias is not None:
        other = torch.zeros_like(weights.bias)
        if weights.bias_n is not None:
            other = torch.cat([other[: 2 * size], weights.bias_n])
        B = torch.cat([reordered(weights.bias), reordered(other)]).unsqueeze(0)
    attributes: dict[str, Any] = {"hidden_size": size, "direction": "reverse" if reverse else "forward"}
    if gates == 3:
        attributes["linear_before_reset"] = 1  # the reset gate acts after the product, as in torch
    time, batch = source.shape[0], source.shape[1]
    matrices = (reordered(weight).unsqueeze(0), reordered(U).unsqueeze(0))
    results = torch.onnx.ops.symbolic_multi_out(
        "LSTM" if gates == 4 else "GRU",
        (source, *matrices, B, None, *(part.unsqueeze(0) for part in state)),
        attributes,
        dtypes=[source.dtype] * (1 + len(state)),
        shapes=[(time, 1, batch, size), *[(1, batch, size)] * len(state)],
    )
    output, *last = results
    return output.squeeze(1), tuple(part.squeeze(0) for part in last)


def _scan(gates: Tensor, weights: Direction, state: State, count: int) -> tuple[Tensor, State]:
    """The steps as one operator of the graph, whatever the number of steps."""
    from torch._higher_order_ops.scan import scan  # imported late: it imports the compiler

    hidden = weights.hidden
    if not isinstance(hidden, QuantizedHidden) and len(hidden) > 1:
        # Not in the steps: a scan does not take views of what it reads, and a sparse part is made dense once.
        In, Out = hidden[:2]
        Out = torch.block_diag(*Out) if Out.ndim == 3 else Out
        weights = weights._replace(hidden=[In, Out, *with_dense_part(hidden, Out.shape[1], In.shape[1])[2:]])

    def combine(state: State, gates_now: Tensor) -> tuple[State, Tensor]:
        output, state = step(gates_now, weights, state, count)
        return state, output.clone()  # scan forbids outputs that are the same tensor

    last, outputs = scan(combine, state, gates, dim=0)
    return outputs, last


def step(gates: Tensor, weights: Direction, state: State, count: int) -> tuple[Tensor, State]:
    """One step of the cell over finished gates: the output, and the next state."""
    sums = _times_hidden(state[0], weights.hidden)
    if count == 4:
        h, c = state
        i, f, g, o = (gates + sums).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        h = h if weights.project is None else h @ weights.project.t()
        return h, (h, c)
    (h,) = state
    r_x, z_x, n_x = gates.chunk(3, -1)
    r_h, z_h, n_h = sums.chunk(3, -1)
    n_h = n_h if weights.bias_n is None else n_h + weights.bias_n
    r, z = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
    n = (n_x + r * n_h).tanh()
    h = n + z * (h - n)
    return h, (h,)


def _times_hidden(h: Tensor, hidden: Sequence[Tensor] | QuantizedHidden) -> Tensor:
    if isinstance(hidden, QuantizedHidden):
        return h @ hidden.dense().t()
    if len(hidden) == 1:
        return h @ hidden[0].t()
    In, Out, *sparse = hidden
    Out = Out if Out.ndim == 2 else torch.block_diag(*Out)
    sums = h @ In.t() @ Out
    return sums + h @ with_dense_part(hidden, Out.shape[1], In.shape[1])[2].t() if sparse else sums
