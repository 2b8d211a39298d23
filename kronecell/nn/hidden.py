"""How a recurrence gets its hidden matrix U: dense, or split into In and Out with few columns between.

The operators take [U] with U (gates * H, P), [In (r, P), Out (r, gates * H)], or [In (gates * r, P), Out (gates, r, H)]
where every gate has columns of its own. A format whose factors lie on both sides (TT, BT, HT, Tucker, CP) is made dense
once per forward; so is one whose split would cost as much as the dense product.
"""

from __future__ import annotations

from torch import Tensor

from kronecell.nn.linear import TensorLinear, split_text
from kronecell.nn.quantized import QuantizedHidden, QuantizedLinear
from kronecell.nn.splitting import SplitText, matrices_of
from kronecell.ops.registration import constant_when_traced
from kronecell.plans.plan import plan_of


def hidden_matrices(weight: Tensor | TensorLinear | QuantizedLinear) -> list[Tensor] | QuantizedHidden:
    """U as the operators take it; differentiable unless it is of integers."""
    if isinstance(weight, QuantizedLinear):
        return weight.hidden()
    if not isinstance(weight, TensorLinear):
        return [weight]
    split = _worthwhile(weight)
    return [weight.dense_weight()] if split is None else [*matrices_of(split, weight.factors())]


def is_split(weight: Tensor | TensorLinear) -> bool:
    """Whether the recurrence runs over In and Out of this matrix."""
    return isinstance(weight, TensorLinear) and _worthwhile(weight) is not None


def macs_of(weight: TensorLinear) -> tuple[int, int]:
    """Multiply-adds of one row of h in the form that runs, and those that make this form, once per forward."""
    split = _worthwhile(weight)
    if split is None:
        return weight.in_features * weight.out_features, weight.dense_plan().hoisted_macs
    return split.macs, split.hoisted_macs


def explain_hidden(weight: TensorLinear) -> str:
    """In which form U runs, what that costs, and the plans that compute this form from the factors."""
    split, (macs, once) = _worthwhile(weight), macs_of(weight)
    costs = f"{macs:,} multiply-adds a row and step, {once:,} once per forward"
    if split is None:
        return f"U {weight.format}, made dense: {costs}\n{weight.dense_plan()}"
    between = f"{split.columns} columns between{' of all gates' if split.own_columns else ''}"
    plans = f"{plan_of(split.inner)}\n\n{plan_of(split.outer)}"
    return f"U {weight.format}, run as h In and In Out with {between}: {costs}\n{plans}"


def _worthwhile(weight: TensorLinear) -> SplitText | None:
    """The split of a matrix, if it saves enough; one that is a sum over processes has none of its own."""
    return _worthwhile_split(weight.matrix) if type(weight) is TensorLinear else None


@constant_when_traced
def _worthwhile_split(matrix: str) -> SplitText | None:
    split = split_text(matrix)
    return split if split is not None and split.pays else None
