"""What a format, a layer or a model costs. One multiply-add counts as one; `flops` is twice that.

The paper's "MFLOPs" are millions of multiply-adds; its other conventions have names that say so.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Parameters and multiply-adds beside those of the uncompressed matrices; multiply-adds are per row of input."""

    params: int
    dense_params: int
    macs: int
    dense_macs: int
    hoisted_macs: int = 0
    index_bytes: int = 0  # of the places of sparse entries, whose values are among the parameters

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
            self.index_bytes + other.index_bytes,
        )

    def __str__(self) -> str:
        return (
            f"{self.params:,} parameters ({self.ratio:,.1f}x fewer than {self.dense_params:,}), "
            f"{self.macs:,} multiply-adds a row (dense {self.dense_macs:,}), "
            f"{self.hoisted_macs:,} once per weight update"
            + (f", {self.index_bytes:,} bytes of indices" if self.index_bytes else "")
        )
