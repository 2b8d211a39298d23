"""What a format costs, as data: the document of `kronecell count --json`, and what `kronecell explore` shows."""

from __future__ import annotations

from typing import Any

from kronecell.errors import ShapeError
from kronecell.formats import Format, Shared


def describe(fmt: Format, rows: int, gates: int, shared: Shared, order: str | None) -> dict[str, Any]:
    """Everything `kronecell count` prints, as data."""
    if rows < 1:
        raise ShapeError(f"--rows must be at least 1, got {rows}")
    network, sparse = fmt.network(gates, shared), fmt.sparse(gates)
    entries = 0 if sparse is None else sparse.num_values
    params = network.num_params + entries
    dense = gates * fmt.M * fmt.N
    names = [order] if order else [*fmt.orders(), "optimal"]
    orders = {}
    for name in names:
        plan = fmt.plan(name, rows, gates=gates, shared=shared)
        orders[name] = {
            "macs": plan.macs + entries,
            "flops": plan.flops + 2 * entries,
            "hoisted_macs": plan.hoisted_macs,
            "total_macs": plan.total_macs + rows * entries,
            "peak": plan.peak,
        }
    return {
        "format": str(fmt),
        "M": fmt.M,
        "N": fmt.N,
        "gates": gates,
        "shared": shared if isinstance(shared, bool) else [*shared],
        "rows": rows,
        "params": params,
        "dense_params": dense,
        "compression_ratio": dense / params,
        "factors": {name: [*shape] for name, shape in network.shapes.items()},
        "orders": orders,
    } | ({} if sparse is None else {"sparse": {"values": entries, "index_bytes": sparse.index_bytes}})
