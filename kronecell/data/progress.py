"""Progress on stderr: a bar on a terminal, a plain line every few seconds elsewhere, nothing for quick work."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
QUIET = 2.0  # seconds before the first plain line
EVERY = 5.0  # seconds between plain lines


def track(items: Iterable[Item], total: int, label: str, show: bool = True) -> Iterator[Item]:
    """Yield the items and show the progress."""
    if not show:
        yield from items
    elif sys.stderr.isatty():
        yield from _bar(items, total, label)
    else:
        yield from _lines(items, total, label)


def _bar(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:  # the bar is optional; plain lines say the same
        yield from _lines(items, total, label)
        return
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        for item in items:
            progress.advance(task)
            yield item


def _lines(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    start = time.monotonic()
    last = start + QUIET - EVERY
    for done, item in enumerate(items, 1):
        now = time.monotonic()
        if now - last >= EVERY:
            left = (now - start) / done * (total - done)
            print(f"{label}: {done} of {total}, {left:.0f} s left", file=sys.stderr, flush=True)
            last = now
        yield item
