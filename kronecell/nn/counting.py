"""kc.count: the cost of a format, a layer or a whole model, as it is executed."""

from __future__ import annotations

from torch import nn

from kronecell.errors import KronecellError
from kronecell.formats.base import Format, Shared
from kronecell.nn.embedding import TensorEmbedding
from kronecell.nn.hidden import macs_of
from kronecell.nn.linear import TensorLinear
from kronecell.nn.quantized import QuantizedEmbedding, QuantizedLinear, integer_weights
from kronecell.nn.recurrent import Recurrent
from kronecell.nn.sparse import SparseMatrix
from kronecell.ops.choose import executed_macs
from kronecell.plans.counting import Cost
from kronecell.plans.sparse import Sparse

COUNT_ROWS = 96  # rows for which a layer that chooses its order itself is counted: 16 clips of 6 frames


def count_format(
    fmt: Format, *, gates: int = 1, shared: Shared = False, order: str | None = None, rows: int = 1
) -> Cost:
    """Cost of one matrix, or of the matrices of several gates, in a format. Works on shapes; allocates nothing."""
    plan, sparse = fmt.plan(order, rows, gates=gates, shared=shared), fmt.sparse(gates)
    dense = gates * fmt.M * fmt.N
    cost = Cost(plan.network.num_params, dense, plan.macs, dense, plan.hoisted_macs)
    return cost if sparse is None else cost + _entries(sparse)


def _entries(sparse: Sparse) -> Cost:
    """Of a sparse matrix beside a structure, whose dense twin has both."""
    return Cost(sparse.num_values, 0, sparse.num_values, 0, 0, sparse.index_bytes)


def count(thing: Format | nn.Module, *, gates: int = 1, shared: Shared = False, order: str | None = None) -> Cost:
    """Cost of a format, or of a whole model: every parameter counted, multiply-adds per row (per time step).

    In a model, the matrices of Linear, LSTM and GRU layers and of cells are counted, ours and torch's, by the plans
    that they run for 96 rows (in training where gradients are enabled). Biases count as parameters only, and the dense
    figures are those of the same model with nothing compressed. A format alone is counted by its first order, or by
    `order`.

    >>> count(nn.Linear(8, 4)).params
    36
    """
    if isinstance(thing, Format):
        return count_format(thing, gates=gates, shared=shared, order=order)
    if not isinstance(thing, nn.Module):
        raise KronecellError(f"count() takes a Format or a torch module, got {type(thing).__name__}")
    return sum((_own(module) for module in thing.modules()), Cost(0, 0, 0, 0))


def _own(module: nn.Module) -> Cost:
    """What a module holds itself; a recurrent layer answers for its matrices."""
    numbers = sum(p.numel() for p in module.parameters(recurse=False))
    if isinstance(module, SparseMatrix):
        return Cost(module.size.num_values, 0, 0, 0, 0, module.size.index_bytes)
    if isinstance(module, TensorLinear):
        # Values of a sparse matrix beside it are counted by that, also as integers.
        integers = getattr(module, "quantized", None)
        stored = 0 if integers is None else integer_weights(integers)
        return _matrix(module, numbers + stored, *_linear_macs(module))
    if isinstance(module, TensorEmbedding):
        lookup, dense = module.lookup, module.num_embeddings * module.embedding_dim
        held = module.is_held  # a row is copied
        return Cost(module.num_params, dense, 0 if held else lookup.macs, 0, 0 if held else lookup.hoisted_macs)
    if isinstance(module, QuantizedEmbedding):
        return Cost(module.num_weights, module.num_weights, 0, 0)
    if isinstance(module, QuantizedLinear):
        numbers += module.num_weights
        return Cost(numbers, numbers, module.num_weights, module.num_weights)
    multiplies = isinstance(module, nn.Linear | nn.RNNBase | nn.RNNCellBase | Recurrent)
    macs = sum(p.numel() for p in module.parameters(recurse=False) if p.ndim == 2) if multiplies else 0
    if not isinstance(module, Recurrent):
        return Cost(numbers, numbers, macs, macs)
    total = Cost(numbers, numbers, macs, macs)
    for name, weight in module.named_children():
        if isinstance(weight, TensorLinear) and name.startswith("weight_hh"):
            # U runs split or dense, not by the plan of a layer: its macs replace those counted for the child.
            (counted, hoisted), (macs, once) = _linear_macs(weight), macs_of(weight)
            total += Cost(0, 0, macs - counted, 0, once - hoisted)
    return total


def _linear_macs(layer: TensorLinear) -> tuple[int, int]:
    """Multiply-adds of a row, and those once per forward."""
    plan = layer.plan(COUNT_ROWS)
    if layer.sparse is None:
        return executed_macs(plan), plan.hoisted_macs
    if not layer.is_dense(plan.text):
        return executed_macs(plan) + layer.sparse.size.num_values, plan.hoisted_macs
    once = 0 if layer.frozen else layer.dense_plan().hoisted_macs
    return layer.in_features * layer.out_features, once


def _matrix(layer: TensorLinear, numbers: int, macs: int, hoisted: int) -> Cost:
    stored = layer.format.network(layer.gates, layer.shared).num_params
    dense = layer.in_features * layer.out_features
    return Cost(numbers, numbers - stored + dense, macs, dense, hoisted)
