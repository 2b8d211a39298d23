"""Memory for intermediates that every chunk of rows, and every call of a layer, uses again.

What is freed goes back to the system when it is at the end of the heap, and getting it again, page by page, takes
longer than the product that is written there.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

Slot = tuple[str, str]
KEPT_BYTES = 20 * 2**20  # of all buffers of a space that are kept between calls
LEARNING_BYTES = 128 * 2**20  # the same in training, where memory is wanted again at the next step

_owners: Any = getattr(torch._C, "_storage_Use_Count", None)  # private to torch, so it may be absent
ALONE = 2  # owners of memory that one tensor has: the tensor, and the storage by which it is asked for


class Space:
    """Buffers by slot. What was taken for one chunk is overwritten by the next.

    Calls of other layers have other slots. These get the buffers in the order in which they are first taken, so that
    all layers share them.
    """

    def __init__(self) -> None:
        self._places: dict[Slot, int] = {}  # of this call, among the buffers
        self._buffers: list[Tensor | None] = []
        self.brought: dict[str, Tensor] = {}  # operands of this chunk that were copied into place

    def next_chunk(self) -> Space:
        """To be called before every chunk."""
        self.brought.clear()
        return self

    def take(self, slot: Slot, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory of this shape, with anything in it; valid until the slot is taken again."""
        size, place = prod(shape), self._places.setdefault(slot, len(self._places))
        if place == len(self._buffers):
            self._buffers.append(None)
        buffer = self._buffers[place]
        if buffer is None or buffer.numel() < size or buffer.dtype != like.dtype or buffer.device != like.device:
            buffer = self._buffers[place] = None  # given back before more is asked for
            buffer = self._buffers[place] = like.new_empty(size)
        part = buffer if buffer.numel() == size else buffer[:size]
        return part if len(shape) == 1 else part.view(shape)

    def copy(self, slot: Slot, tensor: Tensor) -> Tensor:
        """The tensor, contiguous, in the memory of a slot."""
        return self.take(slot, tuple(tensor.shape), tensor).copy_(tensor)

    def keep_some(self, learning: bool = False) -> None:
        """At the end of a call: the largest buffers are given back, until those that are left may be kept."""
        self.brought.clear()
        self._places.clear()
        sizes = [0 if buffer is None else buffer.nbytes for buffer in self._buffers]
        total = sum(sizes)
        while total > (LEARNING_BYTES if learning else KEPT_BYTES):
            largest = max(range(len(sizes)), key=sizes.__getitem__)
            total -= sizes[largest]
            sizes[largest], self._buffers[largest] = 0, None


class Lender(Space):
    """Buffers for what autograd keeps until the backward; they are lent again when nobody has them any more."""

    def __init__(self) -> None:
        super().__init__()
        self._lent: list[Tensor] = []  # never more than may be kept

    def take(self, slot: Slot, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory of this shape, with anything in it; valid as long as the tensor lives."""
        size = prod(shape)
        free = [buffer for buffer in self._lent if _owners(buffer.untyped_storage()._cdata) == ALONE]
        for buffer in free:
            if size <= buffer.numel() <= 2 * size and buffer.dtype == like.dtype and buffer.device == like.device:
                return (buffer if buffer.numel() == size else buffer[:size]).view(shape)
        fresh = like.new_empty(size)
        if _owners is None or fresh.nbytes > LEARNING_BYTES:
            return fresh.view(shape)
        total = fresh.nbytes + sum(buffer.nbytes for buffer in self._lent)
        while free and total > LEARNING_BYTES:
            given_back = free.pop(0)
            total -= given_back.nbytes
            self._lent = [buffer for buffer in self._lent if buffer is not given_back]
        if total <= LEARNING_BYTES:
            self._lent.append(fresh)
        return fresh.view(shape)
