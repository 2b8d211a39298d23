"""Memory for intermediates that every chunk of rows, and every backward of a layer, uses again.

What is freed goes back to the system when it is at the end of the heap, and getting it again, page by page, takes
longer than the product that is written there.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

Slot = tuple[str, str]
SMALL, MANY = 2**19, 8  # elements of a buffer, and buffers, that are kept between calls: 16 MB of float32


class Space:
    """Buffers by slot. What was taken for one chunk is overwritten by the next."""

    def __init__(self) -> None:
        self._buffers: dict[Slot, Tensor] = {}
        self.brought: dict[str, Tensor] = {}  # operands of this chunk that were copied into place

    def next_chunk(self) -> Space:
        """To be called before every chunk."""
        self.brought.clear()
        return self

    def take(self, slot: Slot, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory of this shape, with anything in it; valid until the slot is taken again."""
        size = prod(shape)
        buffer = self._buffers.get(slot)
        if buffer is None or len(buffer) < size or buffer.dtype != like.dtype or buffer.device != like.device:
            buffer = self._buffers[slot] = like.new_empty(size)
        return buffer[:size].view(shape)

    def copy(self, slot: Slot, tensor: Tensor) -> Tensor:
        """The tensor, contiguous, in the memory of a slot."""
        return self.take(slot, tuple(tensor.shape), tensor).copy_(tensor)

    def keep_small(self) -> None:
        """After a call: buffers that are large, or many, are given back."""
        self.brought.clear()
        self._buffers = {slot: buffer for slot, buffer in self._buffers.items() if len(buffer) <= SMALL}
        if len(self._buffers) > MANY:
            self._buffers = {}
