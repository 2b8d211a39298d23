"""The pictures of the documentation: every file below docs/drawings, made from the library."""

from __future__ import annotations

import json
import math
from pathlib import Path

from kronecell.cli.count import EXAMPLES
from kronecell.formats import Format, parse
from kronecell.paper import tables as paper
from kronecell.report.drawing import draw

FOLDER = Path(__file__).resolve().parent / "drawings"
LABELS = ("Ori", "TT", "BT", "TR", "HT", "KCP(4,4,2)", "KCP(4,2,2)")
DENSE = 4 * paper.paper_format("UCF11", "Ori").M * paper.paper_format("UCF11", "Ori").N


def first() -> str:
    """The README's picture: W as a dense matrix and in KCP, areas to scale, with what was measured."""
    fmt = paper.paper_format("UCF11", "KCP(4,4,2)")
    small, side, width, height = fmt.network(4).num_params, 228, 660, 260
    results = json.loads((FOLDER.parents[1] / "benchmarks" / "results" / "projection.json").read_text())
    cases = next(group["cases"] for group in results["groups"] if group["title"] == "UCF11, 96 rows, forward, 1 thread")
    name = "KCP(4,4,2) unshared"
    slow, fast = (
        1e3 * case["seconds"] for case in (cases["dense"], cases.get(f"{name} auto") or cases[f"{name} untuned"])
    )
    dot = side * math.sqrt(small / DENSE)
    left, middle = 16 + side / 2, 16 + side / 2
    texts = [
        ("b", left, middle - 4, "middle", f"{DENSE:,}"),
        ("t", left, middle + 24, "middle", "weights, dense"),
        ("b r", 340, 66, "start", f"{small:,}"),
        ("t", 340, 92, "start", "weights in KCP: the red dot,"),
        ("t", 340, 114, "start", "drawn to the same scale"),
        ("s", 340, 160, "start", f"W in a file: {4 * DENSE / 1e6:,.0f} MB → {4 * small / 1e3:,.0f} kB"),
        ("s", 340, 188, "start", f"product: {slow:,.0f} ms → {fast:.2f} ms"),
        ("t", 340, 226, "start", "160 x 120 video, one CPU thread"),
    ]
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-label="{DENSE:,} weights become {small:,}">'
            "<style>text{font:19px system-ui,'DejaVu Sans',sans-serif;fill:#1d2733}.t{fill:#51606e;font-size:16px}"
            ".b{font-size:31px;font-weight:700}.r{fill:#b3362b}</style>"
            f'<rect width="{width}" height="{height}" fill="#fff"/>'
            f'<rect x="16" y="16" width="{side}" height="{side}" fill="#c4d5e5" stroke="#0b62a8"/>'
            f'<path d="M256 {middle:.0f}H292M284 {middle - 6:.0f}l8 6l-8 6" fill="none" stroke="#51606e" '
            'stroke-width="2"/>'
            f'<rect x="{314 - dot / 2:.2f}" y="{middle - dot / 2:.2f}" width="{dot:.2f}" height="{dot:.2f}" '
            f'fill="#b3362b"/><circle cx="314" cy="{middle:.0f}" r="11" fill="none" stroke="#b3362b"/>',
            *(
                f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{text}</text>'
                for kind, x, y, anchor, text in texts
            ),
            "</svg>\n",
        ]
    )


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
    found = {FOLDER / "first.svg": first(), FOLDER / "result.svg": picture()}
    for kind, text in EXAMPLES.items():
        fmt: Format = parse(text)
        names = [*fmt.orders()][:1] + (["algorithm2"] if kind == "kcp" else [])
        for name in names:
            svg = draw(fmt.plan(name), title=f"{kind.upper()}, order {name}", standalone=True)
            found[FOLDER / f"{kind}-{name}.svg"] = svg + "\n"
    every = parse(EXAMPLES["kcp"] + ",tie=all")
    svg = draw(every.plan(), title="KCP of Theorem 1 (tie=all), order separable", standalone=True)
    found[FOLDER / "kcp-all-separable.svg"] = svg + "\n"
    for name in ("letters.svg", "letters-rates.svg", "doped.svg", "doped-latency.svg"):  # drawn by the benchmarks
        measured = FOLDER.parents[1] / "benchmarks" / "results" / name
        if measured.is_file():
            found[FOLDER / name] = measured.read_text(encoding="utf-8")
    return found
