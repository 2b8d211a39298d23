"""One step of a chain as loops around a small product, and the layouts of intermediates that make these products fast.

There are two: `rows`, y[i][j] += sum over s of v[i][s] m[s][j], with j next to each other in m and y, where either side
can be the matrix m: the operand, where it adds legs, or x, where legs stay; and `dots`, with s next to each other in x
and in the operand. All of i, j and s may be several legs that one index counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod

from kronecell.deploy.c_source.chains import Chain

Layout = dict[str, int]  # leg -> stride
# Prices in clock cycles of a processor whose vectors have 8 floats: a multiply-add waits 4 cycles for the one before.
CALL, LATENCY = 16, 4
MOST_LEGS = 4  # of an intermediate all of whose layouts are tried


@dataclass(frozen=True)
class Nest:
    """Loops outside in, and a product: the legs of its rows, those summed, and those side by side in y."""

    loops: tuple[str, ...]
    many: tuple[str, ...]
    summed: tuple[str, ...]
    side: tuple[str, ...]
    kind: str  # "operand" or "x", whichever is the matrix of rows; "dots"
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
    added = [leg for leg in legs if leg in real and leg not in x]
    kept = [leg for leg in x if leg in real and leg in out and leg not in legs]
    best: Nest | None = None
    for kind in ("operand", "x", "dots"):
        of_operand = [] if fixed is None else [fixed]
        inner = _counted(sizes, summed, x, *of_operand)
        if kind == "operand":
            side = _counted(sizes, added, out, *of_operand, dense=True)
            many = _counted(sizes, kept, out, x)
        elif kind == "x":
            side = _counted(sizes, kept, out, x, dense=True)
            many = _counted(sizes, added, out, *of_operand)
        else:
            inner = _counted(sizes, summed, x, *of_operand, dense=True)
            side = _counted(sizes, added, out, *of_operand)
            many = _counted(sizes, kept, out, x)
        if kind != "operand" and not (side if kind == "x" else inner):
            continue
        rest = [leg for leg in (*out, *summed) if leg in real and leg not in {*side, *many, *inner}]
        last = (*many, *side, *inner) if kind == "dots" else (*many, *inner, *side)
        order = [leg for leg in (*rest, *last) if leg in legs]
        layout = contiguous([*[leg for leg in legs if leg not in order], *order], sizes) if fixed is None else fixed
        calls, R, S, V = (prod(sizes[leg] for leg in group) for group in ((*lead, *rest), many, inner, side))
        price = calls * (CALL + (_dots_price if kind == "dots" else _rows_price)(R, S, V))
        if best is None or price < best.price:
            best = Nest((*lead, *rest), tuple(many), tuple(inner), tuple(side), kind, x, layout, out, price)
    assert best is not None
    return best


def _rows_price(R: int, S: int, V: int) -> float:
    """R rows of V sums of S products; four rows run side by side, and a row alone in pieces of 32, 8, 4 and 1."""
    left = V % 8 // 4 + V % 4
    alone = LATENCY * S * (V // 32 + V % 32 // 8 + left)
    fours = R // 4 if V >= 8 else 0
    together = LATENCY * S * (V // 16 + V % 16 // 8 + 4 * left)
    return fours * (CALL + together) + (R - 4 * fours) * (CALL + alone)


def _dots_price(R: int, S: int, V: int) -> float:
    """R rows of V sums of S products, four sums at a time, each in 16 parts that are added up at the end."""
    lines, left = divmod(S, 16)
    return R * (V // 4 * (CALL + 5 * lines + LATENCY * left) + V % 4 * (CALL + LATENCY * (lines + left)))


def _counted(sizes: Mapping[str, int], legs: Sequence[str], *layouts: Layout, dense: bool = False) -> list[str]:
    """The most of these legs that one index can count in all layouts; `dense`: its step is one in all of them."""
    best: list[str] = []
    ordered = sorted(legs, key=lambda leg: layouts[0][leg])
    for start, first in enumerate(ordered):
        if dense and any(layout[first] != 1 for layout in layouts):
            continue
        run = [first]
        for leg in ordered[start + 1 :]:
            if any(layout[leg] != sizes[run[0]] * layout[run[0]] for layout in layouts):
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
