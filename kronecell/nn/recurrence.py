"""The recurrence after the projection: the two cells as their equations, and the ways to run them over time.

native  torch's own kernel (cuDNN on a GPU): the projected input meets a small `weight_ih` inside it
packed  the same kernel of oneDNN with weights packed before, which torch otherwise does at every call
loop    a Python loop over projected gates, which can also keep the hidden weights factored
scan    the same cell in torch's scan operator: one node for every length, what an exported graph needs
onnx    the LSTM or GRU operator of ONNX: only in a graph that is being exported to ONNX
A further one, the compiled kernel of this package for an LSTM, is in lstm_kernel.py.
All return the output of every step and the last state, each part as (1, batch, size), as torch's modules have it.
A reversed direction is the forward one on reversed time, so packed sequences need no code of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from kronecell.ops.watched import ordinary

State = tuple[Tensor, ...]  # (h, c) of an LSTM, (h,) of a GRU; each (batch, size)
Map = Callable[[Tensor], Tensor]
Step = Callable[[Tensor, State], State]  # gates (batch, gates * H) and state -> next state; the output is state[0]


def lstm_step(gates: Tensor, state: State, hidden: Map, project: Map | None) -> State:
    """One step of nn.LSTM; `gates` is x W + b_ih, `hidden` is h -> h U + b_hh, `project` is proj_size's matrix."""
    h, c = state
    i, f, g, o = (gates + hidden(h)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if project is None else project(h), c)


def gru_step(gates: Tensor, state: State, hidden: Map, project: Map | None = None) -> State:
    """One step of nn.GRU; the reset gate acts on h U_n + b_hn, as torch has it."""
    (h,) = state
    r_x, z_x, n_x = gates.chunk(3, -1)
    r_h, z_h, n_h = hidden(h).chunk(3, -1)
    r = (r_x + r_h).sigmoid()
    z = (z_x + z_h).sigmoid()
    n = (n_x + r * n_h).tanh()
    return ((1 - z) * n + z * h,)


def _layer(state: State) -> State:
    """A last state with the axis for layers and directions that torch's modules have in front."""
    return tuple(part.unsqueeze(0) for part in state)


def run_native(
    gates: int, source: Tensor, batch_sizes: Tensor | None, state: State, weights: Sequence[Tensor], training: bool
) -> tuple[Tensor, State]:
    """torch's kernel for one layer and one direction; weights are (weight_ih, weight_hh[, biases][, weight_hr])."""
    kernel: Any = torch._VF.lstm if gates == 4 else torch._VF.gru
    stacked = [part.unsqueeze(0) for part in state]
    hx = stacked if gates == 4 else stacked[0]
    options = (len(weights) > 3, 1, 0.0, training, False)  # has_biases, num_layers, dropout, train, bidirectional
    plain = (source, hx, weights, *options, False)
    arguments = plain if batch_sizes is None else (source, batch_sizes, hx, weights, *options)
    with _no_news_about_projections() if len(weights) in (3, 5) else nullcontext():
        output, *last = kernel(*arguments)
    return output, tuple(last)


# What torch calls for an LSTM on a CPU, with the packing taken out; private to torch, so it may be absent.
_pack: Any = getattr(torch.ops.mkldnn, "_reorder_mkldnn_rnn_layer_weight", None)
_packed_kernel: Any = getattr(torch.ops.aten, "mkldnn_rnn_layer", None)
_LSTM_MODE = 2

Packed = tuple[Tensor, Tensor]


def can_pack(tensors: Sequence[Tensor]) -> bool:
    """Whether `run_packed` can take the place of `run_native` for the input, weights and state of an LSTM."""
    return (
        _pack is not None
        and _packed_kernel is not None
        and bool(torch.backends.mkldnn.enabled)
        and ordinary(tensors[0])
        and tensors[0].numel() > 0
        and all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
        and all(type(t) in (Tensor, nn.Parameter) for t in tensors)
    )


def pack(weight_ih: Tensor, weight_hh: Tensor, batch: int) -> Packed:
    """Both weights in oneDNN's order, which for a single row is another one."""
    size = [1, batch, weight_ih.shape[1]]
    first, second = _pack(weight_ih.contiguous(), weight_hh.contiguous(), weight_hh.shape[1], False, True, False, size)
    return first, second


def run_packed(source: Tensor, state: State, packed: Packed, biases: Sequence[Tensor]) -> tuple[Tensor, State]:
    """The results of `run_native`, bit for bit, for an LSTM without projection over sequences of one length."""
    h, c = state
    size = h.shape[1]
    if not biases:
        biases = [source.new_zeros(4 * size)] * 2
    # reverse, batch sizes, mode, hidden size, layers, has biases, bidirectional, batch first, train
    options: tuple[Any, ...] = (False, [], _LSTM_MODE, size, 1, True, False, False, False)
    tensors = [part.contiguous() for part in (*biases, h, c)]  # the kernel reads memory as it lies, without asking
    output, h, c, _ = _packed_kernel(source.contiguous(), *packed, *tensors, *options)
    return output, _layer((h, c))


@contextmanager
def _no_news_about_projections() -> Iterator[None]:
    """torch says once per process that oneDNN has no LSTM with projection, and uses its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")
        yield


def run_loop(step: Step, gates: Tensor, batch_sizes: Tensor | None, state: State) -> tuple[Tensor, State]:
    """The steps one by one; in a packed sequence the shortest sequences, which are last in the batch, end first."""
    outputs: list[Tensor] = []
    if batch_sizes is None:
        for gates_now in gates.unbind(0):
            state = step(gates_now, state)
            outputs.append(state[0])
        return torch.stack(outputs), _layer(state)
    ended: list[State] = []
    for gates_now in gates.split(batch_sizes.tolist()):
        running = gates_now.shape[0]
        if running < state[0].shape[0]:
            ended.append(tuple(part[running:] for part in state))
            state = tuple(part[:running] for part in state)
        state = step(gates_now, state)
        outputs.append(state[0])
    last = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))
    return torch.cat(outputs), _layer(last)


def run_scan(step: Step, gates: Tensor, state: State) -> tuple[Tensor, State]:
    """The steps as one operator of the graph, whatever the number of steps."""
    from torch._higher_order_ops.scan import scan  # imported late: it brings the compiler with it

    def combine(state: State, gates_now: Tensor) -> tuple[State, Tensor]:
        state = step(gates_now, state)
        return state, state[0].clone()  # scan forbids outputs that are the same tensor

    last, outputs = scan(combine, state, gates, dim=0)
    return outputs, _layer(last)


ONNX_GATES = {4: (0, 3, 1, 2), 3: (1, 0, 2)}  # torch's i f g o as ONNX's i o f c, torch's r z n as ONNX's z r h


def run_onnx(
    gates: int, source: Tensor, state: State, weights: Sequence[Tensor], reverse: bool
) -> tuple[Tensor, State]:
    """One LSTM or GRU node. torch's own translation of its kernel fixes the length of the example into the graph."""
    size = weights[1].shape[1]

    def reordered(weight: Tensor) -> Tensor:
        height = weight.shape[0] // gates
        return torch.cat([weight[i * height : (i + 1) * height] for i in ONNX_GATES[gates]])

    W, R, *biases = (reordered(weight) for weight in weights)
    B = torch.cat(biases).unsqueeze(0) if biases else None
    attributes: dict[str, Any] = {"hidden_size": size, "direction": "reverse" if reverse else "forward"}
    if gates == 3:
        attributes["linear_before_reset"] = 1  # the reset gate acts after the product, as in torch
    time, batch = source.shape[0], source.shape[1]
    results = torch.onnx.ops.symbolic_multi_out(
        "LSTM" if gates == 4 else "GRU",
        (source, W.unsqueeze(0), R.unsqueeze(0), B, None, *(part.unsqueeze(0) for part in state)),
        attributes,
        dtypes=[source.dtype] * (1 + len(state)),
        shapes=[(time, 1, batch, size), *[(1, batch, size)] * len(state)],
    )
    output, *last = results
    return output.squeeze(1), tuple(last)


def reversal(batch_sizes: Tensor, device: torch.device) -> Tensor:
    """Row numbers that turn every sequence of packed data round; its own inverse."""
    steps, batch = torch.arange(len(batch_sizes)), torch.arange(int(batch_sizes[0]))
    first = batch_sizes.cumsum(0) - batch_sizes  # row of the first sequence at every step
    lengths = (batch_sizes.unsqueeze(0) > batch.unsqueeze(1)).sum(1)
    t = torch.repeat_interleave(steps, batch_sizes)
    b = torch.arange(len(t)) - first[t]
    return (first[lengths[b] - 1 - t] + b).to(device)
