"""LSTMCell and GRUCell: drop-ins for torch.nn's, for decoders and controllers that take one step at a time.

The arguments are torch.nn's in their order, then those of this package's LSTM and GRU by keyword. A cell is a layer of
one direction whose sequences have one step: it runs the same product with W and the same operator for the rest.

Products of weights are computed at every step, U is made dense or split at every step, too: `kc.freeze` holds them for
inference. To train on known inputs, a layer makes them once for all steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kronecell.errors import ShapeError
from kronecell.formats import Shared
from kronecell.formats.recipes import FormatSpec
from kronecell.nn import convert
from kronecell.nn.recurrent import Direction, Recurrent, Self, project
from kronecell.nn.rnn import GRU, LSTM
from kronecell.nn.sequences import State
from kronecell.plans.order import Tree


class RecurrentCell(Recurrent):
    """What the cells have in common."""

    NUMBERED = False

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        input_format: FormatSpec = None,
        hidden_format: FormatSpec = None,
        shared: Shared = False,
        hidden_shared: Shared | None = None,
        order: str | Tree = "auto",
        forget_bias: float | None = None,
        pad_input: bool = False,
    ) -> None:
        super().__init__(
            input_size, hidden_size, 1, bias, False, 0.0, False, 0, device, dtype, input_format=input_format,
            hidden_format=hidden_format, shared=shared, hidden_shared=hidden_shared, order=order,
            forget_bias=forget_bias, pad_input=pad_input, recurrence="auto",
        )  # fmt: skip

    def forward(self, input: Tensor, hx: Any = None) -> Any:  # type: ignore[override]
        """As torch.nn's: input (batch, M) or (M,) and the state of the same form, zeros if None -> the next state."""
        if not isinstance(input, Tensor) or input.ndim not in (1, 2):
            got = f"{input.ndim}-D" if isinstance(input, Tensor) else type(input).__name__
            raise ShapeError(f"input must be a 1-D or 2-D tensor, got {got}")
        if input.shape[-1] != self.input_size:
            raise ShapeError(f"input has the wrong width: expected (..., {self.input_size}), got {tuple(input.shape)}")
        device = input.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self._converted_step(input, hx)
        return self._step(input, hx, self._direction(""))

    def _converted_step(self, input: Tensor, hx: Any) -> Any:
        """Under autocast: computed in the dtype of the parameters, returned in that of the state or, without, of x.

        These are torch.nn's dtypes.
        """
        weights = self._direction("")
        dtype = weights.hidden[0].dtype
        state = () if hx is None else (hx,) if isinstance(hx, Tensor) else tuple(hx)
        like = (state or (input,))[0].dtype
        x = input if input.dtype == torch.uint8 else input.to(dtype)
        result = self._step(x, tuple([part.to(dtype) for part in state]) or None, weights)
        like = like if like.is_floating_point else dtype
        return tuple([part.to(like) for part in result]) if isinstance(result, tuple) else result.to(like)

    def _step(self, x: Tensor, hx: Any, weights: Direction) -> Any:
        dtype = weights.hidden[0].dtype
        if x.dtype not in (dtype, torch.uint8):
            raise ShapeError(
                f"input has dtype {x.dtype}, the parameters {dtype}; convert one with .to(...) (uint8 is fine)"
            )
        rows, state = self.opened(x, hx, dtype)
        gates = project(rows, weights).unsqueeze(0)  # one step of time
        return self.closed(x, self.run(gates, weights, state, None, False, False)[1])

    def opened(self, x: Tensor, hx: Any, dtype: torch.dtype) -> tuple[Tensor, State]:
        """x as (batch, M), h (and c) as (batch, H)."""
        rows = x if x.ndim == 2 else x.unsqueeze(0)
        if hx is None:
            return rows, tuple([x.new_zeros(rows.shape[0], self.hidden_size, dtype=dtype) for _ in self.state_sizes])
        state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        if len(state) != self.STATES:
            raise ShapeError(f"hx must be {'(h, c)' if self.STATES == 2 else 'h'}, got {len(state)} tensor(s)")
        expected = (*x.shape[:-1], self.hidden_size)
        for name, part in zip(("h", "c"), state, strict=False):
            if part.shape != expected:
                raise ShapeError(f"{name} has the wrong shape: expected {expected}, got {tuple(part.shape)}")
            if part.dtype != dtype:
                raise ShapeError(f"{name} has dtype {part.dtype}, the parameters {dtype}; convert it with .to(...)")
        return rows, state if x.ndim == 2 else tuple([part.unsqueeze(0) for part in state])

    def closed(self, x: Tensor, state: State) -> Any:
        """The next state in the form that x had."""
        parts = state if x.ndim == 2 else tuple([part.squeeze(0) for part in state])
        return parts if len(parts) > 1 else parts[0]

    @classmethod
    def from_dense(  # type: ignore[override]
        cls: type[Self],
        trained: nn.LSTMCell | nn.GRUCell,
        *,
        input_format: FormatSpec = None,
        hidden_format: FormatSpec = None,
        shared: Shared = False,
        hidden_shared: Shared | None = None,
        order: str | Tree = "auto",
        pad_input: bool = False,
        **fit_options: Any,
    ) -> Self:
        """The closest cell in these formats, as of a layer: dense parameters are copied, the others fitted."""
        return convert.fitted(
            cls, trained, fit_options, input_format=input_format, hidden_format=hidden_format, shared=shared,
            hidden_shared=hidden_shared, order=order, pad_input=pad_input,
        )  # fmt: skip


class LSTMCell(RecurrentCell):
    """torch.nn.LSTMCell whose input matrix W and hidden matrix U may be compressed.

    >>> cell = LSTMCell(4096, 256, input_format="kcp:K=4,CA=4,CB=2", hidden_format="lowrank:r=16")
    >>> h, c = cell(torch.zeros(2, 4096))
    >>> h, c = cell(torch.zeros(2, 4096), (h, c))
    >>> h.shape, c.shape
    (torch.Size([2, 256]), torch.Size([2, 256]))
    """

    GATES, STATES, KEEP_GATE, DENSE = LSTM.GATES, LSTM.STATES, LSTM.KEEP_GATE, nn.LSTMCell
    run = staticmethod(LSTM.run)
    _start_bias = LSTM._start_bias


class GRUCell(RecurrentCell):
    """torch.nn.GRUCell whose input matrix W and hidden matrix U may be compressed.

    >>> cell = GRUCell(4096, 256, hidden_format="lowrank:r=16")
    >>> cell(torch.zeros(4096)).shape
    torch.Size([256])
    """

    GATES, STATES, KEEP_GATE, DENSE = GRU.GATES, GRU.STATES, GRU.KEEP_GATE, nn.GRUCell
    run = staticmethod(GRU.run)
    _start_bias = GRU._start_bias
