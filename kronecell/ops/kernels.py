"""The product operators with their references: what a compressed layer spends its time on.

Each has a compiled CPU kernel for float32 (csrc/) and a pure-torch reference for everything else; registration.py says
when which of them runs. The schemas stand here and in csrc/, and are compared when the library is loaded.

Most run inside `contract` alone, which has a gradient of its own: theirs is that of the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kronecell.ops.library import load
from kronecell.ops.recurrence_steps import product
from kronecell.ops.registration import operator
from kronecell.ops.sparse import with_dense_part


@lru_cache(maxsize=1)
def register_width() -> int:
    """float32 numbers in a register of the kernels: 16, 8 or 4, and 0 where no kernels are built."""
    return int(torch.ops.kronecell.register_width()) if load() else 0


# x (rows, depth) times few columns ---------------------------------------------------------------------------------


def _few_columns(x: Tensor, weight: Tensor) -> Tensor:
    """x (rows, depth) times weight (columns, depth) transposed; x may be uint8, whose numbers are 0 to 255."""
    return x.to(weight.dtype) @ weight.mT


def _few_columns_fake(x: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(x.shape[0], weight.shape[0])


def _column_sums(x: Tensor, upstream: Tensor) -> Tensor:
    """upstream (rows, columns) transposed times x (rows, depth): the gradient of few_columns for its weight."""
    return upstream.mT @ x.to(upstream.dtype)


def _column_sums_fake(x: Tensor, upstream: Tensor) -> Tensor:
    return upstream.new_empty(upstream.shape[1], x.shape[1])


few_columns = operator("few_columns(Tensor x, Tensor weight) -> Tensor", _few_columns, _few_columns_fake)
column_sums = operator("column_sums(Tensor x, Tensor upstream) -> Tensor", _column_sums, _column_sums_fake)


# Products of matrices ----------------------------------------------------------------------------------------------


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for two matrices or two batches of them."""
    return torch.mm(a, b) if a.ndim == 2 else torch.bmm(a, b)


def _bmm_fake(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


bmm = operator("bmm(Tensor a, Tensor b) -> Tensor", _bmm, _bmm_fake)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (rows, depth) times weight (columns, depth) transposed, plus the bias: the product of a dense layer."""
    y = x @ weight.mT
    return y if bias is None else y + bias


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def _linear_backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad
    return (
        bmm(upstream, weight) if of_x else None,
        bmm(upstream.mT, x) if of_weight else None,
        upstream.sum(0) if of_bias else None,
    )


linear = operator(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    _linear,
    _linear_fake,
    setup=_linear_setup,
    backward=_linear_backward,
)


def _bmm_out(out: Tensor, a: Tensor, b: Tensor) -> None:
    """a @ b into out, in memory that an earlier product of the same call has used."""
    out.copy_(a @ b)


bmm_out = operator(
    "bmm_out(Tensor(a!) out, Tensor a, Tensor b) -> ()", _bmm_out, lambda out, a, b: None, differentiable=False
)


# The first two products of KCP in one ------------------------------------------------------------------------------

PARTS_OF_X, WIDEST_TILE = 4, 96  # v is kept if it has at most 1/4 of the numbers of x, in rows of at least 96


def keeps_v(x: Tensor, places: int, shared: int, others: int) -> bool:
    """Whether `fold` with `keep` computes v; csrc/fold.cpp says the same."""
    return bool(x.is_floating_point() and 4 * shared * others <= places and x.shape[1] >= WIDEST_TILE * places)


def _fold(
    x: Tensor, weight: Tensor, factors: Tensor, places: int, shared: int, inner: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """z, y and v: y[r, p, c] = sum over k of x[r, p, k] weight[c, k], and z[r, g, o, c'] = sum over p of
    y[r, p, (a, g, i)] factors[(g, o), p], where columns c count as (any, shared, inner) and c' as (any, inner).

    z is (rows, shared * others * c'). With `keep`, y is returned as (rows * places, columns) for the gradient of the
    factors, and v[r, l, k] = sum over p of factors[l, p] x[r, p, k] for that of the weight, where `keeps_v`; what is
    not returned has the shape (0,).
    """
    rows, (columns, depth) = x.shape[0], weight.shape
    numbers = x.to(weight.dtype)
    y = numbers.reshape(rows * places, depth) @ weight.mT
    z = torch.einsum(
        "rpagi,gop->rgoai",
        y.reshape(rows, places, columns // (shared * inner), shared, inner),
        factors.reshape(shared, factors.shape[0] // shared, places),
    ).reshape(rows, factors.shape[0] // shared * columns)
    v = factors.new_empty(0)
    if keep and keeps_v(x, places, shared, factors.shape[0] // shared):
        v = torch.matmul(factors, numbers.reshape(rows, places, depth))
    return z, y if keep else weight.new_empty(0), v


def _fold_fake(
    x: Tensor, weight: Tensor, factors: Tensor, places: int, shared: int, inner: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns, others = x.shape[0], weight.shape[0], factors.shape[0] // shared
    with_v = keep and keeps_v(x, places, shared, others)
    return (
        weight.new_empty(rows, others * columns),
        weight.new_empty(rows * places, columns) if keep else weight.new_empty(0),
        weight.new_empty(rows, factors.shape[0], weight.shape[1]) if with_v else weight.new_empty(0),
    )


def _fold_backward(
    upstream: Tensor, y: Tensor, v: Tensor, weight: Tensor, factors: Tensor, places: int, shared: int, inner: int
) -> tuple[Tensor, Tensor]:
    """The gradients of fold for its weight and factors from that of z, without x."""
    rows, (columns, depth), others = upstream.shape[0], weight.shape, factors.shape[0] // shared
    sums = upstream.reshape(rows, shared, others, columns // (shared * inner), inner)
    parts = y.reshape(rows, places, columns // (shared * inner), shared, inner)
    of_weight = torch.einsum("rgoai,rgok->agik", sums, v.reshape(rows, shared, others, depth))
    of_factors = torch.einsum("rgoai,rpagi->gop", sums, parts)
    return of_weight.reshape(columns, depth), of_factors.reshape(factors.shape)


def _fold_backward_fake(
    upstream: Tensor, y: Tensor, v: Tensor, weight: Tensor, factors: Tensor, places: int, shared: int, inner: int
) -> tuple[Tensor, Tensor]:
    return weight.new_empty(weight.shape), factors.new_empty(factors.shape)


fold = operator(
    "fold(Tensor x, Tensor weight, Tensor factors, int places, int shared, int inner, bool keep)"
    " -> (Tensor, Tensor, Tensor)",
    _fold,
    _fold_fake,
)
fold_backward = operator(
    "fold_backward(Tensor upstream, Tensor y, Tensor v, Tensor weight, Tensor factors, int places, int shared,"
    " int inner) -> (Tensor, Tensor)",
    _fold_backward,
    _fold_backward_fake,
)


# The last product of a layer, one for each group -------------------------------------------------------------------


def _grouped(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y[r, (g, j)] = bias[(g, j)] + sum over k of a[g, r, k] weight[g, k, j]; a may have any strides."""
    groups, rows, _ = a.shape
    y = torch.bmm(a, weight).movedim(0, 1).reshape(rows, groups * weight.shape[2])
    return y if bias is None else y + bias


def _grouped_fake(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[1], a.shape[0] * weight.shape[2])


def _grouped_backward(
    upstream: Tensor, a: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of grouped for a (laid out as a lies), the weight and the bias; (0,) for what is not wanted."""
    parts = upstream.reshape(a.shape[1], a.shape[0], weight.shape[2]).movedim(1, 0)
    return (
        torch.bmm(parts, weight.mT) if wanted[0] else a.new_empty(0),
        torch.bmm(a.mT, parts) if wanted[1] else a.new_empty(0),
        upstream.sum(0) if wanted[2] else a.new_empty(0),
    )


def _grouped_backward_fake(
    upstream: Tensor, a: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(a) if wanted[0] else a.new_empty(0),
        weight.new_empty(weight.shape) if wanted[1] else a.new_empty(0),
        upstream.new_empty(upstream.shape[1]) if wanted[2] else a.new_empty(0),
    )


grouped = operator("grouped(Tensor a, Tensor weight, Tensor? bias) -> Tensor", _grouped, _grouped_fake)
grouped_backward = operator(
    "grouped_backward(Tensor upstream, Tensor a, Tensor weight, bool[3] wanted) -> (Tensor, Tensor, Tensor)",
    _grouped_backward,
    _grouped_backward_fake,
)


# The product before a recurrence, for few rows ----------------------------------------------------------------------


def _columns_of(weight: Sequence[Tensor], gates: int) -> int:
    if len(weight) == 1:
        return weight[0].shape[0]
    return weight[1].shape[-1] * (gates if weight[1].ndim == 3 else 1)


def _split_linear_reference(x: Tensor, weight: Sequence[Tensor], gates: int, bias: Tensor | None) -> Tensor:
    """x W + bias for W in the forms of `hidden` in recurrence.py."""
    y = product(x, with_dense_part(weight, _columns_of(weight, gates), x.shape[1]))
    return y if bias is None else y + bias


def _split_linear_fake(x: Tensor, weight: Sequence[Tensor], gates: int, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], _columns_of(weight, gates))


split_linear = operator(
    "split_linear(Tensor x, Tensor[] weight, int gates, Tensor? bias) -> Tensor",
    _split_linear_reference,
    _split_linear_fake,
    differentiable=False,
)
