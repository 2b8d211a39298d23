"""Products with a sparse matrix S (outputs, inputs): kronecell::sparse_linear and its gradients.

values     (count, block): blocks of entries that lie under each other, in consecutive outputs of one input.
places     (count,), int64, ascending: block number p of S holds outputs p // inputs * block + 0 ... block - 1 of input
           p % inputs.

prepared   what sparse_prepared makes of values and places for the kernels of this processor, int32 numbers that only
           they read: a product of one row then takes a quarter of the time. It has a copy of the values, so it is for
           a matrix that stays as it is. It is empty where S is multiplied as it is stored, and ignored by a processor
           with registers of another width.

The gradient is to the values alone: what is not stored has none. The compiled kernels are in csrc/sparse.cpp; the
recurrences take the same tensors after In and Out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kronecell.ops.library import load
from kronecell.ops.recurrence_steps import Optional, all_before, flat_rows, steps_of
from kronecell.ops.registration import operator


def dense_of(values: Tensor, places: Tensor, outputs: int, inputs: int) -> Tensor:
    """S as a dense matrix; differentiable."""
    block = values.shape[1]
    everywhere = outputs // block * inputs
    if len(values) == everywhere:  # in order: there is nothing to place
        return values.reshape(-1, inputs, block).transpose(1, 2).reshape(outputs, inputs)
    rows = values.new_zeros(everywhere, block).index_copy(0, places, values)
    return rows.reshape(-1, inputs, block).transpose(1, 2).reshape(outputs, inputs)


def values_of(dense: Tensor, places: Tensor, block: int) -> Tensor:
    """The blocks (count, block) that a dense matrix has at these places."""
    outputs, inputs = dense.shape
    return dense.reshape(outputs // block, block, inputs).transpose(1, 2).reshape(-1, block)[places]


def _linear_reference(
    x: Tensor, values: Tensor, places: Tensor, outputs: int, start: Optional, prepared: Optional = None
) -> Tensor:
    """start + x S^T for x (rows, inputs)."""
    y = x @ dense_of(values, places, outputs, x.shape[1]).t()
    return y if start is None else start + y


def _linear_fake(
    x: Tensor, values: Tensor, places: Tensor, outputs: int, start: Optional, prepared: Optional = None
) -> Tensor:
    return x.new_empty(x.shape[0], outputs)


def _prepared_reference(values: Tensor, places: Tensor, outputs: int, inputs: int) -> Tensor:
    """What the kernels of this processor read in place of values and places; empty where they read these."""
    return places.new_empty(0, dtype=torch.int32)


def _prepared_fake(values: Tensor, places: Tensor, outputs: int, inputs: int) -> Tensor:
    count, block = values.shape
    size = 0
    if load() and values.device.type == "cpu" and values.dtype == torch.float32:
        size = torch.ops.kronecell.sparse_prepared_size(outputs, inputs, count, block)
    return places.new_empty(size, dtype=torch.int32)


def _back_reference(upstream: Tensor, values: Tensor, places: Tensor, inputs: int) -> Tensor:
    """upstream (rows, outputs) S: the gradient of x."""
    return upstream @ dense_of(values, places, upstream.shape[1], inputs)


def _back_fake(upstream: Tensor, values: Tensor, places: Tensor, inputs: int) -> Tensor:
    return upstream.new_empty(upstream.shape[0], inputs)


def _gradient_reference(upstream: Tensor, x: Tensor, places: Tensor, block: int) -> Tensor:
    """The gradient of the values: what upstream^T x has at their places."""
    return values_of(upstream.t() @ x, places, block)


def _gradient_fake(upstream: Tensor, x: Tensor, places: Tensor, block: int) -> Tensor:
    return x.new_empty(places.shape[0], block)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, places, *_ = inputs
    ctx.save_for_backward(x, values, places)


def _gradient(ctx: Any, upstream: Tensor) -> tuple[Optional, ...]:
    x, values, places = ctx.saved_tensors
    of_x, of_values, _, _, of_start, *rest = ctx.needs_input_grad  # torch leaves out an argument that is the default
    return (
        sparse_back(upstream, values, places, x.shape[1]) if of_x else None,
        sparse_gradient(upstream, x, places, values.shape[1]) if of_values else None,
        None,
        None,
        upstream if of_start else None,
        *[None] * len(rest),
    )


sparse_back = operator(
    "sparse_back(Tensor upstream, Tensor values, Tensor places, int inputs) -> Tensor", _back_reference, _back_fake
)
sparse_gradient = operator(
    "sparse_gradient(Tensor upstream, Tensor x, Tensor places, int block) -> Tensor",
    _gradient_reference,
    _gradient_fake,
)
sparse_linear = operator(
    "sparse_linear(Tensor x, Tensor values, Tensor places, int outputs, Tensor? start, Tensor? prepared=None)"
    " -> Tensor",
    _linear_reference,
    _linear_fake,
    setup=_setup,
    backward=_gradient,
)


sparse_prepared = operator(
    "sparse_prepared(Tensor values, Tensor places, int outputs, int inputs) -> Tensor",
    _prepared_reference,
    _prepared_fake,
    differentiable=False,
)


def with_dense_part(hidden: Sequence[Tensor], outputs: int, inputs: int) -> Sequence[Tensor]:
    """[In, Out, values, places, ...] of a recurrence as [In, Out, S] with S dense; anything else as it is."""
    if len(hidden) < 4:
        return hidden
    In, Out, values, places, *_ = hidden
    return [In, Out, dense_of(values, places, outputs, inputs)]


def sparse_gradients(
    upstream: Tensor, hidden: Sequence[Tensor], output: Tensor, h: Tensor, batch_sizes: Optional, reverse: bool
) -> list[Optional]:
    """Of the values of S, from the gradients of all rows of h U^T, and of what comes after them, which has none."""
    rows, states = flat_rows(upstream, batch_sizes), flat_rows(output, batch_sizes)
    before = all_before(states, h, steps_of(len(rows), len(h), batch_sizes, reverse), reverse)
    return [sparse_gradient(rows, before, hidden[3], hidden[2].shape[1]), *[None] * (len(hidden) - 3)]
