"""Tables and lists of the page as HTML, every text escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kronecell.report.tables import Cell


def html_table(
    heads: Sequence[tuple[str, str]],
    body: Sequence[Sequence[Cell]],
    texts: set[int],
    name: str,
    classes: dict[int, str] | None = None,
) -> str:
    """A table whose `texts` columns are text; with "sortable" in its name the headings are buttons.

    Each cell names its column: a narrow screen shows rows as cards, because a table that scrolls hides its columns.
    """
    sort = "sortable" in name
    parts = [f'<div class="wide{long(body)}"><table class="{name}">']
    if any(title for title, _ in heads):
        parts.append("<thead><tr>")
        for i, (title, hint) in enumerate(heads):
            words = f'<button type="button">{escape(title)}</button>' if sort else escape(title)
            parts.append(f'<th scope="col" title="{escape(hint)}"{_class(i, texts, {})}>{words}</th>')
        parts.append("</tr></thead>")
    parts.append("<tbody>")
    for line in body:
        parts.append("<tr>")
        for i, cell in enumerate(line):
            order = "" if cell.order is None else escape(str(cell.order))
            words = (
                escape(cell.text).replace(",", ",<wbr>") if (classes or {}).get(i) == "format" else escape(cell.text)
            )
            label = f' data-label="{escape(heads[i][0])}"' if heads[i][0] else ""
            parts.append(f'<td data-sort="{order}"{label}{_class(i, texts, classes or {})}>{words}</td>')
        parts.append("</tr>")
    return "".join([*parts, "</tbody></table></div>"])


def long(rows: Sequence[object]) -> str:
    """A class for tables that a printed page may cut between rows; shorter ones stay whole."""
    return " long" if len(rows) > 15 else ""


def _class(i: int, texts: set[int], classes: dict[int, str]) -> str:
    names = " ".join(filter(None, ("text" if i in texts else "", classes.get(i, ""))))
    return f' class="{names}"' if names else ""


def bullets(texts: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"
