"""What a format, a layer or a model costs. One multiply-add counts as one; `flops` is twice that.

The paper's "MFLOPs" are millions of multiply-adds; its other conventions live in paper.py, under names that say so.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from kronecell.errors import KronecellError
from kronecell.formats.base import Format, Shared
from kronecell.nn.linear import TensorLinear
from kronecell.nn.recurrent import Recurrent

COUNT_ROWS = 96  # rows for which a layer that chooses its order itself is counted: 16 clips of 6 frames


@dataclass(frozen=True)
class Cost:
    """Parameters and multiply-adds beside those of the uncompressed matrices; multiply-adds are per row of input."""

    params: int
    dense_params: int
    macs: int
    dense_macs: int
    hoisted_macs: int = 0

    @property
    def ratio(self) -> float:
        """Compression ratio: uncompressed parameters over parameters."""
        return self.dense_params / max(1, self.params)

    @property
    def flops(self) -> int:
        """2 * macs."""
        return 2 * self.macs

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.params + other.params,
            self.dense_params + other.dense_params,
            self.macs + other.macs,
            self.dense_macs + other.dense_macs,
            self.hoisted_macs + other.hoisted_macs,
        )

    def __str__(self) -> str:
        return (
            f"{self.params:,} parameters ({self.ratio:,.1f}x fewer than {self.dense_params:,}), "
            f"{self.macs:,} multiply-adds a row (dense {self.dense_macs:,}), "
            f"{self.hoisted_macs:,} once per weight update"
        )


def count_format(
    fmt: Format, *, gates: int = 1, shared: Shared = False, order: str | None = None, rows: int = 1
) -> Cost:
    """Cost of one matrix, or of the matrices of several gates, in a format. Works on shapes; allocates nothing."""
    plan = fmt.plan(order, rows, gates=gates, shared=shared)
    dense = gates * fmt.M * fmt.N
    return Cost(plan.network.num_params, dense, plan.macs, dense, plan.hoisted_macs)


def count(thing: Format | nn.Module, *, gates: int = 1, shared: Shared = False, order: str | None = None) -> Cost:
    """Cost of a format, or of a whole model: every parameter counted, multiply-adds per row (per time step).

    In a model, the matrices of Linear, LSTM and GRU layers are counted, ours and torch's; biases count as parameters
    only, and the dense figures are those of the same model with nothing compressed.

    >>> count(nn.Linear(8, 4)).params
    36
    """
    if isinstance(thing, Format):
        return count_format(thing, gates=gates, shared=shared, order=order)
    if not isinstance(thing, nn.Module):
        raise KronecellError(f"count() takes a Format or a torch module, got {type(thing).__name__}")
    return sum((_own(module) for module in thing.modules()), Cost(0, 0, 0, 0))


def _own(module: nn.Module) -> Cost:
    """What a module holds itself, its children excepted."""
    numbers = sum(p.numel() for p in module.parameters(recurse=False))
    if isinstance(module, TensorLinear):
        order = None if module.order == "auto" else module.order
        plan = module.format.plan(order or "optimal", COUNT_ROWS, gates=module.gates, shared=module.shared)
        matrix = module.in_features * module.out_features
        stored = plan.network.num_params
        return Cost(numbers, numbers - stored + matrix, plan.macs, matrix, plan.hoisted_macs)
    multiplies = isinstance(module, nn.Linear | nn.RNNBase | Recurrent)
    macs = sum(p.numel() for p in module.parameters(recurse=False) if p.ndim == 2) if multiplies else 0
    return Cost(numbers, numbers, macs, macs)
