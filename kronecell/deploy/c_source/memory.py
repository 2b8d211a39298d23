"""Places for buffers in one piece of memory: two that are needed at the same time do not overlap."""

from __future__ import annotations

from collections.abc import Sequence


def place(sizes: Sequence[int], conflicts: set[tuple[int, int]]) -> tuple[list[int], int]:
    """Where each buffer starts, and the size of all; `conflicts` are pairs (i, j) with i < j. The largest go first."""
    offsets: dict[int, int] = {}
    for now in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        taken = sorted(
            (offsets[other], offsets[other] + sizes[other])
            for other in offsets
            if (min(now, other), max(now, other)) in conflicts
        )
        start = 0
        for first, end in taken:
            if start + sizes[now] <= first:
                break
            start = max(start, end)
        offsets[now] = start
    total = max((offsets[i] + sizes[i] for i in offsets), default=0)
    return [offsets[i] for i in range(len(sizes))], total
