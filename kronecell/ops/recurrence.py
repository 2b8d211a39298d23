"""The recurrences of an LSTM and a GRU over finished gates, x W + b: kronecell::lstm and kronecell::gru.

    lstm:  i f g o = gates[t] + h U^T,    c = sigmoid(f) c + sigmoid(i) tanh(g),    h = sigmoid(o) tanh(c) [project^T]
    gru:   r z = sigmoid(gates[t] + h U^T),   n = tanh(gates[t] + r (h U_n^T + bias_n)),    h = n + z (h - n)

gates     (T, B, gates * H), a batch-first input transposed without a copy; or (rows, gates * H) of a packed
          sequence with `batch_sizes`. All biases are in it, but the GRU's bias_n (H,), which the reset gate acts on.
hidden    [U] with U (gates * H, P) as torch stores it; P is H, or the size of the projection.
          [In (r, P), Out (r, gates * H)] for h U^T = (h In^T) Out.
          [In (gates * r, P), Out (gates, r, H)]: every gate has its own r columns.
          [In, Out, values, places]: the same plus a sparse matrix, as in sparse.py; a fifth tensor is what is prepared.
reverse   runs from the last step to the first, each packed sequence within its own length; the output stays in the
          order of the input.
keep      also returns what the gradient needs: activated gates (LSTM: i f g o; GRU: r z n and h U_n^T + bias_n) and the
          cells of an LSTM, one row per row of gates. Without it they have no elements, and the gradient runs the
          forward once more.

The compiled kernels are in csrc/lstm.cpp and csrc/gru.cpp. The gradients here are those by hand, back through time;
gradients of gradients are those of these references.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kronecell.ops.recurrence_steps import (
    Optional,
    advanced,
    all_before,
    flat_rows,
    gather,
    hidden_fake,
    hidden_gradients,
    kept,
    nothing,
    product,
    product_back,
    states_before,
    steps_of,
)
from kronecell.ops.registration import operator
from kronecell.ops.sparse import sparse_gradients, with_dense_part

LSTM_GATES = 4
GRU_GATES = 3


# LSTM -------------------------------------------------------------------------------------------------------------


def lstm_reference(
    gates: Tensor,
    hidden: Sequence[Tensor],
    h: Tensor,
    c: Tensor,
    project: Optional,
    batch_sizes: Optional,
    reverse: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """output, last h, last c, activated gates, cells."""
    flat, (batch, size), width = flat_rows(gates, batch_sizes), c.shape, h.shape[1]
    hidden = with_dense_part(hidden, LSTM_GATES * size, width)
    h, c = h.clone(), c.clone()
    outputs, active, cells = [], [], []
    for first, rows in steps_of(len(flat), batch, batch_sizes, reverse):
        sums = flat[first : first + rows] + product(h[:rows], hidden)
        i, f, g, o = sums.chunk(LSTM_GATES, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        cell = f * c[:rows] + i * g
        out = o * cell.tanh()
        out = out if project is None else out @ project.t()
        h, c = advanced(h, out), advanced(c, cell)
        outputs.append(out)
        if keep:
            cells.append(cell)
            active.append(torch.cat([i, f, g, o], 1))
    output = gather(outputs, reverse, h, width).reshape(*gates.shape[:-1], width)
    return (
        output,
        h,
        c,
        kept(active, keep, gates, reverse, LSTM_GATES * size),
        kept(cells, keep, gates, reverse, size),
    )


def _lstm_fake(
    gates: Tensor,
    hidden: Sequence[Tensor],
    h: Tensor,
    c: Tensor,
    project: Optional,
    batch_sizes: Optional,
    reverse: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = gates.shape[:-1]
    active, cells = ((*rows, gates.shape[-1]), (*rows, c.shape[1])) if keep else ((0,), (0,))
    shapes = ((*rows, h.shape[1]), h.shape, c.shape, active, cells)
    first, second, third, fourth, fifth = (gates.new_empty(shape) for shape in shapes)
    return first, second, third, fourth, fifth


def _lstm_backward_reference(
    d_output: Optional,
    d_h: Optional,
    d_c: Optional,
    d_active: Optional,
    d_cells: Optional,
    hidden: Sequence[Tensor],
    h: Tensor,
    c: Tensor,
    project: Optional,
    batch_sizes: Optional,
    reverse: bool,
    output: Tensor,
    active: Tensor,
    cells: Tensor,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of gates, U or In and Out (if `weights`), first h, first c and project (if `weights`)."""
    shape = active.shape
    hidden = with_dense_part(hidden, LSTM_GATES * c.shape[1], h.shape[1])
    output, active, cells = (flat_rows(tensor, batch_sizes) for tensor in (output, active, cells))
    d_output, d_active, d_cells = (
        None if tensor is None else flat_rows(tensor, batch_sizes) for tensor in (d_output, d_active, d_cells)
    )
    dh = torch.zeros_like(h) if d_h is None else d_h.clone()
    dc = torch.zeros_like(c) if d_c is None else d_c.clone()
    steps = steps_of(len(active), len(c), batch_sizes, reverse)
    cells_before = [*states_before(cells, c, steps)]
    sums, ups = [], []
    for (first, rows), cell_before in zip(reversed(steps), reversed(cells_before), strict=True):
        here = slice(first, first + rows)
        i, f, g, o = active[here].chunk(LSTM_GATES, 1)
        tanh = cells[here].tanh()
        up = dh[:rows] if d_output is None else dh[:rows] + d_output[here]
        ups.append(up)
        up = up if project is None else up @ project
        down = dc[:rows] + up * o * (1 - tanh * tanh)
        down = down if d_cells is None else down + d_cells[here]
        parts = torch.cat([down * g, down * cell_before, down * i, up * tanh], 1)
        parts = parts if d_active is None else parts + d_active[here]
        slopes = torch.cat([i * (1 - i), f * (1 - f), 1 - g * g, o * (1 - o)], 1)
        sums.append(parts * slopes)
        dh, dc = advanced(dh, product_back(sums[-1], hidden)), advanced(dc, down * f)
    d_gates = gather(sums, not reverse, active, active.shape[1])
    d_hidden, d_project = (nothing(h), nothing(h)), nothing(h)
    if weights:
        d_hidden = hidden_gradients(d_gates, all_before(output, h, steps, reverse), hidden)
    if weights and project is not None:
        states = active[:, -c.shape[1] :] * cells.tanh()
        d_project = gather(ups, not reverse, h, h.shape[1]).t() @ states
    return d_gates.reshape(shape), *d_hidden, dh, dc, d_project


def _lstm_backward_fake(
    d_output: Optional,
    d_h: Optional,
    d_c: Optional,
    d_active: Optional,
    d_cells: Optional,
    hidden: Sequence[Tensor],
    h: Tensor,
    c: Tensor,
    project: Optional,
    batch_sizes: Optional,
    reverse: bool,
    output: Tensor,
    active: Tensor,
    cells: Tensor,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_first, d_second = hidden_fake(hidden, weights)
    d_project = h.new_empty(project.shape if weights and project is not None else (0,))
    return active.new_empty(active.shape), d_first, d_second, h.new_empty(h.shape), c.new_empty(c.shape), d_project


def _lstm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    gates, hidden, h, c, project, batch_sizes, reverse, keep = inputs
    out, _, _, active, cells = output
    ctx.set_materialize_grads(False)
    results = (out, active, cells) if keep else (gates,)
    ctx.save_for_backward(*hidden, h, c, project, batch_sizes, *results)
    ctx.count, ctx.reverse, ctx.keep = len(hidden), reverse, keep


def _lstm_gradient(ctx: Any, *upstream: Optional) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: a checkpoint refuses to unpack a tensor twice
    hidden, rest = list(saved[: ctx.count]), saved[ctx.count :]
    h, c, project, batch_sizes, *results = rest
    if all(gradient is None for gradient in upstream):
        return None, [None] * ctx.count, None, None, None, None, None, None
    if not ctx.keep:
        (gates,) = results
        again = lstm(gates, hidden, h, c, project, batch_sizes, ctx.reverse, True)
        results = [again[0], *again[3:]]
        upstream = (*upstream[:3], None, None)  # of no elements
    weights = _wanted(ctx.needs_input_grad[1]) or _wanted(ctx.needs_input_grad[4])
    d_gates, *d_hidden, d_h, d_c, d_project = lstm_backward(
        *upstream, hidden, h, c, project, batch_sizes, ctx.reverse, *results, weights
    )
    d_hidden = d_hidden[: ctx.count] if weights else [None] * ctx.count
    if weights and ctx.count >= 4:
        d_hidden += sparse_gradients(d_gates, hidden, results[0], h, batch_sizes, ctx.reverse)
    return d_gates, d_hidden, d_h, d_c, d_project if weights and project is not None else None, None, None, None


# GRU --------------------------------------------------------------------------------------------------------------


def gru_reference(
    gates: Tensor,
    hidden: Sequence[Tensor],
    bias_n: Optional,
    h: Tensor,
    batch_sizes: Optional,
    reverse: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """output, last h, activated gates with h U_n^T + bias_n."""
    flat, (batch, size) = flat_rows(gates, batch_sizes), h.shape
    hidden = with_dense_part(hidden, GRU_GATES * size, size)
    h = h.clone()
    outputs, active = [], []
    for first, rows in steps_of(len(flat), batch, batch_sizes, reverse):
        before = h[:rows]
        r_x, z_x, n_x = flat[first : first + rows].chunk(GRU_GATES, 1)
        r_h, z_h, n_h = product(before, hidden).chunk(GRU_GATES, 1)
        n_h = n_h if bias_n is None else n_h + bias_n
        r, z = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
        n = (n_x + r * n_h).tanh()
        out = n + z * (before - n)
        h = advanced(h, out)
        outputs.append(out)
        if keep:
            active.append(torch.cat([r, z, n, n_h], 1))
    output = gather(outputs, reverse, h, size).reshape(*gates.shape[:-1], size)
    return output, h, kept(active, keep, gates, reverse, 4 * size)


def _gru_fake(
    gates: Tensor,
    hidden: Sequence[Tensor],
    bias_n: Optional,
    h: Tensor,
    batch_sizes: Optional,
    reverse: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, size = gates.shape[:-1], h.shape[1]
    active = (*rows, 4 * size) if keep else (0,)
    return gates.new_empty((*rows, size)), h.new_empty(h.shape), gates.new_empty(active)


def _gru_backward_reference(
    d_output: Optional,
    d_h: Optional,
    d_active: Optional,
    hidden: Sequence[Tensor],
    bias_n: Optional,
    h: Tensor,
    batch_sizes: Optional,
    reverse: bool,
    output: Tensor,
    active: Tensor,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of gates, U or In and Out (if `weights`), bias_n (if `weights`) and first h."""
    shape, size = active.shape, h.shape[1]
    hidden = with_dense_part(hidden, GRU_GATES * size, size)
    output, active = flat_rows(output, batch_sizes), flat_rows(active, batch_sizes)
    d_output, d_active = (None if tensor is None else flat_rows(tensor, batch_sizes) for tensor in (d_output, d_active))
    dh = torch.zeros_like(h) if d_h is None else d_h.clone()
    steps = steps_of(len(active), len(h), batch_sizes, reverse)
    befores = [*states_before(output, h, steps)]
    sums, products = [], []
    for (first, rows), before in zip(reversed(steps), reversed(befores), strict=True):
        here = slice(first, first + rows)
        r, z, n, n_h = active[here].chunk(4, 1)
        up = dh[:rows] if d_output is None else dh[:rows] + d_output[here]
        d_z, d_n = up * (before - n), up * (1 - z)
        d_r, d_product = torch.zeros_like(r), torch.zeros_like(r)
        if d_active is not None:
            more_r, more_z, more_n, d_product = d_active[here].chunk(4, 1)
            d_r, d_z, d_n = d_r + more_r, d_z + more_z, d_n + more_n
        n_sum = d_n * (1 - n * n)
        r_sum, z_sum = (d_r + n_sum * n_h) * r * (1 - r), d_z * z * (1 - z)
        sums.append(torch.cat([r_sum, z_sum, n_sum], 1))
        products.append(torch.cat([r_sum, z_sum, d_product + n_sum * r], 1))
        dh = advanced(dh, up * z + product_back(products[-1], hidden))
    d_gates = gather(sums, not reverse, active, GRU_GATES * size)
    d_hidden, d_bias = (nothing(h), nothing(h)), nothing(h)
    if weights:
        d_product = gather(products, not reverse, active, GRU_GATES * size)
        d_hidden = hidden_gradients(d_product, all_before(output, h, steps, reverse), hidden)
        if bias_n is not None:
            d_bias = d_product[:, -size:].sum(0)
    return d_gates.reshape(*shape[:-1], GRU_GATES * size), *d_hidden, d_bias, dh


def _gru_backward_fake(
    d_output: Optional,
    d_h: Optional,
    d_active: Optional,
    hidden: Sequence[Tensor],
    bias_n: Optional,
    h: Tensor,
    batch_sizes: Optional,
    reverse: bool,
    output: Tensor,
    active: Tensor,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_gates = active.new_empty((*active.shape[:-1], GRU_GATES * h.shape[1]))
    d_first, d_second = hidden_fake(hidden, weights)
    d_bias = h.new_empty(bias_n.shape if weights and bias_n is not None else (0,))
    return d_gates, d_first, d_second, d_bias, h.new_empty(h.shape)


def _gru_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    gates, hidden, bias_n, h, batch_sizes, reverse, keep = inputs
    out, _, active = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*hidden, bias_n, h, batch_sizes, *((out, active) if keep else (gates,)))
    ctx.count, ctx.reverse, ctx.keep = len(hidden), reverse, keep


def _gru_gradient(ctx: Any, *upstream: Optional) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: a checkpoint refuses to unpack a tensor twice
    hidden, rest = list(saved[: ctx.count]), saved[ctx.count :]
    bias_n, h, batch_sizes, *results = rest
    if all(gradient is None for gradient in upstream):
        return None, [None] * ctx.count, None, None, None, None, None
    if not ctx.keep:
        (gates,) = results
        again = gru(gates, hidden, bias_n, h, batch_sizes, ctx.reverse, True)
        results = [again[0], again[2]]
        upstream = (*upstream[:2], None)  # of no elements
    weights = _wanted(ctx.needs_input_grad[1]) or _wanted(ctx.needs_input_grad[2])
    d_gates, *d_hidden, d_bias, d_h = gru_backward(
        *upstream, hidden, bias_n, h, batch_sizes, ctx.reverse, *results, weights
    )
    d_hidden = d_hidden[: ctx.count] if weights else [None] * ctx.count
    if weights and ctx.count >= 4:
        size, (output, active) = h.shape[1], results
        of_n = d_gates[..., 2 * size :] * active[..., :size]  # the reset gate acts after the product
        of_n = of_n if upstream[2] is None else of_n + upstream[2][..., 3 * size :]
        d_product = torch.cat([d_gates[..., : 2 * size], of_n], -1)
        d_hidden += sparse_gradients(d_product, hidden, output, h, batch_sizes, ctx.reverse)
    return d_gates, d_hidden, d_bias if weights and bias_n is not None else None, d_h, None, None, None


def _wanted(needs: Any) -> bool:
    """Of a tensor or a list of them."""
    return any(needs) if isinstance(needs, (list, tuple)) else bool(needs)


# The operators ----------------------------------------------------------------------------------------------------

lstm_backward = operator(
    "lstm_backward(Tensor? d_output, Tensor? d_h_n, Tensor? d_c_n, Tensor? d_active, Tensor? d_cells, "
    "Tensor[] hidden, Tensor h, Tensor c, Tensor? project, Tensor? batch_sizes, bool reverse, Tensor output, "
    "Tensor active, Tensor cells, bool weights) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _lstm_backward_reference,
    _lstm_backward_fake,
)
lstm = operator(
    "lstm(Tensor gates, Tensor[] hidden, Tensor h, Tensor c, Tensor? project, Tensor? batch_sizes, bool reverse, "
    "bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lstm_reference,
    _lstm_fake,
    setup=_lstm_setup,
    backward=_lstm_gradient,
)
gru_backward = operator(
    "gru_backward(Tensor? d_output, Tensor? d_h_n, Tensor? d_active, Tensor[] hidden, Tensor? bias_n, Tensor h, "
    "Tensor? batch_sizes, bool reverse, Tensor output, Tensor active, bool weights) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gru_backward_reference,
    _gru_backward_fake,
)
gru = operator(
    "gru(Tensor gates, Tensor[] hidden, Tensor? bias_n, Tensor h, Tensor? batch_sizes, bool reverse, bool keep) -> "
    "(Tensor, Tensor, Tensor)",
    gru_reference,
    _gru_fake,
    setup=_gru_setup,
    backward=_gru_gradient,
)
