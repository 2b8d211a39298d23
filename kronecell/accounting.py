"""What a format, a layer or a model costs. One multiply-add counts as one; `flops` is twice that.

The paper's "MFLOPs" are millions of multiply-adds; its other conventions live in paper.py, under names that say so.
"""

from __future__ import annotations

from dataclasses import dataclass

from kronecell.errors import KronecellError
from kronecell.formats.base import Format, Shared


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
        return self.dense_params / self.params

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


def count(thing: object, *, gates: int = 1, shared: Shared = False, order: str | None = None) -> Cost:
    """Cost of a format."""
    if isinstance(thing, Format):
        return count_format(thing, gates=gates, shared=shared, order=order)
    raise KronecellError(f"count() takes a Format or a torch module, got {type(thing).__name__}")
