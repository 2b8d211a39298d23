"""The demo's page: one self-contained HTML file with the table and the learning curves."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from kronecell.atomic import write_atomically

COLOURS = ("#4363d8", "#e6194b", "#3cb44b", "#f58231", "#911eb4", "#008080", "#808000")

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
td, th { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #8886; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
text { fill: currentColor; font-size: 12px; }
"""


def write_page(
    target: Path,
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    curves: Mapping[str, Sequence[tuple[int, float]]],
    notes: Sequence[str],
) -> None:
    """Write the page; `curves` are (epoch, loss) of each model."""
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    text = "".join(f"<p>{html.escape(note)}</p>\n" for note in notes)
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n"
        f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>\n{body}</tbody></table></div>\n'
        f"<h2>Training loss</h2>\n{_chart(curves)}\n{text}</body></html>\n"
    )
    write_atomically(target, lambda path: path.write_text(page, encoding="utf-8"))


def _chart(curves: Mapping[str, Sequence[tuple[int, float]]], width: int = 760, height: int = 320) -> str:
    """The curves as SVG, time from left to right in epochs, each named at the right."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return "<p>No epochs yet.</p>"
    last, top = max(max(epoch for epoch, _ in points), 1), max(loss for _, loss in points) or 1.0
    left, right, bottom = 40, width - 120, height - 30
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="training loss by epoch">']
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * (bottom - 10)
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8886"/>')
        parts.append(f'<text x="4" y="{y + 4:.1f}">{share * top:.2f}</text>')
    parts.append(f'<text x="{left}" y="{height - 8}">epoch 1</text>')
    parts.append(f'<text x="{right - 50}" y="{height - 8}">epoch {last + 1}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(
            f"{left + epoch / last * (right - left):.1f},{bottom - loss / top * (bottom - 10):.1f}"
            for epoch, loss in curve
        )
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = 20 + 18 * number
        parts.append(f'<rect x="{right + 12}" y="{y - 9}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{right + 30}" y="{y + 2}">{html.escape(name)}</text>')
    return "".join([*parts, "</svg>"])
