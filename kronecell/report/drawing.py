"""A tensor network drawn from its own description: nodes, legs with their sizes, the order of contraction numbered.

SVG text, written directly: nothing to install, small, and sharp at any size. Colours are CSS variables with light
values behind them, so that a page with a dark mode can set its own.
"""

from __future__ import annotations

from html import escape
from math import hypot, prod

from kronecell.errors import PlanError
from kronecell.plans.network import GATE, INPUT, Network
from kronecell.plans.plan import Plan
from kronecell.report.drawing_layout import RESULT, Box, Edge, Layout, Point, arrange

COLUMN, ROW, MARGIN = 104.0, 88.0, 58.0  # pixels
NODE = (50.0, 38.0)
LINE = 19.0  # height of a line of the list of steps
Rectangle = tuple[float, float, float, float]  # left, top, right, bottom
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"

STYLE = """
.kc text{font-family:FONT;font-size:12px;fill:var(--kc-ink,#1d2733)}
.kc .name{font-weight:650;font-size:14px;text-anchor:middle}
.kc .count{font-size:10.5px;text-anchor:middle;fill:var(--kc-soft,#51606e)}
.kc .leg{fill:none;stroke:var(--kc-bond,#8a5a00);stroke-width:2}
.kc .outer{stroke:var(--kc-outer,#2f6f9f)}
.kc .size{text-anchor:middle;font-size:11.5px;paint-order:stroke;stroke:var(--kc-paper,#fff);stroke-width:4px;
stroke-linejoin:round}
.kc .dot{fill:var(--kc-bond,#8a5a00)}
.kc .factor{fill:var(--kc-factor,#fff1cf);stroke:var(--kc-bond,#8a5a00);stroke-width:1.6}
.kc .constant{fill:var(--kc-paper,#fff);stroke:var(--kc-soft,#51606e);stroke-dasharray:4 3}
.kc .end{fill:var(--kc-end,#dcecf7);stroke:var(--kc-outer,#2f6f9f);stroke-width:1.6}
.kc .once{fill:var(--kc-once,#2e7d4f)}
.kc .each{fill:var(--kc-each,#b3362b)}
.kc .number{fill:#fff;font-size:11px;font-weight:700;text-anchor:middle}
.kc .gate{font-size:10px;text-anchor:middle;fill:var(--kc-ink,#1d2733)}
.kc .gatebox{fill:var(--kc-paper,#fff);stroke:var(--kc-soft,#51606e)}
.kc .title{font-size:15px;font-weight:650}
.kc .list{font-size:12px}
.kc .right{text-anchor:end}
""".replace("FONT", FONT)


def draw(what: Plan | Network, *, title: str = "", steps: bool = True, standalone: bool = False) -> str:
    """SVG of a plan: every tensor has the number of the step that contracts it, the list below describes the steps.

    A network is drawn without numbers. `standalone` adds a white background, for files; without it the drawing is for
    a page of HTML.
    """
    network = what.network if isinstance(what, Plan) else what
    if not network.inputs:
        raise PlanError("only networks with input are drawn; this one has none (as_dense or squared?)")
    layout = arrange(network)
    top = 30.0 if title else 6.0
    own = (layout.columns - 1) * COLUMN + 2 * MARGIN
    height = top + (layout.rows - 1) * ROW + 2 * 26
    width = max(own, 24 + 8.4 * len(title))
    lines: list[str] = []
    if isinstance(what, Plan) and steps:
        lines, height, width = _list(what, height + 14, width)
    left = MARGIN + (width - own) / 2
    dots = [(left + column * COLUMN, _y(row, top)) for column, row in layout.dots.values()]
    numbers = _numbers(what) if isinstance(what, Plan) else {}
    body = [_edge(edge, network, left, top) for edge in layout.edges]
    body += [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in dots]
    body += _labels(layout, network, left, top)
    body += [_node(name, box, network, numbers.get(name), left, top) for name, box in layout.boxes.items()]
    body += lines
    if title:
        body.append(f'<text class="title" x="12" y="20">{escape(title)}</text>')
    back = f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>' if standalone else ""
    words = f"tensor network of {', '.join(f.name for f in network.factors)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="kc" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img" aria-label="{escape(title or words, quote=True)}">'
        f"<style>{STYLE}</style>{back}{''.join(body)}</svg>"
    )


def _y(row: float, top: float) -> float:
    return top + 24 + row * ROW


def _ends(edge: Edge, left: float, top: float) -> tuple[float, float, float, float, float, float]:
    """Both ends in pixels, and the control point of the curve."""
    x1, y1 = left + edge.start[0] * COLUMN, _y(edge.start[1], top)
    x2, y2 = left + edge.end[0] * COLUMN, _y(edge.end[1], top)
    length = hypot(x2 - x1, y2 - y1) or 1.0
    off = 2 * edge.bend * ROW * 0.6
    return x1, y1, x2, y2, (x1 + x2) / 2 - off * (y2 - y1) / length, (y1 + y2) / 2 + off * (x2 - x1) / length


def _edge(edge: Edge, network: Network, left: float, top: float) -> str:
    x1, y1, x2, y2, cx, cy = _ends(edge, left, top)
    kind = "leg outer" if edge.outer else "leg"
    hint = f"<title>leg {escape(edge.leg)}, size {network.sizes[edge.leg]:,}</title>"
    return f'<path class="{kind}" d="M{x1:.1f} {y1:.1f}Q{cx:.1f} {cy:.1f} {x2:.1f} {y2:.1f}">{hint}</path>'


def _labels(layout: Layout, network: Network, left: float, top: float) -> list[str]:
    """The legs with their sizes, each where it covers least: no other label, no tensor, and few other legs."""
    taken = [part for box in layout.boxes.values() for part in _outlines(box, left, top)]
    curves = {edge: [_on(edge, t / 40, left, top) for t in range(41)] for edge in layout.edges}
    found: dict[Edge, str] = {}
    for edge in sorted((e for e in layout.edges if e.labelled), key=lambda e: hypot(*_span(e, left, top))):
        words = f"{edge.leg} = {network.sizes[edge.leg]:,}"
        best: tuple[float, Rectangle, Point] | None = None
        for x, y in _places(edge, left, top):
            own = (x - 3.2 * len(words), y - 9, x + 3.2 * len(words), y + 3)
            crossed = sum(_holds(own, point) for other in curves if other != edge for point in curves[other])
            cost = crossed + 1000.0 * sum(_meet(own, box) for box in taken)
            if best is None or cost < best[0]:
                best = cost, own, (x, y)
        assert best is not None
        (x0, y0, x1, y1), (x, y) = best[1:]
        taken.append((x0 - 2, y0 - 3, x1 + 2, y1 + 3))  # some air between labels
        found[edge] = f'<text class="size" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'
    return [found[edge] for edge in layout.edges if edge in found]


def _places(edge: Edge, left: float, top: float) -> list[Point]:
    """Where its label may stand, the best place first: level legs have it below, as the steps' numbers are above."""
    x1, y1, x2, y2, _, _ = _ends(edge, left, top)
    if abs(y2 - y1) < 0.25 * abs(x2 - x1):
        return [(x, y + shift) for shift in (15.0, -7.0) for x, y in (_on(edge, t, left, top) for t in (0.5, 0.4, 0.6))]
    middle = 0.5 if abs(x2 - x1) < 4 else 0.38  # off the middle, where a leg to y often crosses
    steps = (middle, *(middle + sign * step / 20 for step in range(1, 8) for sign in (1, -1)))
    return [(x, y + 4.0) for x, y in (_on(edge, t, left, top) for t in steps if 0.12 <= t <= 0.88)]


def _on(edge: Edge, t: float, left: float, top: float) -> Point:
    """A point of the curve, from 0 at its start to 1 at its end."""
    x1, y1, x2, y2, cx, cy = _ends(edge, left, top)
    x = (1 - t) ** 2 * x1 + 2 * t * (1 - t) * cx + t**2 * x2
    return x, (1 - t) ** 2 * y1 + 2 * t * (1 - t) * cy + t**2 * y2


def _span(edge: Edge, left: float, top: float) -> Point:
    x1, y1, x2, y2, _, _ = _ends(edge, left, top)
    return x2 - x1, y2 - y1


def _outlines(box: Box, left: float, top: float) -> list[Rectangle]:
    """A tensor; and above it its gates and the number of its step, whether or not it has these."""
    x, y, half = left + box.column * COLUMN, _y(box.row, top), (NODE[0] + box.span * COLUMN) / 2
    roof = y - NODE[1] / 2
    return [(x - half, roof, x + half, y + NODE[1] / 2), (x - half - 9, roof - 12, x + half + 9, roof + 3)]


def _meet(a: Rectangle, b: Rectangle) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _holds(box: Rectangle, point: Point) -> bool:
    return box[0] < point[0] < box[2] and box[1] < point[1] < box[3]


def _legs(name: str, network: Network) -> tuple[str, ...]:
    factor = next((f for f in network.factors if f.name == name), None)
    return factor.legs if factor else network.inputs if name == INPUT else network.outputs


def _node(name: str, box: Box, network: Network, number: tuple[int, bool] | None, left: float, top: float) -> str:
    x, y = left + box.column * COLUMN, _y(box.row, top)
    width, height = NODE[0] + box.span * COLUMN, NODE[1]
    factor = next((f for f in network.factors if f.name == name), None)
    kind = "end" if factor is None else "constant" if factor.constant else "factor"
    legs = _legs(name, network)
    size = prod(network.shape(legs))
    what = {INPUT: "input", RESULT: "result"}.get(name) or (factor.constant if factor else "") or "parameters"
    hint = f"{name} [{' '.join(legs)}], {size:,} {'numbers a row' if factor is None else what}"
    count = f"{size:,}" if factor is None or not factor.constant else factor.constant
    parts = [
        f"<g><title>{escape(hint)}</title>",
        f'<rect class="{kind}" x="{x - width / 2:.1f}" y="{y - height / 2:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="9"/>',
        f'<text class="name" x="{x:.1f}" y="{y - 1:.1f}">{escape(name)}</text>',
        f'<text class="count" x="{x:.1f}" y="{y + 12.5:.1f}">{escape(count)}</text>',
    ]
    if GATE in legs:
        gx, gy = x - width / 2, y - height / 2
        parts.append(f'<rect class="gatebox" x="{gx - 9:.1f}" y="{gy - 12:.1f}" width="32" height="15" rx="7"/>')
        parts.append(f'<text class="gate" x="{gx + 7:.1f}" y="{gy - 0.5:.1f}">g = {network.sizes[GATE]}</text>')
    if number is not None:
        step, hoisted = number
        cx, cy = x + width / 2 - 1, y - height / 2 + 1
        kind = "once" if hoisted else "each"
        parts.append(f'<circle class="{kind}" cx="{cx:.1f}" cy="{cy:.1f}" r="9.5"/>')
        parts.append(f'<text class="number" x="{cx:.1f}" y="{cy + 4:.1f}">{step}</text>')
    return "".join([*parts, "</g>"])


def _numbers(plan: Plan) -> dict[str, tuple[int, bool]]:
    """Tensor -> (number of the step that contracts it, whether that step is done once)."""
    found: dict[str, tuple[int, bool]] = {}
    for number, step in enumerate(plan.steps, 1):
        for name in (step.left, step.right):
            found.setdefault(name, (number, step.hoisted))
    return found


def step_rows(plan: Plan) -> list[tuple[str, str, str, int, str]]:
    """(number, what is contracted, legs of the result, multiply-adds, once or each row) of every step."""
    names: dict[str, str] = {}
    rows = []
    for number, step in enumerate(plan.steps, 1):
        left, right = names.get(step.left, step.left), names.get(step.right, step.right)
        names[step.name] = f"#{number}"
        when = "once" if step.hoisted else "each row"
        rows.append((f"{number}", f"{left} · {right}", " ".join(step.out_legs) or "1", step.macs, when))
    return rows


def _list(plan: Plan, top: float, width: float) -> tuple[list[str], float, float]:
    """The steps as lines of text; returns also the new height and width."""
    rows = step_rows(plan)
    summary = f"order {plan.order}: {plan.macs:,} multiply-adds a row, {plan.hoisted_macs:,} once per weight update"
    legs = max([len(row[2]) for row in rows], default=0) * 6.6
    width = max(width, 170 + legs + 250, 24 + 6.6 * len(summary))
    right = width - 74
    parts = [
        f'<text class="count" style="text-anchor:start" x="34" y="{top:.1f}">contract</text>'
        f'<text class="count" style="text-anchor:start" x="150" y="{top:.1f}">legs that stay</text>'
        f'<text class="count right" style="text-anchor:end" x="{right:.1f}" y="{top:.1f}">multiply-adds</text>'
    ]
    for i, (number, pair, out, macs, when) in enumerate(rows):
        y = top + 6 + LINE * (i + 0.75)
        kind = "once" if when == "once" else "each"
        parts.append(
            f'<circle class="{kind}" cx="18" cy="{y - 4:.1f}" r="8.5"/>'
            f'<text class="number" x="18" y="{y:.1f}">{number}</text>'
            f'<text class="list" x="34" y="{y:.1f}">{escape(pair)}</text>'
            f'<text class="list" x="150" y="{y:.1f}">{escape(out)}</text>'
            f'<text class="list right" x="{right:.1f}" y="{y:.1f}">{macs:,}</text>'
            f'<text class="list" x="{right + 10:.1f}" y="{y:.1f}">{when}</text>'
        )
    end = top + 6 + LINE * (len(rows) + 1)
    parts.append(f'<text class="list" x="12" y="{end:.1f}">{escape(summary)}</text>')
    return parts, end + 12, width
