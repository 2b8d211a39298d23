"""mkdocs calls this: each cell of a table carries the title of its column, so that style.css can show rows as blocks on
a phone, where a table of six columns would be cut off."""

from __future__ import annotations

import re
from typing import Any

TABLE = re.compile(r"<table>.*?</table>", re.S)
HEAD = re.compile(r"<th\b[^>]*>(.*?)</th>", re.S)
ROW = re.compile(r"<tr>(.*?)</tr>", re.S)
FITS = 3  # columns of text that a phone shows side by side


def on_page_content(html: str, **_: Any) -> str:
    """The page with labelled cells."""
    return TABLE.sub(lambda found: labelled(found[0]), html)


def labelled(table: str) -> str:
    """A table whose cells have data-label; it is marked as wide if a phone cannot show its columns side by side."""
    head, separator, body = table.partition("</thead>")
    titles = [re.sub(r"<[^>]+>", "", title).replace('"', "&quot;").strip() for title in HEAD.findall(head)]
    if len(titles) <= FITS or not separator:
        return table

    def row(found: re.Match[str]) -> str:
        label = iter(titles)
        return "<tr>" + re.sub(r"<td", lambda _: f'<td data-label="{next(label, "")}"', found[1]) + "</tr>"

    return head.replace("<table>", "<table data-wide>") + separator + ROW.sub(row, body)
