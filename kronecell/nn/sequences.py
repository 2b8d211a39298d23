"""What torch.nn's recurrent modules accept, converted to one form and back: plain, batch first, unbatched, packed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from kronecell.errors import ShapeError

State = tuple[Tensor, ...]  # (h, c) of an LSTM, (h,) of a GRU; each (batch, size)


class Sequence(NamedTuple):
    """`data` is (time, batch, M), (batch, time, M) when batch_first, or packed (rows, M) when batch_sizes is given."""

    data: Tensor
    batch: int
    batch_first: bool = False
    unbatched: bool = False
    batch_sizes: Tensor | None = None
    sorted_indices: Tensor | None = None
    unsorted_indices: Tensor | None = None

    def of_dtype(self, dtype: torch.dtype, convert: bool) -> Sequence:
        """The same in the dtype of the parameters: converted, or refused where it has another. Bytes stay bytes."""
        if self.data.dtype in (dtype, torch.uint8):
            return self
        if not convert:
            raise ShapeError(
                f"input has dtype {self.data.dtype}, the parameters {dtype}; convert one with .to(...) (uint8 is fine)"
            )
        return self._replace(data=self.data.to(dtype))

    def initial_states(
        self, hx: Any, count: int, sizes: tuple[int, ...], dtype: torch.dtype, convert: bool = False
    ) -> list[State]:
        """h_0 (and c_0), (batch, size), of `count` layers and directions, in the order of `data`; zeros without hx.

        Those of another dtype are converted or refused.
        """
        if hx is None:
            return [tuple([self.data.new_zeros(self.batch, size, dtype=dtype) for size in sizes])] * count
        pair = len(sizes) == 2
        parts = tuple(hx) if pair and isinstance(hx, (tuple, list)) else (hx,)
        if len(parts) != len(sizes) or not all(isinstance(part, Tensor) for part in parts):
            got = f"{len(parts)} of {type(parts[0]).__name__}" if parts else "nothing"
            raise ShapeError(f"hx must be {'the tensors (h_0, c_0)' if pair else 'the tensor h_0'}, got {got}")
        for name, part, size in zip(("h_0", "c_0"), parts, sizes, strict=False):
            expected = (count, size) if self.unbatched else (count, self.batch, size)
            if tuple(part.shape) != expected:
                raise ShapeError(f"{name} has the wrong shape: expected {expected}, got {tuple(part.shape)}")
            if part.dtype != dtype and not convert:
                raise ShapeError(f"{name} has dtype {part.dtype}, the parameters {dtype}; convert it with .to(...)")
        if convert:
            parts = tuple([part.to(dtype) for part in parts])
        if self.unbatched:
            parts = tuple(part.unsqueeze(1) for part in parts)
        if self.sorted_indices is not None:
            parts = tuple(part.index_select(1, self.sorted_indices) for part in parts)
        return [tuple(part[i] for part in parts) for i in range(count)]

    def final_state(self, lasts: Iterable[State]) -> State:
        """h_n (and c_n) of all layers and directions in the user's order."""
        states = [*lasts]
        if len(states) == 1:
            parts = [part.unsqueeze(0) for part in states[0]]
        else:
            parts = [torch.stack(last) for last in zip(*states, strict=True)]
        if self.unsorted_indices is not None:
            return tuple([part.index_select(1, self.unsorted_indices) for part in parts])
        return tuple([part.squeeze(1) for part in parts]) if self.unbatched else tuple(parts)

    def close(self, output: Tensor) -> Tensor | PackedSequence:
        """The output of the last layer in the form the input had."""
        if self.batch_sizes is not None:
            return PackedSequence(output, self.batch_sizes, self.sorted_indices, self.unsorted_indices)
        if self.unbatched:
            return output.squeeze(1)
        return output.transpose(0, 1) if self.batch_first else output


def open_sequence(input: Tensor | PackedSequence, width: int, batch_first: bool) -> Sequence:
    """Check an input and say what it is."""
    if isinstance(input, PackedSequence):
        if input.data.shape[-1] != width:
            raise ShapeError(f"input has the wrong width: expected (..., {width}), got {tuple(input.data.shape)}")
        batch = int(input.batch_sizes[0])
        return Sequence(
            input.data,
            batch,
            batch_sizes=input.batch_sizes,
            sorted_indices=input.sorted_indices,
            unsorted_indices=input.unsorted_indices,
        )
    if not isinstance(input, Tensor) or input.ndim not in (2, 3):
        got = f"{input.ndim}-D" if isinstance(input, Tensor) else type(input).__name__
        raise ShapeError(f"input must be a 2-D or 3-D tensor or a PackedSequence, got {got}")
    if input.shape[-1] != width:
        raise ShapeError(f"input has the wrong width: expected (..., {width}), got {tuple(input.shape)}")
    if not torch.compiler.is_compiling() and input.shape[1 if batch_first and input.ndim == 3 else 0] == 0:
        raise ShapeError(f"input has no time steps: expected at least one, got {tuple(input.shape)}")
    if input.ndim == 2:
        return Sequence(input.unsqueeze(1), 1, unbatched=True)
    return Sequence(input, input.shape[0 if batch_first else 1], batch_first=batch_first)
