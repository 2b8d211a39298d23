"""x W for all four gates in every format, beside the dense layer, the limits of memory, and other libraries.

    python -m benchmarks.projection [--quick] [--results FOLDER]

All cases of a number of rows are timed in turn in one run. Forward is in eval mode without gradients; forward and
backward goes to the parameters, x needs no gradient. "auto" is tuned (with the choices of benchmarks/auto.py, or
measured by kc.tune where there are none), "untuned" has the cost model only, the other names are the paper's orders.
The limits: reading x once (X.sum()), copying it, and one product with 16 columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import kronecell as kc
from benchmarks.auto import CHOICES
from benchmarks.peers import Peer, layers
from benchmarks.results import Options, available_memory, machine, main, table, write
from benchmarks.shapes import GATES, MAIN, formats, small_formats
from benchmarks.timing import Call, inference, interleave, ratio, sample, summary, threads, training
from kronecell.formats import KCP, Format
from kronecell.ops.contract import apply, prepare
from kronecell.ops.tune import choices as measured
from kronecell.plans.plan import Plan

REFERENCES = ("dense", "X.sum()", "skinny GEMM")
# Beside forward and backward. The forward makes the products of weights as there, but nothing that only gradients need,
# of which KCP makes much before the backward; then with that, and frozen, with the products of weights held.
FORWARD = f"{MAIN} unshared, its forward"
LEARNING = f"{MAIN} unshared, its forward with what the backward needs"
FROZEN = f"{MAIN} unshared, forward frozen"
OWN = (
    FORWARD,
    LEARNING,
    FROZEN,
    f"{MAIN} unshared untuned",
    f"{MAIN} unshared auto",
)  # references that are in no table
ROWS = (1, 6, 96, 384)
PEER_ROWS = 96
SLOW_PEER = 1.0  # seconds
PAPER_ROWS = 6  # the paper's orders take seconds and gigabytes at more


@dataclass(frozen=True)
class Group:
    """Cases that are timed in turn."""

    dataset: str
    rows: int
    grad: bool
    threads: int = 1

    @property
    def title(self) -> str:
        """For people."""
        what = "forward and backward" if self.grad else "forward"
        return f"{self.dataset}, {self.rows} rows, {what}, {self.threads} thread{'s' if self.threads > 1 else ''}"


class Settled(kc.TensorLinear):
    """A layer that always runs the plan chosen when it was made, whatever is tuned later; it holds no products."""

    def __init__(self, fmt: Format, shared: bool, rows: int, grad: bool) -> None:
        super().__init__(fmt, gates=GATES, shared=shared)
        self.train(grad)
        with torch.set_grad_enabled(grad):
            self.fixed: Plan = super().plan(rows)

    def plan(self, rows: int) -> Plan:
        """That plan."""
        return self.fixed

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W + bias by that plan."""
        plan = self.fixed.text
        return apply(plan, x, prepare(plan, self.factors()), bias)


def settled(fmt: Format, shared: bool, group: Group) -> kc.TensorLinear:
    """A layer with the plan that is chosen now: frozen for inference."""
    if group.grad:
        return Settled(fmt, shared, group.rows, True)
    return kc.freeze(kc.TensorLinear(fmt, gates=GATES, shared=shared), rows=(group.rows,))


def limits(x: Tensor, outputs: int, grad: bool, dense: bool) -> dict[str, Call]:
    """What everything is compared with."""
    skinny = nn.Linear(x.shape[1], 16, bias=False)
    columns = skinny.weight.detach().T.contiguous()
    cases: dict[str, Call] = {"X.sum()": inference(lambda: x.sum()), "X.clone()": inference(lambda: x.clone())}
    cases["skinny GEMM"] = training(skinny, x) if grad else inference(lambda: x @ columns)
    if dense:
        linear = nn.utils.skip_init(nn.Linear, x.shape[1], outputs)
        nn.init.uniform_(linear.weight, -0.01, 0.01)
        nn.init.zeros_(linear.bias)
        cases["dense"] = training(linear, x) if grad else inference(lambda: linear(x))
    return cases


def ours(known: dict[str, Format], x: Tensor, group: Group, options: Options | None) -> dict[str, Call]:
    """Our layers: untuned, tuned where another plan was chosen, and the paper's orders."""
    cases: dict[str, Call] = {}
    for label, fmt in known.items():
        for shared in (False, True):
            name = f"{label} {'shared' if shared else 'unshared'}"
            measured.forget()
            untuned = settled(fmt, shared, group)
            cases[f"{name} untuned"] = _call(untuned, x, group.grad)
            if label == MAIN and not group.grad:
                ordinary = Settled(fmt, shared, group.rows, group.grad)
                cases[f"{name} ordinary"] = _call(ordinary, x, group.grad)
            if options is not None:
                path = options.results / CHOICES
                if path.exists():
                    kc.load_choices(path)
                else:
                    kc.tune(kc.TensorLinear(fmt, gates=GATES, shared=shared).train(group.grad), x)
                tuned = settled(fmt, shared, group)
                if tuned.plan(group.rows) != untuned.plan(group.rows):
                    cases[f"{name} auto"] = _call(tuned, x, group.grad)
            if group.rows == PAPER_ROWS and group.threads == 1 and not group.grad:
                orders = ("algorithm1", "algorithm2") if isinstance(fmt, KCP) else (next(iter(fmt.orders())),)
                for order in orders:
                    given = kc.TensorLinear(fmt, order=order, gates=GATES, shared=shared)
                    cases[f"{name} {order}"] = _call(kc.freeze(given, rows=(group.rows,)), x, grad=False)
    if group.grad and MAIN in known:
        learning = kc.TensorLinear(known[MAIN], gates=GATES)
        cases |= {FORWARD: _call(learning, x, grad=False), LEARNING: lambda: learning(x)}
        cases[FROZEN] = _call(kc.freeze(learning, rows=(group.rows,)), x, grad=False)
    return cases


def _call(layer: nn.Module, x: Tensor, grad: bool) -> Call:
    return training(layer, x) if grad else inference(lambda: layer(x))


def bytes_cases(known: dict[str, Format], rows: int) -> dict[str, Call]:
    """The untuned layers fed with uint8, which counts as a number from 0 to 1."""
    cases = {}
    for label, fmt in known.items():
        x = torch.randint(0, 256, (rows, fmt.M), dtype=torch.uint8)
        layer = kc.freeze(kc.TensorLinear(fmt, gates=GATES), rows=(rows,))
        cases[f"{label} unshared uint8"] = _call(layer, x, grad=False)
    return cases


def runnable(cases: dict[str, Call]) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of the first call of the cases that run, and why the rest do not."""
    seconds, reasons = {}, {}
    for name, call in cases.items():
        try:
            seconds[name] = sample(call, 1)
        except Exception as error:  # the reason is reported, whatever it is
            reasons[name] = f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}"
    return seconds, reasons


def measure(group: Group, options: Options, peers: list[Peer], slow: dict[str, float]) -> dict[str, Any]:
    """Time one group: seconds and ratios to the references by case, and what could not run.

    `slow` collects the peers whose forward takes long; with backward they are left out.
    """
    known = small_formats() if options.quick else formats(group.dataset)
    fmt = known["TT"]
    x = torch.randn(group.rows, fmt.M)
    tuned = options if group.threads == 1 and group.dataset == "UCF11" else None
    dense_gigabytes = (3 if group.grad else 1) * 4 * GATES * fmt.M * fmt.N / 1e9
    dense = dense_gigabytes < 0.5 * available_memory() and not (group.grad and dense_gigabytes > 1)
    cases = limits(x, GATES * fmt.N, group.grad, dense) | ours(known, x, group, tuned)
    reasons: dict[str, str] = {} if dense else {"dense": "left out: takes too much memory or time here"}
    extra: dict[str, Call] = {}
    if group.rows == PEER_ROWS and group.threads == 1 and group.dataset == "UCF11":
        reasons |= {peer.label: peer.reason for peer in peers if peer.module is None}
        reasons |= {label: f"left out: forward alone takes {seconds:.1f} s" for label, seconds in slow.items()}
        modules = {peer.label: peer.module for peer in peers if peer.module is not None and peer.label not in slow}
        extra |= {label: _call(module.train(group.grad), x, group.grad) for label, module in modules.items()}
    if group.rows == max(ROWS) or options.quick:
        extra |= bytes_cases(known, group.rows)
    called, more = runnable(extra)
    slow |= {label: seconds for label, seconds in called.items() if seconds > SLOW_PEER}
    cases, reasons = cases | {name: extra[name] for name in called}, reasons | more
    repeats, budget = (1, 0.0) if options.quick else (15, 0.35)
    full = [name for name in cases if name == "dense" or (name.startswith(MAIN) and "algorithm" not in name)]
    samples = interleave(cases, repeats, budget, always=[] if group.dataset == "UCF50" else full, called=called)
    found = {}
    for name in cases:
        over = {ref: ratio(samples, name, ref).as_dict() for ref in (*REFERENCES, *OWN) if ref in samples}
        found[name] = {**summary(samples[name]).as_dict(), "over": over}
    return {"title": group.title, **vars(group), "cases": found, "not run": reasons}


def groups(quick: bool) -> Iterator[Group]:
    """Everything that is measured."""
    if quick:
        yield from (Group("small", 6, grad) for grad in (False, True))
        return
    for rows in ROWS:
        yield Group("UCF11", rows, grad=False)
    yield Group("UCF11", PEER_ROWS, grad=True)
    yield Group("UCF11", PEER_ROWS, grad=False, threads=2)
    for rows in (1, PEER_ROWS):
        yield Group("UCF50", rows, grad=False)


def tables(results: list[dict[str, Any]]) -> str:
    """A Markdown table for every group."""
    text = ""
    for result in results:
        lines = []
        for name, case in result["cases"].items():
            shown = []
            for reference in REFERENCES:
                found = case["over"].get(reference)
                shown.append(f"{found['seconds']:.3g} ({found['low']:.3g} to {found['high']:.3g})" if found else "")
            strong = f"**{name}**" if name.startswith(MAIN) else name
            lines.append((strong, *shown, f"{case['seconds'] * 1e3:.3f}", case["repeats"]))
        head = ("case", *(f"over {reference}" for reference in REFERENCES), "ms", "repeats")
        text += f"## {result['title']}\n\n{table(head, lines)}\n"
        text += "".join(f"- not run: {name}: {reason}\n" for name, reason in result["not run"].items())
        text += "\n" if result["not run"] else ""
    return text.rstrip() + "\n"


def run(options: Options) -> None:
    """Measure every group and report."""
    peers = [] if options.quick else layers()
    results: list[dict[str, Any]] = []
    slow: dict[str, float] = {}
    for group in groups(options.quick):
        options.say(f"projection: {group.title}")
        with threads(group.threads):
            results.append(measure(group, options, peers, slow))
    measured.forget()
    text = f"""# Products with x, all four gates

{machine((1, 2))} Ratios are medians of ratios in the same round, with quartiles. Where "auto" is missing it takes the
same way as "untuned". One thread is timed in processor seconds, two in elapsed seconds. "Four layers" and "unshared"
have a matrix per gate of their own, all other cases share factors between the gates.

{tables(results)}"""
    write(options, "projection", {"groups": results}, text)


if __name__ == "__main__":
    main(run, __doc__)
