"""Where the tensors of a network go on a picture: x on top, y at the bottom, every factor near its modes.

Positions are in units of columns and rows. A factor that holds input and output modes stands in one row between x and
y; where the factors hold one kind only there are two rows. Kernels, constants and the dots of legs held by three or
more factors stand where the factors they join are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from kronecell.plans.network import GATE, INPUT, Factor, Network

RESULT = "y"
Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A tensor: centre, and how many columns it spans beyond one."""

    column: float
    row: float
    span: float = 0.0

    def attach(self, column: float) -> float:
        """The column of this box that is nearest to another."""
        return min(max(column, self.column - self.span / 2), self.column + self.span / 2)


@dataclass(frozen=True)
class Edge:
    """A piece of a leg: from one point to another; `bend` is how far its middle leaves the straight line, in rows."""

    leg: str
    start: Point
    end: Point
    bend: float = 0.0
    labelled: bool = True
    outer: bool = False


@dataclass(frozen=True)
class Layout:
    """Boxes of the tensors (x and y among them), edges of the legs, dots of the legs held by several."""

    boxes: dict[str, Box]
    edges: tuple[Edge, ...]
    dots: dict[str, Point]

    @property
    def columns(self) -> float:
        """Width in columns."""
        return max(box.column + box.span / 2 for box in self.boxes.values()) + 1

    @property
    def rows(self) -> float:
        """Height in rows."""
        return self.boxes[RESULT].row + 1


def arrange(network: Network) -> Layout:
    """A layout of any network with input: deterministic, from its legs alone."""
    inputs = [leg for leg in network.inputs if leg != GATE]
    outputs = [leg for leg in network.outputs if leg != GATE]
    width = max(len(inputs), len(outputs), 2) - 1
    column = dict(zip(inputs, _spread(len(inputs), width), strict=True))
    flipped = dict(zip(outputs, [*_spread(len(outputs), width)][::-1], strict=True))
    straight = dict(zip(outputs, _spread(len(outputs), width), strict=True))
    # A ring is drawn as a ring: its output cores run backwards when that makes the bonds between the rows shorter.
    both = any({*f.legs} & {*inputs} and {*f.legs} & {*outputs} for f in network.factors)
    better = not both and _stretch(network, column | flipped) < _stretch(network, column | straight)
    column |= flipped if better else straight
    holders = {leg: [f for f in network.factors if leg in f.legs] for leg in network.sizes if leg != GATE}
    outer = {*inputs, *outputs}
    many = [leg for leg, held in holders.items() if len(held) > (1 if leg in outer else 2)]
    boxes, last = _rows(network, column, holders, many)
    boxes[INPUT] = Box(width / 2, 0.0, width)
    boxes[RESULT] = Box(width / 2, last, width)
    dots = _dots(network, boxes, holders, many, outer, last)
    edges: list[Edge] = []
    pairs: dict[frozenset[str], int] = {}
    for leg, held in holders.items():
        ends = [boxes[f.name] for f in held]
        ends += [boxes[INPUT]] if leg in inputs else []
        ends += [boxes[RESULT]] if leg in outputs else []
        if leg in dots:
            at = dots[leg]
            longest = min(ends, key=lambda box: abs(box.column - at[0]) + abs(box.row - at[1]))
            edges += [
                Edge(leg, at, (box.attach(at[0]), box.row), labelled=box is longest, outer=leg in outer) for box in ends
            ]
        elif leg in outer:
            box, other = ends
            at_box = box.attach(column[leg])
            edges.append(Edge(leg, (at_box, box.row), (column[leg], other.row), outer=True))
        else:
            a, b = ends
            key = frozenset(f.name for f in held)
            pairs[key] = pairs.get(key, 0) + 1
            edges.append(_bond(leg, a, b, boxes.values(), pairs[key] - 1))
    return Layout(boxes, tuple(edges), dots)


def _bond(leg: str, a: Box, b: Box, others: Iterable[Box], repeat: int) -> Edge:
    """A leg between two factors; it bends around what stands between them and beside an earlier leg of the same two."""
    start, end = (a.attach(b.column), a.row), (b.attach(a.column), b.row)
    low, high = sorted((a.column, b.column))
    between = a.row == b.row and any(o.row == a.row and low < o.column < high and not o.span for o in others)
    return Edge(leg, start, end, (0.55 if between else 0.0) + 0.5 * repeat)


def _spread(count: int, width: float) -> Iterable[float]:
    return [width / 2] if count == 1 else [width * i / (count - 1) for i in range(count)]


def _stretch(network: Network, column: dict[str, float]) -> float:
    """How far apart the ends of the bonds between the factors are."""
    middle = {}
    for f in network.factors:
        modes = [column[leg] for leg in f.legs if leg in column]
        if modes:
            middle[f.name] = fmean(modes)
    total = 0.0
    for leg in network.sizes:
        held = [middle[f.name] for f in network.factors if leg in f.legs and f.name in middle]
        if len(held) == 2 and leg not in column and leg != GATE:
            total += abs(held[0] - held[1])
    return total


def _rows(
    network: Network, column: dict[str, float], holders: dict[str, list[Factor]], many: list[str]
) -> tuple[dict[str, Box], float]:
    """Boxes of the factors, and the row of y."""
    inputs, outputs = {*network.inputs}, {*network.outputs} - {GATE}
    top, bottom, inner = list[Factor](), list[Factor](), list[Factor]()
    for f in network.factors:
        legs = {*f.legs}
        (top if legs & inputs else bottom if legs & outputs else inner).append(f)
    both = any({*f.legs} & outputs for f in top) or not bottom

    def box(f: Factor, row: float) -> Box:
        outer = [leg for leg in f.legs if leg in column]
        modes = [column[leg] for leg in outer if len(holders[leg]) == 1] or [column[leg] for leg in outer]
        return Box((min(modes) + max(modes)) / 2, row, max(modes) - min(modes))

    if both:
        first = 1.6 if _above(network, many, inner) else 1.0
        boxes = {f.name: box(f, first) for f in [*top, *bottom]}
        depth = 0.0
        waiting = [*inner]
        while waiting:  # kernels and transfers, each one row below what it joins
            ready = [f for f in waiting if _around(f, holders, boxes)] or waiting
            for f in ready:
                near = [boxes[name] for name in _around(f, holders, boxes)] or [*boxes.values()]
                row = max(b.row for b in near) + 1.0
                boxes[f.name] = Box(_free(fmean(b.column for b in near), boxes, column), row)
                depth = max(depth, row - first)
            waiting = [f for f in waiting if f.name not in boxes]
        below = any(leg not in column for leg in many) and not inner
        return boxes, first + max(depth, 0.9 if below else 0.0) + 1.0
    boxes = {f.name: box(f, 1.0) for f in top}
    sides = {f.name: _side(f.legs, holders, top, bottom) for f in inner}
    dots = [_side_of(holders[leg], top, bottom) for leg in many]
    gap = 1.3
    if dots or inner:
        gap = 2.0
    if any(side != 0 for side in [*sides.values(), *dots]):
        gap = 2.7
    boxes |= {f.name: box(f, 1.0 + gap) for f in bottom}
    for f in inner:
        near = [boxes[name] for name in _around(f, holders, boxes)] or [*boxes.values()]
        row = {1: 1.85, -1: gap + 0.15, 0: 1 + gap / 2}[sides[f.name]]
        boxes[f.name] = Box(_free(fmean(b.column for b in near), boxes, column), row)
    return boxes, gap + 2.0


def _above(network: Network, many: list[str], inner: list[Factor]) -> bool:
    """Whether a dot must stand between x and the factors, because a kernel stands below them."""
    return any(leg in f.legs for leg in many for f in inner)


def _around(f: Factor, holders: dict[str, list[Factor]], boxes: dict[str, Box]) -> list[str]:
    """Names of the placed factors that share a leg with f."""
    return [g.name for leg in f.legs if leg in holders for g in holders[leg] if g.name != f.name and g.name in boxes]


def _free(at: float, boxes: dict[str, Box], column: dict[str, float]) -> float:
    """The column itself, or half a column aside where a leg to x or y would run through."""
    busy = [*column.values(), *(box.column for box in boxes.values() if not box.span)]
    return at + 0.5 if any(abs(at - other) < 0.3 for other in busy) else at


def _side(legs: Iterable[str], holders: dict[str, list[Factor]], top: list[Factor], bottom: list[Factor]) -> int:
    near = [g for leg in legs if leg in holders for g in holders[leg]]
    return _side_of(near, top, bottom)


def _side_of(held: list[Factor], top: list[Factor], bottom: list[Factor]) -> int:
    """1 if only factors of the upper row hold it, -1 if only those of the lower, else 0."""
    up, down = any(f in top for f in held), any(f in bottom for f in held)
    return int(up) - int(down)


def _dots(
    network: Network,
    boxes: dict[str, Box],
    holders: dict[str, list[Factor]],
    many: list[str],
    outer: set[str],
    last: float,
) -> dict[str, Point]:
    """Where the lines of a leg that several factors hold meet."""
    dots: dict[str, Point] = {}
    inner = {f.name for f in network.factors if not {*f.legs} & outer}
    one_row = len({box.row for name, box in boxes.items() if name not in inner | {INPUT, RESULT}}) == 1
    for leg in many:
        held = [boxes[f.name] for f in holders[leg] if f.name not in inner]
        kernels = [boxes[f.name] for f in holders[leg] if f.name in inner]
        at = fmean(box.column for box in held or kernels)
        rows = {box.row for box in held}
        if len(rows) > 1:
            row = fmean(rows)
        elif one_row:
            row = 0.75 if kernels else (held[0].row + last) / 2
        else:
            up = held and held[0].row == 1.0
            row = (1.45 if kernels else 1.8) if up else (held or kernels)[0].row - (0.45 if kernels else 0.8)
        while any(abs(at - c) < 0.3 and abs(row - r) < 0.2 for c, r in dots.values()):
            at += 0.4
        dots[leg] = (at, row)
    return dots
