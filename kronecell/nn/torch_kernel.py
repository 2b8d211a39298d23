"""The recurrence by torch's own kernel (cuDNN on a GPU): for other devices than the CPU, and for comparisons."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kronecell.nn.quantized import QuantizedHidden
from kronecell.ops.sparse import dense_of

State = tuple[Tensor, ...]


def run_torch(
    gates: Tensor,
    hidden: Sequence[Tensor] | QuantizedHidden,
    bias_n: Tensor | None,
    project: Tensor | None,
    state: State,
    batch_sizes: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, State]:
    """The results of the operators lstm and gru. The kernel has a product with a weight before: the identity."""
    U = dense_hidden(hidden)
    kernel: Any = torch._VF.lstm if len(state) == 2 else torch._VF.gru
    weights = [torch.eye(gates.shape[-1], dtype=gates.dtype, device=gates.device), U]
    if bias_n is not None:
        bias = torch.cat([bias_n.new_zeros(2 * len(bias_n)), bias_n])
        weights += [torch.zeros_like(bias), bias]
    if project is not None:
        weights.append(project)
    stacked = [part.unsqueeze(0) for part in state]
    hx = stacked if len(state) == 2 else stacked[0]
    source = backwards(gates, batch_sizes) if reverse else gates
    options = (bias_n is not None, 1, 0.0, torch.is_grad_enabled(), False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")
        if batch_sizes is None:
            output, *last = kernel(source, hx, weights, *options, False)
        else:
            output, *last = kernel(source.contiguous(), batch_sizes, hx, weights, *options)
    return backwards(output, batch_sizes) if reverse else output, tuple(part.squeeze(0) for part in last)


def dense_hidden(hidden: Sequence[Tensor] | QuantizedHidden) -> Tensor:
    """U (gates * H, P) of what the operators take."""
    if isinstance(hidden, QuantizedHidden):
        return hidden.dense()
    if len(hidden) == 1:
        return hidden[0]
    In, Out, *sparse = hidden
    if Out.ndim == 2:
        U = (In.t() @ Out).t()
    else:
        gates, rank, _ = Out.shape
        U = (Out.transpose(1, 2) @ In.reshape(gates, rank, -1)).flatten(0, 1)
    return U + dense_of(sparse[0], sparse[1], *U.shape) if sparse else U


def backwards(x: Tensor, batch_sizes: Tensor | None) -> Tensor:
    """Every sequence backwards; x is time-major or packed."""
    if batch_sizes is None:
        return x.flip(0)
    return x.index_select(0, reversal(batch_sizes).to(x.device))


def reversal(batch_sizes: Tensor) -> Tensor:
    """Row numbers that reverse every sequence of packed data; its own inverse."""
    steps, batch = torch.arange(len(batch_sizes)), torch.arange(int(batch_sizes[0]))
    first = batch_sizes.cumsum(0) - batch_sizes  # row of the first sequence at every step
    lengths = (batch_sizes.unsqueeze(0) > batch.unsqueeze(1)).sum(1)
    t = torch.repeat_interleave(steps, batch_sizes)
    b = torch.arange(len(t)) - first[t]
    return first[lengths[b] - 1 - t] + b
