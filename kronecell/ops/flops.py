"""What torch's FlopCounterMode counts for our operators: two for every multiply-add that the CPU runs.

Gradients count the products that they take: one for each operand whose gradient is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from kronecell.ops import recurrence as recurrence  # registers the operators that are counted here
from kronecell.ops.choose import executed_macs
from kronecell.ops.contract import ready

Shape = Sequence[int]

ops: Any = torch.ops.kronecell


@register_flop_formula(ops.contract)
def _contract(x: Shape, operands: Any, bias: Any, plan: str, keep: bool, **_: Any) -> int:
    return 2 * x[0] * executed_macs(ready(plan).plan)


@register_flop_formula(ops.contract_backward)
def _contract_backward(
    upstream: Shape, x: Shape, operands: Any, saved: Any, wanted: Sequence[bool], plan: str, **_: Any
) -> int:
    """Every step back: the gradient of its small operand if that is wanted, and of what comes in if that is needed."""
    of = ready(plan)
    of_x, *of_small, _bias = wanted
    pairs = {op.out: op.diagonal[0][op.diagonal[1]] if op.diagonal is not None else 1 for op in of.program.hot}
    total = 0
    for i, step in enumerate(step for step in of.plan.steps if not step.hoisted):
        runs = of_small[i] + (of_x or any(of_small[:i]))
        total += runs * step.macs * pairs[step.name]
    return 2 * x[0] * total


@register_flop_formula(ops.hoist)
def _hoist(factors: Any, plan: str, **_: Any) -> int:
    return 2 * ready(plan).plan.hoisted_macs


@register_flop_formula(ops.hoist_backward)
def _hoist_backward(upstream: Any, factors: Any, wanted: Any, plan: str, **_: Any) -> int:
    """The hoisted steps once more, and the gradients of both operands of each."""
    return 3 * 2 * ready(plan).plan.hoisted_macs


def _rows(gates: Shape) -> int:
    return prod(gates[:-1])


def _hidden_macs(hidden: Sequence[Shape]) -> int:
    """Multiply-adds of one row of h; the places of a sparse matrix are the fourth tensor."""
    return sum(prod(part) for part in hidden[:3])


@register_flop_formula(ops.lstm)
def _lstm(gates: Shape, hidden: Any, h: Shape, c: Shape, project: Shape | None, *_: Any, **__: Any) -> int:
    return 2 * _rows(gates) * (_hidden_macs(hidden) + (prod(project) if project is not None else 0))


@register_flop_formula(ops.gru)
def _gru(gates: Shape, hidden: Any, *_: Any, **__: Any) -> int:
    return 2 * _rows(gates) * _hidden_macs(hidden)


@register_flop_formula(ops.sparse_linear)
def _sparse_linear(x: Shape, values: Shape, *_: Any, **__: Any) -> int:
    return 2 * x[0] * prod(values)


@register_flop_formula(ops.sparse_back)
def _sparse_back(upstream: Shape, values: Shape, *_: Any, **__: Any) -> int:
    return 2 * upstream[0] * prod(values)


@register_flop_formula(ops.sparse_gradient)
def _sparse_gradient(upstream: Shape, x: Shape, places: Shape, block: int, **_: Any) -> int:
    return 2 * x[0] * places[0] * block


@register_flop_formula(ops.few_columns)
def _few_columns(x: Shape, weight: Shape, **_: Any) -> int:
    return 2 * x[0] * prod(weight)


@register_flop_formula(ops.column_sums)
def _column_sums(x: Shape, upstream: Shape, **_: Any) -> int:
    return 2 * prod(x) * upstream[1]


@register_flop_formula(ops.linear)
def _linear(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * x[0] * prod(weight)


@register_flop_formula(ops.bmm)
def _bmm(a: Shape, b: Shape, **_: Any) -> int:
    return 2 * prod(a) * b[-1]


@register_flop_formula(ops.grouped)
def _grouped(a: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * a[1] * prod(weight)


@register_flop_formula(ops.lstm_backward)
def _lstm_backward(
    d_output: Any, d_h: Any, d_c: Any, d_active: Any, d_cells: Any, hidden: Any, h: Shape, *rest: Any, **_: Any
) -> int:
    """Back through U at every step, and its gradient if that is wanted."""
    output, weights = rest[4], rest[7]
    return 2 * _rows(output) * _hidden_macs(hidden) * (1 + bool(weights))


@register_flop_formula(ops.gru_backward)
def _gru_backward(
    d_output: Any, d_h: Any, d_active: Any, hidden: Any, bias_n: Any, h: Any, *rest: Any, **_: Any
) -> int:
    output, weights = rest[2], rest[4]
    return 2 * _rows(output) * _hidden_macs(hidden) * (1 + bool(weights))
