"""Which plan to run: every order a format offers, priced for the number of rows at hand."""

from __future__ import annotations

from functools import lru_cache

from kronecell.formats.base import Format, Shared
from kronecell.plan import Plan


def auto_plan(fmt: Format, rows: int, *, gates: int = 1, shared: Shared = False) -> Plan:
    """The plan with the fewest multiply-adds for this number of rows."""
    key = shared if isinstance(shared, bool) else tuple(shared)
    return _cheapest(fmt, rows, gates, key)


@lru_cache(maxsize=1024)
def _cheapest(fmt: Format, rows: int, gates: int, shared: bool | tuple[str, ...]) -> Plan:
    return fmt.plan("optimal", rows, gates=gates, shared=shared)
