"""The recurrence of an LSTM by the compiled kernel of native/lstm.c, for autograd one operation.

It reads finished gates, x W + b, and a dense U. What the gradient needs are further results of the operation, which
nobody else sees: so the backward can be made of differentiable operations where its own gradient is wanted.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from kronecell.ops import compiled
from kronecell.ops.processor import LANES
from kronecell.ops.space import Space
from kronecell.ops.watched import autocast_off, numbers, ordinary

ROWS_OF_A_THREAD = 4  # of the batch, at least: every thread reads all of U
WORTH_A_THREAD = 2**20  # multiply-adds
LARGE = 512  # hidden size from which U is read so slowly that threads are worth it even for a single row
MOST_ROWS = 480  # steps times batch, in the gradient of U: two of its sums; for longer ones BLAS is as good

Gradient = Tensor | None


def available() -> bool:
    """Whether the kernel is built, and for registers as wide as those it was measured with."""
    return compiled.library is not None and LANES != 4


def suits(*tensors: Tensor) -> bool:
    """Whether these are float32 numbers in memory, and nobody wants to know what is done with them."""
    return ordinary(tensors[0]) and numbers(*tensors)


def faster(batch: int, hidden: int) -> bool:
    """Whether the kernel is faster than oneDNN's with weights packed before, which divides U among threads."""
    return hidden < LARGE or batch >= 2 * ROWS_OF_A_THREAD or torch.get_num_threads() == 1


def packed(weight: Tensor, backward: bool = False, space: Space | None = None) -> Tensor:
    """U (4H, H) in the order in which the kernel reads it, forward or backward."""
    hidden = weight.shape[1]
    size = compiled.library.lstm_packed(hidden, backward)
    result = weight.new_empty(size) if space is None else space.take(("packed", ""), (size,), weight)
    weight = weight.contiguous()
    compiled.library.lstm_pack(weight.data_ptr(), result.data_ptr(), hidden, backward)
    return result


class _Scratch(threading.local):
    """In training U is packed for one call only, in the same memory every time."""

    def __init__(self) -> None:
        self.space = Space()


_scratch = _Scratch()


def infer(gates: Tensor, U: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output (time, batch, H) and the last h and c, (1, batch, H), without a gradient; U is packed."""
    last_c = c.new_empty(1, *c.shape)
    out, last_h = _forward(gates, U, h, c, last_c, h.new_empty(gates.shape[1:]), None)
    return out, last_h, last_c


def train(gates: Tensor, weight: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with gradients; U as it is."""
    out, h, c, *_ = _Recurrence.apply(gates, weight, h, c)
    return out, h, c


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor, weight: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        steps, batch, width = gates.shape
        cells, active = h.new_empty(steps, batch, width // 4), h.new_empty(steps, batch, width)
        U, last_c = packed(weight, space=_scratch.space), c.new_empty(1, *c.shape)
        out, last_h = _forward(gates, U, h, c, cells, active, last_c)
        _scratch.space.keep_some()
        ctx.save_for_backward(weight, h, c, out, cells, active)
        ctx.set_materialize_grads(False)
        return out, last_h, last_c, cells, active

    @staticmethod
    def backward(
        ctx: Any, d_out: Gradient, dh: Gradient, dc: Gradient, d_cells: Gradient, d_active: Gradient
    ) -> tuple[Gradient, ...]:
        given = [gradient for gradient in (d_out, dh, dc, d_cells, d_active) if gradient is not None]
        if not given:
            return None, None, None, None
        of_gates, of_weight, of_h, of_c = ctx.needs_input_grad
        weight, h, c, out, cells, active = ctx.saved_tensors
        dh, dc = (None if last is None else last[0] for last in (dh, dc))
        with autocast_off(given[0]):  # the dtype was settled in the forward
            again = torch.is_grad_enabled() or d_cells is not None or d_active is not None  # a gradient of a gradient
            # Hooks of saved tensors may give back what is as good for torch, and not for the kernel.
            fast = not again and suits(*given, weight, h, c, out, cells, active)
            if fast:
                d_gates, dh, dc = _backward(weight, c, cells, active, d_out, dh, dc, of_h)
            else:
                d_gates, dh, dc = _steps_back(weight, c, cells, active, d_out, dh, dc, d_cells, d_active)
            d_weight = None
            if of_weight and fast and len(out) * len(h) <= MOST_ROWS:
                d_weight = _weight_gradient(d_gates, h, out)
            elif of_weight:
                before = torch.cat([h.unsqueeze(0), out[:-1]])
                d_weight = d_gates.reshape(-1, len(weight)).t() @ before.reshape(-1, weight.shape[1])
        return d_gates if of_gates else None, d_weight, dh if of_h else None, dc if of_c else None


def _forward(
    gates: Tensor, U: Tensor, h: Tensor, c: Tensor, cells: Tensor, active: Tensor, last_c: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output and the last h. All states c and gates are written to their places, and the last c to its own; without
    `last_c`, only the last c is, in place of all states."""
    steps, batch, width = gates.shape
    hidden = width // 4
    out, last_h = h.new_empty(steps, batch, hidden), h.new_empty(1, *h.shape)
    read = [part.contiguous() for part in (gates, U, h, c)]
    addresses = [part.data_ptr() for part in (*read, out, cells, active, last_h)]
    train, threads = last_c is not None, _threads(steps, batch, hidden)
    addresses.append(0 if last_c is None else last_c.data_ptr())
    compiled.library.lstm_forward(*addresses, train, steps, batch, hidden, threads)
    return out, last_h


def _backward(
    weight: Tensor, c: Tensor, cells: Tensor, active: Tensor, d_out: Gradient, dh: Gradient, dc: Gradient, of_h: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gates, first h (if wanted) and first c by the kernel."""
    steps, batch, hidden = cells.shape
    d_gates = active.new_empty(active.shape)
    first = [c.new_zeros(c.shape) if last is None else c.new_empty(c.shape).copy_(last) for last in (dh, dc)]
    d_out = d_out if d_out is None else d_out.contiguous()
    read = [packed(weight, True, _scratch.space), *(part.contiguous() for part in (active, cells, c))]
    addresses = [None if part is None else part.data_ptr() for part in (d_out, *read, *first, d_gates)]
    compiled.library.lstm_backward(*addresses, of_h, steps, batch, hidden, _threads(steps, batch, hidden))
    _scratch.space.keep_some()
    return d_gates, first[0], first[1]


def _weight_gradient(d_gates: Tensor, h: Tensor, out: Tensor) -> Tensor:
    """The gradient of U by the kernel, without a copy of the states before all steps in one piece."""
    steps, batch, hidden = out.shape
    d_weight = h.new_empty(4 * hidden, hidden)
    h, out = h.contiguous(), out.contiguous()
    addresses = (d_gates.data_ptr(), h.data_ptr(), out.data_ptr(), d_weight.data_ptr())
    threads = max(1, min(torch.get_num_threads(), _work(steps, batch, hidden) // WORTH_A_THREAD))
    if compiled.library.lstm_weight_gradient(*addresses, steps, batch, hidden, threads):
        raise MemoryError("the kernel for the gradient of U found no memory for its buffers")
    return d_weight


def _steps_back(
    weight: Tensor,
    c: Tensor,
    cells: Tensor,
    active: Tensor,
    d_out: Gradient,
    dh: Gradient,
    dc: Gradient,
    d_cells: Gradient,
    d_active: Gradient,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as operations of torch, for gradients of gradients or in batches."""
    sums: list[Tensor] = []
    dh, dc = torch.zeros_like(c) if dh is None else dh, torch.zeros_like(c) if dc is None else dc
    for t in reversed(range(len(cells))):
        i, f, g, o = active[t].chunk(4, -1)
        tanh = cells[t].tanh()
        dh = dh if d_out is None else dh + d_out[t]
        dc = dc + dh * o * (1 - tanh * tanh)
        dc = dc if d_cells is None else dc + d_cells[t]
        parts = torch.cat([dc * g, dc * (cells[t - 1] if t else c), dc * i, dh * tanh], -1)
        parts = parts if d_active is None else parts + d_active[t]
        slopes = torch.cat([i * (1 - i), f * (1 - f), 1 - g * g, o * (1 - o)], -1)
        sums.append(parts * slopes)
        dh, dc = sums[-1] @ weight, dc * f
    return torch.stack(sums[::-1]), dh, dc


def _threads(steps: int, batch: int, hidden: int) -> int:
    work = _work(steps, batch, hidden)
    return max(1, min(torch.get_num_threads(), batch // ROWS_OF_A_THREAD, work // WORTH_A_THREAD))


def _work(steps: int, batch: int, hidden: int) -> int:
    """Multiply-adds of one of the products with U, or of the gradient of U."""
    return 4 * steps * batch * hidden * hidden
