"""Which plan a layer runs, looked up by text: a tracer can hold that, and could not hold a format."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from kronecell.formats import Format
from kronecell.nn.splitting import SplitText
from kronecell.ops.choose import Product
from kronecell.ops.contract import operand_count
from kronecell.ops.registration import constant_when_traced
from kronecell.ops.tune import choices
from kronecell.plans.order import Tree, optimal
from kronecell.plans.plan import Plan, plan_of

Sharing = bool | tuple[str, ...]

# What a layer multiplies by, under one line of text: a key that a tracer can hold, where it could not hold a format.
_matrices: dict[str, tuple[Format, int, Sharing, str | Tree]] = {}


def described(format: Format, gates: int, shared: Sharing, order: str | Tree) -> str:
    text = f"{format} gates={gates} shared={shared} order={order}"
    _matrices[text] = (format, gates, shared, order)
    return text


@constant_when_traced
def plan_text(*key: Any) -> str:
    """The plan of a layer as operators take it."""
    return chosen_plan(*key).text


@lru_cache(maxsize=4096)
def chosen_plan(
    matrix: str, rows: int, grad: bool, dtype: torch.dtype, device: str, frozen: bool, threads: int, edition: int
) -> Plan:
    """The plan of a layer for a number of rows, here and now: what was measured, or what the cost model predicts."""
    format, gates, shared, order = _matrices[matrix]
    if order != "auto":
        return format.plan(order, rows, gates=gates, shared=shared)
    return choices.plan(product_of(matrix, rows, grad, dtype, device, frozen))


def product_of(matrix: str, rows: int, grad: bool, dtype: torch.dtype, device: str, frozen: bool) -> Product:
    format, gates, shared, _ = _matrices[matrix]
    plans = [(name, format.plan(name, rows, gates=gates, shared=shared)) for name in format.orders()]
    orders = tuple((name, plan.network, plan.tree) for name, plan in plans)
    name = f"{format} gates={gates} shared={shared}"
    return Product(format.network(gates, shared), orders, name, rows, grad, dtype, device, frozen)


@constant_when_traced
def dense_text(matrix: str) -> str:
    format, gates, shared, _ = _matrices[matrix]
    dense = format.network(gates, shared).as_dense()
    return Plan(dense, optimal(dense), order="dense").text


@constant_when_traced
def one_product(plan: str) -> bool:
    """Whether x is multiplied once: by a dense W."""
    return operand_count(plan) == 1 and plan_of(plan).chunk is None


@constant_when_traced
def split_text(matrix: str) -> SplitText | None:
    """How a layer's matrix splits, if it does, as operators take it."""
    format, gates, shared, _ = _matrices[matrix]
    return SplitText.of(format.network(gates, shared))
