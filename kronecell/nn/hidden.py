"""How a recurrence gets its hidden matrix U: dense, or split into In and Out with few columns between.

The operators take [U] with U (gates * H, P), [In (r, P), Out (r, gates * H)], or [In (gates * r, P), Out (gates, r, H)]
where every gate has columns of its own, and after In and Out the values and places of a sparse matrix, when frozen also
what is prepared of them. A format whose factors lie on both sides (TT, BT, HT, Tucker, CP) is made dense once per
forward; so is one whose split would cost as much as the dense product.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kronecell.nn.layer_plans import split_text
from kronecell.nn.linear import TensorLinear
from kronecell.nn.quantized import QuantizedHidden, QuantizedLinear
from kronecell.nn.sparse import PRICE, added
from kronecell.nn.splitting import WORTH_SPLITTING, SplitText, matrices_of
from kronecell.ops.registration import constant_when_traced
from kronecell.ops.sparse import sparse_prepared
from kronecell.plans.plan import plan_of


def hidden_matrices(weight: Tensor | TensorLinear | QuantizedLinear) -> list[Tensor] | QuantizedHidden:
    """U as the operators take it; differentiable unless it is of integers."""
    if isinstance(weight, QuantizedLinear):
        return weight.hidden()
    if not isinstance(weight, TensorLinear):
        return [weight]
    split, sparse = _worthwhile(weight), weight.sparse
    if sparse is None:
        return [weight.dense_weight()] if split is None else [*matrices_of(split, weight.factors())]
    scales = sparse.scales()
    if split is None:
        return [added(weight.structure_weight(), sparse, scales)]
    In, Out = matrices_of(split, weight.factors())
    if scales is None:
        return [In, Out, *sparse.stored()]
    columns = scales[0] if Out.ndim == 2 else scales[0].reshape(split.gates, 1, -1)
    return [In, Out * columns, sparse.scaled(scales[1]), sparse.places]


def prepared_hidden(hidden: Sequence[Tensor]) -> list[Tensor]:
    """The same for many calls: a sparse part as the kernels read it."""
    if len(hidden) != 4:
        return [*hidden]
    In, Out, values, places = hidden
    outputs = Out.shape[-1] * (1 if Out.ndim == 2 else Out.shape[0])
    return [*hidden, sparse_prepared(values, places, outputs, In.shape[1])]


def is_split(weight: Tensor | TensorLinear) -> bool:
    """Whether the recurrence runs over In and Out of this matrix."""
    return isinstance(weight, TensorLinear) and _worthwhile(weight) is not None


def macs_of(weight: TensorLinear) -> tuple[int, int]:
    """Multiply-adds of one row of h in the form that runs, and those that make this form, once per forward."""
    split = _worthwhile(weight)
    if split is None:
        return weight.in_features * weight.out_features, weight.dense_plan().hoisted_macs
    return split.macs + _entries(weight), split.hoisted_macs


def explain_hidden(weight: TensorLinear) -> str:
    """In which form U runs, what that costs, and the plans that compute this form from the factors."""
    split, (macs, once) = _worthwhile(weight), macs_of(weight)
    costs = f"{macs:,} multiply-adds a row and step, {once:,} once per forward"
    if weight.sparse is not None:
        costs += f"\n{weight.sparse.explain(split is None)}"
    if split is None:
        return f"U {weight.format}, made dense: {costs}\n{weight.dense_plan()}"
    between = f"{split.columns} columns between{' of all gates' if split.own_columns else ''}"
    plans = f"{plan_of(split.inner)}\n\n{plan_of(split.outer)}"
    return f"U {weight.format}, run as h In and In Out with {between}: {costs}\n{plans}"


def _worthwhile(weight: TensorLinear) -> SplitText | None:
    """The split of a matrix, if it saves enough; one that is a sum over processes has none of its own."""
    return _worthwhile_split(weight.matrix, _entries(weight)) if type(weight) is TensorLinear else None


def _entries(weight: TensorLinear) -> int:
    return 0 if weight.sparse is None else weight.sparse.entries.numel()


@constant_when_traced
def _worthwhile_split(matrix: str, entries: int) -> SplitText | None:
    """Entries of S take longer than as many of In and Out."""
    split = split_text(matrix)
    if split is None or not split.pays:
        return None
    dense = split.width * split.outputs
    return split if split.macs + PRICE * entries <= WORTH_SPLITTING * dense or not entries else None
