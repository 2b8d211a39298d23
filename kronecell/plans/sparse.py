"""A sparse matrix written down as data: its size, how many entries it has, and how wide its indices are. No tensor.

It is stored as torch stores W, (outputs, inputs). `block` outputs that lie together share one index; the places of
blocks are numbered output by output, and stored as gaps, the distance of every place from the one before. A gap takes
one, two or four bytes, by the density alone: shapes of files do not depend on where the entries are.
"""

from __future__ import annotations

from dataclasses import dataclass

from kronecell.errors import ShapeError

# Bytes of a gap for places this far apart on average: random gaps are seldom three times as long.
WIDTHS = ((1, 100), (2, 10_000))
LONGEST = {1: 2**8 - 1, 2: 2**15 - 1, 4: 2**31 - 1}


@dataclass(frozen=True)
class Sparse:
    """(outputs, inputs) with `count` blocks of `block` entries each."""

    outputs: int
    inputs: int
    count: int
    block: int = 1

    @staticmethod
    def of(outputs: int, inputs: int, density: float, block: int = 1) -> Sparse:
        """At most this share of the entries; density 1 is all of them."""
        if outputs % block:
            raise ShapeError(f"blocks of {block} outputs need outputs that are a multiple of it, got {outputs}")
        places = outputs // block * inputs
        return Sparse(outputs, inputs, min(places, int(density * places + 1e-9)), block)

    @property
    def places(self) -> int:
        """Where a block may lie."""
        return self.outputs // self.block * self.inputs

    @property
    def num_values(self) -> int:
        """Entries, each of which is one multiply-add a row."""
        return self.count * self.block

    @property
    def gap_bytes(self) -> int:
        """Of one index."""
        apart = self.places / max(self.count, 1)
        return next((width for width, most in WIDTHS if apart <= most), 4)

    @property
    def longest_gap(self) -> int:
        """What such an index can say."""
        return LONGEST[self.gap_bytes]

    @property
    def index_bytes(self) -> int:
        """Of all indices."""
        return self.count * self.gap_bytes
