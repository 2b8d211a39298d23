"""The pictures of the documentation: every file below docs/drawings, made from the library."""

from __future__ import annotations

import math
from pathlib import Path

from kronecell.cli.count import EXAMPLES
from kronecell.formats import Format, parse
from kronecell.paper import tables as paper
from kronecell.report.drawing import draw

FOLDER = Path(__file__).resolve().parent / "drawings"
LABELS = ("Ori", "TT", "BT", "TR", "HT", "KCP(4,4,2)", "KCP(4,2,2)")
DENSE = 4 * paper.paper_format("UCF11", "Ori").M * paper.paper_format("UCF11", "Ori").N


def picture() -> str:
    """UCF11 LSTM: multiply-adds of a clip by the paper's order and by ours, and the parameters of W, as SVG."""
    left, right, top, step, width = 112, 500, 76, 38, 760
    bottom = top + step * len(LABELS)
    rows = paper.tables("UCF11")

    def x(value: float) -> float:
        return left + (math.log10(value) - math.log10(5)) / (math.log10(500) - math.log10(5)) * (right - left)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 56}" width="{width}" '
        f'height="{bottom + 56}" role="img" aria-label="multiply-adds and parameters of each format">'
        "<style>text{font:13px system-ui,'DejaVu Sans',sans-serif;fill:#1d2733}.t{fill:#51606e;font-size:12px}"
        ".b{font-weight:650}.e{text-anchor:end}</style>"
        f'<rect width="{width}" height="{bottom + 56}" fill="#fff"/>'
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#51606e"/></marker></defs>'
        '<text class="b" x="14" y="24">UCF11 LSTM: million multiply-adds of a clip, and parameters of W</text>'
        '<circle cx="20" cy="46" r="5" fill="#fff" stroke="#0b62a8" stroke-width="2"/>'
        '<text class="t" x="32" y="50">the order of the paper</text><circle cx="190" cy="46" r="6" fill="#0b62a8"/>'
        '<text class="t" x="202" y="50">our order: same matrix, same result</text>'
        f'<text class="t e" x="640" y="50">parameters of W</text><text class="t e" x="{width - 14}" y="50">ratio</text>'
    ]
    for value in (5, 10, 50, 100, 500):
        parts.append(
            f'<line x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{top - 8}" y2="{bottom}" stroke="#d5dce3"/>'
            f'<text class="t" text-anchor="middle" x="{x(value):.1f}" y="{bottom + 18}">{value}</text>'
        )
    parts.append(
        f'<text class="t" text-anchor="middle" x="{(left + right) / 2}" y="{bottom + 40}">'
        "million multiply-adds (logarithmic)</text>"
    )
    for number, label in enumerate(LABELS):
        real = next(r for r in rows if r["format"] == label and not r["shared"])["executed"]
        theirs, ours = real["mflops_paper_order"], real["mflops_best_order"]
        colour = "#b3362b" if label.startswith("KCP") else "#51606e" if label == "Ori" else "#0b62a8"
        y = top + step * number + 12
        parts.append(f'<text class="b" x="14" y="{y + 4}">{"dense" if label == "Ori" else label}</text>')
        if theirs > ours:
            parts.append(
                f'<line x1="{x(theirs) - 6:.1f}" x2="{x(ours) + 8:.1f}" y1="{y}" y2="{y}" stroke="#51606e" '
                'stroke-width="1.5" marker-end="url(#a)"/>'
                f'<circle cx="{x(theirs):.1f}" cy="{y}" r="5" fill="#fff" stroke="{colour}" stroke-width="2"/>'
                f'<text class="t" x="{x(theirs) + 10:.1f}" y="{y + 4}">{theirs:,.1f}</text>'
            )
        parts.append(
            f'<circle cx="{x(ours):.1f}" cy="{y}" r="6" fill="{colour}"/>'
            f'<text class="t e" x="{x(ours) - 10:.1f}" y="{y + 4}">{ours:,.1f}</text>'
            f'<text class="e" x="640" y="{y + 4}">{real["params"]:,}</text>'
            f'<text class="e b" x="{width - 14}" y="{y + 4}">{DENSE / real["params"]:,.0f}x</text>'
        )
    return "".join([*parts, "</svg>\n"])


def drawings() -> dict[Path, str]:
    """Every file below docs/drawings."""
    found = {FOLDER / "result.svg": picture()}
    for kind, text in EXAMPLES.items():
        fmt: Format = parse(text)
        names = [*fmt.orders()][:1] + (["algorithm2"] if kind == "kcp" else [])
        for name in names:
            svg = draw(fmt.plan(name), title=f"{kind.upper()}, order {name}", standalone=True)
            found[FOLDER / f"{kind}-{name}.svg"] = svg + "\n"
    every = parse(EXAMPLES["kcp"] + ",tie=all")
    svg = draw(every.plan(), title="KCP of Theorem 1 (tie=all), order separable", standalone=True)
    found[FOLDER / "kcp-all-separable.svg"] = svg + "\n"
    return found
