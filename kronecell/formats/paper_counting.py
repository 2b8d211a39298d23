"""How the paper counts a format, where that is neither what a machine stores nor what it executes.

The tables of `kronecell.paper` and the records of training runs both quote these figures. Two conventions differ from
ours: HT's root transfer is counted as r^3 parameters (it has r^2), and with shared weights the steps of unshared
factors count once per gate and all other steps once (a step after the gate index has appeared runs once per gate too).
"""

from __future__ import annotations

from kronecell.formats.base import Format, Shared
from kronecell.formats.ht import HT
from kronecell.formats.kcp import KCP


def paper_order(fmt: Format) -> str | None:
    """The order that the paper's tables count: Algorithm 2 for KCP, the format's default (None) otherwise."""
    return "algorithm2" if isinstance(fmt, KCP) else None


def paper_params(fmt: Format, gates: int, shared: bool) -> int:
    """Parameters of W as the paper counts them: HT's root as r^3."""
    params = fmt.network(gates, shared).num_params
    return params + (_root_excess(fmt) * (1 if shared else gates))


def paper_macs(fmt: Format, gates: int, shared: Shared) -> int:
    """Multiply-adds of W x for all gates as the paper counts them (not as executed when shared).

    `shared` may also name the unshared factors, a choice the paper studies but does not tabulate.
    """
    steps = [step for step in fmt.plan(paper_order(fmt)).steps if not step.hoisted]
    if shared is False:
        return gates * sum(step.macs for step in steps)
    unshared = {*fmt.unshared} if shared is True else {shared} if isinstance(shared, str) else {*shared}
    return sum(step.macs * (gates if {step.left, step.right} & unshared else 1) for step in steps)


def _root_excess(fmt: Format) -> int:
    if not isinstance(fmt, HT) or fmt.d == 1:
        return 0
    left, right = fmt.network().shapes[f"B1_{fmt.d}"]
    return left * right * (max(left, right) - 1)
