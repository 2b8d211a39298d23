"""LSTM and GRU: drop-ins for torch.nn's, with the same arguments in the same order, then ours by keyword.

input_format   how W is stored: None (dense), a Format, a recipe without modes such as "kcp:K=4,CA=4,CB=2", or a list
               with one of these per layer
hidden_format  the same for U
shared         False, True (the gates share factors as the paper has it) or the names of the unshared factors, such as
               ("A1",), the paper's stricter variant; or a list with one of these per layer. hidden_shared is the
               same for U, and follows `shared` by default
order          "auto", or an order of the format for the product with x
forget_bias    the first value of the bias that makes a network remember
pad_input      allow a format with more inputs than the layer has; the rest is filled with zeros
recurrence     "auto" (this package's operator on a CPU, torch's kernel on a GPU), "native" (torch's kernel) or "loop"
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kronecell.formats.recipes import FormatSpecs
from kronecell.nn.linear import LayerSharing
from kronecell.nn.quantized import QuantizedHidden
from kronecell.nn.recurrent import Direction, Recurrent
from kronecell.nn.sequences import State
from kronecell.ops.contract import gradients_follow
from kronecell.ops.quantized import quantized_gru, quantized_lstm
from kronecell.ops.recurrence import gru, gru_reference, lstm, lstm_reference
from kronecell.plans.order import Tree


class LSTM(Recurrent):
    """torch.nn.LSTM whose input matrices W and hidden matrices U may be compressed.

    >>> rnn = LSTM(4096, 256, batch_first=True, input_format="kcp:K=4,CA=4,CB=2")
    >>> output, (h_n, c_n) = rnn(torch.zeros(2, 5, 4096))
    >>> output.shape
    torch.Size([2, 5, 256])
    """

    GATES = 4
    KEEP_GATE = 1  # f of i f g o
    DENSE = nn.LSTM
    STATES = 2
    AUTOCAST_LOWERS = True

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        input_format: FormatSpecs = None,
        hidden_format: FormatSpecs = None,
        shared: LayerSharing = False,
        hidden_shared: LayerSharing | None = None,
        order: str | Tree = "auto",
        forget_bias: float | None = None,
        pad_input: bool = False,
        recurrence: str = "auto",
    ) -> None:
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, device, dtype,
            input_format=input_format, hidden_format=hidden_format, shared=shared, hidden_shared=hidden_shared,
            order=order, forget_bias=forget_bias, pad_input=pad_input, recurrence=recurrence,
        )  # fmt: skip

    @staticmethod
    def run(
        gates: Tensor, weights: Direction, state: State, batch_sizes: Tensor | None, reverse: bool, loop: bool
    ) -> tuple[Tensor, State]:
        keep = gradients_follow()
        run = lstm_reference if loop else lstm
        h, c = state
        if isinstance(weights.hidden, QuantizedHidden):
            run = quantized_lstm.reference if loop else quantized_lstm
            output, h, c = run(gates, *weights.hidden.stored(), h, c, weights.project, batch_sizes, reverse)
            return output, (h, c)
        output, h, c, *_ = run(gates, weights.hidden, h, c, weights.project, batch_sizes, reverse, keep)
        return output, (h, c)

    def _start_bias(self, b_ih: Tensor, b_hh: Tensor) -> tuple[Tensor, Tensor | None]:
        return b_ih + b_hh, None


class GRU(Recurrent):
    """torch.nn.GRU whose input matrices W and hidden matrices U may be compressed.

    `forget_bias` is the bias of the update gate z, which keeps the old state.
    """

    GATES = 3
    KEEP_GATE = 1  # z of r z n
    DENSE = nn.GRU
    STATES = 1
    AUTOCAST_LOWERS = False

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        input_format: FormatSpecs = None,
        hidden_format: FormatSpecs = None,
        shared: LayerSharing = False,
        hidden_shared: LayerSharing | None = None,
        order: str | Tree = "auto",
        forget_bias: float | None = None,
        pad_input: bool = False,
        recurrence: str = "auto",
    ) -> None:
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, 0, device, dtype,
            input_format=input_format, hidden_format=hidden_format, shared=shared, hidden_shared=hidden_shared,
            order=order, forget_bias=forget_bias, pad_input=pad_input, recurrence=recurrence,
        )  # fmt: skip

    @staticmethod
    def run(
        gates: Tensor, weights: Direction, state: State, batch_sizes: Tensor | None, reverse: bool, loop: bool
    ) -> tuple[Tensor, State]:
        keep = gradients_follow()
        run = gru_reference if loop else gru
        (h,) = state
        if isinstance(weights.hidden, QuantizedHidden):
            run = quantized_gru.reference if loop else quantized_gru
            output, h = run(gates, *weights.hidden.stored(), weights.bias_n, h, batch_sizes, reverse)
            return output, (h,)
        output, h, *_ = run(gates, weights.hidden, weights.bias_n, h, batch_sizes, reverse, keep)
        return output, (h,)

    def _start_bias(self, b_ih: Tensor, b_hh: Tensor) -> tuple[Tensor, Tensor | None]:
        rz = 2 * self.hidden_size
        return torch.cat([b_ih[:rz] + b_hh[:rz], b_ih[rz:]]), b_hh[rz:]
