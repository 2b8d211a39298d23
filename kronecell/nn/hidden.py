"""How a recurrence gets its hidden matrix U: dense, or split into In and Out with few columns between.

The operators take [U] with U (gates * H, P), [In (r, P), Out (r, gates * H)], or [In (gates * r, P), Out (gates, r, H)]
where every gate has columns of its own. A format whose factors lie on both sides (TT, BT, HT, Tucker, CP) is made dense
once per forward; so is one whose split would cost as much as the dense product.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from kronecell.nn.linear import TensorLinear
from kronecell.nn.quantized import QuantizedHidden, QuantizedLinear
from kronecell.nn.splitting import matrices_of
from kronecell.ops.registration import constant_when_traced
from kronecell.plans.network import Network
from kronecell.plans.split import Split, split_of

WORTH_SPLITTING = 0.8  # a split with more than so much of the dense multiply-adds is not faster: two products, not one


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
    once = split.inner.hoisted_macs + split.outer.hoisted_macs
    return split.width * weight.in_features + split.rank * weight.out_features, once


def explain_hidden(weight: TensorLinear) -> str:
    """In which form U runs, what that costs, and the plans that compute this form from the factors."""
    split, (macs, once) = _worthwhile(weight), macs_of(weight)
    costs = f"{macs:,} multiply-adds a row and step, {once:,} once per forward"
    if split is None:
        return f"U {weight.format}, made dense: {costs}\n{weight.dense_plan()}"
    between = f"{split.width} columns between{' of all gates' if split.gated else ''}"
    return f"U {weight.format}, run as h In and In Out with {between}: {costs}\n{split.inner}\n\n{split.outer}"


@constant_when_traced
def _worthwhile(weight: TensorLinear) -> Split | None:
    if type(weight) is not TensorLinear:  # one that is a sum over processes has no split of its own
        return None
    return _worthwhile_split(weight.format.network(weight.gates, weight.shared), weight.in_features)


@lru_cache(maxsize=256)
def _worthwhile_split(network: Network, width: int) -> Split | None:
    split = split_of(network)
    if split is None:
        return None
    outputs = 1
    for size in network.shape(network.outputs):
        outputs *= size
    return split if split.width * width + split.rank * outputs <= WORTH_SPLITTING * width * outputs else None
