"""The first product with uint8 input: bytes become numbers a few rows at a time, and no float copy of x is kept.

Where the compiled kernels suit, they do that in registers; else it is done here, chunk by chunk.

A byte b stands for b / 255, as everywhere in imaging; the division is folded into the small operand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kronecell.ops.narrow import both_compiled, kernel, narrow, narrow_gradient
from kronecell.ops.operation import Op
from kronecell.ops.processor import LANES
from kronecell.ops.watched import autocast_off

# Unless SHARE asks for more, the numbers of a chunk stay in a core's cache; with narrow registers the kernel for few
# columns, which wants more of them at a time, gains more than the next cache loses.
CHUNK_ELEMENTS = 2**18 if LANES == 16 else 2**20
SHARE = 4  # a chunk has at least so many elements for one of the other operand, which is read again for every chunk
SCALE = 1 / 255


def byte_product(x: Tensor, small: Tensor, op: Op) -> Tensor:
    """op(x / 255, small) for x (rows, M) of bytes and `small` laid out; differentiable in that any number of times."""
    return _ByteProduct.apply(x, small * SCALE, op)


def read_as_they_lie(x: Tensor, small: Tensor, op: Op) -> bool:
    """Whether a compiled kernel makes the product of the bytes themselves."""
    return _as_they_lie(op) and kernel(op.a(x), small) == "compiled"


def _chunks(x: Tensor, small: Tensor) -> list[Tensor]:
    """As few rows each as have so many elements."""
    return [*x.split(-(-max(CHUNK_ELEMENTS, SHARE * small.numel()) // x.shape[1]))]


def _as_they_lie(op: Op) -> bool:
    """Whether the product is one that a kernel may make of the bytes as they are."""
    return op.narrow and op.a.permutation is None


class _ByteProduct(torch.autograd.Function):
    """Saves the bytes, not the floats; the backward converts them again, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, small: Tensor, op: Op) -> Tensor:
        ctx.save_for_backward(x, small)
        ctx.op = op
        if read_as_they_lie(x, small, op):
            return narrow(op.a(x), small)
        parts = _chunks(x, small)
        buffer = torch.empty(parts[0].shape, dtype=small.dtype, device=small.device)  # one for all: no fresh memory
        first = op.product(buffer.copy_(parts[0]), small)
        if len(parts) == 1:
            return first
        each = len(first) // len(parts[0])
        result = first.new_empty(len(x) * each, *first.shape[1:])
        result[: len(first)] = first
        done = len(first)
        for part in parts[1:]:
            op.product_into(buffer[: len(part)].copy_(part), small, result[done : done + len(part) * each])
            done += len(part) * each
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None]:
        x, small = ctx.saved_tensors
        (gradient,) = gradients
        if not ctx.needs_input_grad[1]:
            return None, None, None
        total: Tensor | None = None
        each, start = len(gradient) // max(1, len(x)), 0  # rows of the result that a row of x makes
        with autocast_off(gradient):  # the dtype was settled in the forward
            if _as_they_lie(ctx.op) and both_compiled(ctx.op.a(x), gradient, gradient.shape[-1]):
                return None, narrow_gradient(ctx.op.a(x), gradient), None
            for part in _chunks(x, small):
                stop = start + each * len(part)
                total = ctx.op.small_gradient(part.to(small.dtype), gradient[start:stop], total)
                start = stop
        return None, total, None
