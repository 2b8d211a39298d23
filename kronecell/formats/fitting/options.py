"""Limits and progress of a fit: one immutable record that `from_dense` passes down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kronecell.errors import RankError, ShapeError

GIGABYTE = 1 << 30


@dataclass(frozen=True)
class FitOptions:
    """Limits of one fit.

    refine      lower the error of the whole network after the closed-form start
    sweeps      refinement rounds at most, over all factors each
    joint       end with steps of all factors at once where they are few (far better fits, several times the time)
    tolerance   stop when a round lowers the relative error by less than this part
    starts      random starts besides the closed form; None is the format's own number
    seed        of everything random
    max_memory  bytes above the arguments; a fit that would need more is refused before it starts
    progress    called with one line of text every few steps
    """

    refine: bool = True
    sweeps: int = 100
    joint: bool = True
    tolerance: float = 1e-5
    starts: int | None = None
    seed: int = 0
    max_memory: int = 4 * GIGABYTE
    progress: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        if self.sweeps < 0 or self.tolerance < 0 or (self.starts is not None and self.starts < 0):
            raise RankError(
                f"from_dense: sweeps, tolerance and starts must not be negative, got sweeps={self.sweeps}, "
                f"tolerance={self.tolerance}, starts={self.starts}"
            )

    def report(self, text: str) -> None:
        """Call `progress`, if there is one."""
        if self.progress is not None:
            self.progress(text)

    def check_memory(self, needed: int, what: str) -> None:
        """Refuse a fit that would need more than `max_memory` bytes."""
        if needed > self.max_memory:
            raise ShapeError(
                f"fitting {what} would need about {needed / GIGABYTE:.2f} GB besides W, more than max_memory = "
                f"{self.max_memory / GIGABYTE:.2f} GB; raise max_memory, lower the ranks, or use other modes"
            )
