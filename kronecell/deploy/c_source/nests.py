"""One step of a chain as loops around a small product, and the layouts of intermediates that make these products long.

The small product is y[j] += sum over s of v[s] m[s, j], with j next to each other in m and y. Either side can be the
matrix: the operand, where it adds legs, or x, where legs stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod

from kronecell.deploy.c_source.chains import Chain

Layout = dict[str, int]  # leg -> stride
CALL, ROW, LANES = 16, 3, 8  # prices of a call and of a row of its matrix, in multiply-adds of one register
MOST_LEGS = 4  # of an intermediate all of whose layouts are tried


@dataclass(frozen=True)
class Nest:
    """Loops outside in, and a product: the legs summed in it, and those side by side in y (none: a dot product)."""

    loops: tuple[str, ...]
    summed: tuple[str, ...]
    side: tuple[str, ...]
    by_operand: bool  # the operand is the matrix, else x
    x: Layout
    operand: Layout
    out: Layout
    price: float


def contiguous(order: Sequence[str], sizes: Mapping[str, int]) -> Layout:
    """The strides of legs that lie in this order."""
    layout, stride = {}, 1
    for leg in reversed(order):
        layout[leg] = stride
        stride *= sizes[leg]
    return layout


def nest(
    sizes: Mapping[str, int],
    x: Layout,
    legs: Sequence[str],
    fixed: Layout | None,
    out: Layout,
    around: set[str],
    lead: Sequence[str],
) -> Nest:
    """How a step runs inside loops over the legs `around`.

    `legs` are the operand's. It lies as `fixed` says, with its `lead` legs outermost in the loops, or as is best.
    """
    real = {leg for leg in (*x, *legs, *out) if sizes[leg] > 1} - {*lead} - around
    summed = [leg for leg in x if leg in real and leg not in out]
    added = {leg for leg in legs if leg in real and leg not in x}
    kept = {leg for leg in x if leg in real and leg in out and leg not in legs}
    best: Nest | None = None
    for by_operand in (True, False):
        side = _run(sizes, out, fixed if by_operand else x, added if by_operand else kept)
        if not by_operand and not side:
            continue
        inner = _summed_run(sizes, summed, x, fixed)
        rest = [leg for leg in (*out, *summed) if leg in real and leg not in side and leg not in inner]
        last = [leg for leg in (*rest, *inner, *side) if leg in legs]
        layout = contiguous([*[leg for leg in legs if leg not in last], *last], sizes) if fixed is None else fixed
        calls, S, V = (prod(sizes[leg] for leg in group) for group in ((*lead, *rest), inner, side))
        if side:
            one = CALL + S * (ROW + -(-V // LANES))
        else:
            one = CALL + S * (1 if S == 1 or (x[inner[-1]] == 1 and layout[inner[-1]] == 1) else ROW)
        if best is None or calls * one < best.price:
            loops = (*lead, *rest)
            best = Nest(loops, tuple(inner), tuple(side), by_operand, x, layout, out, calls * one)
    assert best is not None
    return best


def _run(sizes: Mapping[str, int], out: Layout, other: Layout | None, allowed: set[str]) -> list[str]:
    """The last legs of y, as long as they are allowed and lie side by side in `other` too."""
    run: list[str] = []
    stride = 1
    by_stride = sorted((leg for leg in out if sizes[leg] > 1), key=lambda leg: out[leg])
    for leg in by_stride:
        if leg not in allowed or out[leg] != stride or (other is not None and other.get(leg) != stride):
            break
        run.insert(0, leg)
        stride *= sizes[leg]
    return run


def _summed_run(sizes: Mapping[str, int], summed: Sequence[str], x: Layout, fixed: Layout | None) -> list[str]:
    """Summed legs that can be counted by one index."""
    best: list[str] = []
    ordered = sorted(summed, key=lambda leg: x[leg])
    for start in range(len(ordered)):
        run = [ordered[start]]
        for leg in ordered[start + 1 :]:
            extent = sizes[run[0]]
            follows = x[leg] == extent * x[run[0]] and (fixed is None or fixed[leg] == extent * fixed[run[0]])
            if not follows:
                break
            run.insert(0, leg)
        if prod(sizes[leg] for leg in run) > prod(sizes[leg] for leg in best):
            best = run
    return best


def nests_of(chain: Chain, loops: tuple[str, ...], streamed: Sequence[bool]) -> list[Nest]:
    """The steps with the layouts of least price; loops are outside and no part of them."""
    sizes, steps = chain.sizes, len(chain.operands)
    whole = contiguous(chain.inputs, sizes)
    states: dict[tuple[str, ...], tuple[float, list[Nest]]] = {tuple(whole): (0.0, [])}
    layouts = {tuple(whole): whole}
    for step, operand in enumerate(chain.operands):
        around = {leg for leg in loops if chain.removed(leg) >= step}
        after = {leg for leg in loops if chain.removed(leg) > step}
        fixed = None if operand.factor is None else contiguous(operand.legs, sizes)
        lead = [*operand.lead(sizes)] if streamed[step] else []
        held = {leg for leg in chain.legs[step + 1] if leg not in after}
        if step + 1 == steps:
            outs = [chain.outputs]
        else:
            outs = _orders(chain, step, held, operand.legs)
        following: dict[tuple[str, ...], tuple[float, list[Nest]]] = {}
        for order, (price, made) in states.items():
            for out in outs:
                place = contiguous(out, sizes)
                found = nest(sizes, layouts[order], operand.legs, fixed, place, around, lead)
                total = price + found.price
                if out not in following or total < following[out][0]:
                    following[out] = (total, [*made, found])
                    layouts[out] = place
        states = following
    (_, made), *_ = states.values()
    return made


def _orders(chain: Chain, step: int, held: set[str], added: Sequence[str]) -> list[tuple[str, ...]]:
    """Orders for the legs of an intermediate: all of them if they are few, else some that make long products."""
    legs = [leg for leg in chain.legs[step + 1] if leg in held]
    ones = [leg for leg in legs if chain.sizes[leg] == 1]
    many = [leg for leg in legs if chain.sizes[leg] > 1]
    if len(many) <= MOST_LEGS:
        return [(*ones, *order) for order in permutations(many)]
    following = {*chain.operands[step + 1].legs}
    new = [leg for leg in many if leg in added and leg not in chain.legs[step]]
    old = [leg for leg in many if leg not in new]
    next_out = {*chain.legs[step + 2]}
    summed = [leg for leg in many if leg in following and leg not in next_out]
    others = [leg for leg in many if leg not in summed]
    found = [(*old, *new), (*new, *old), (*others, *summed), (*summed, *others)]
    return [(*ones, *order) for order in dict.fromkeys(found)]
