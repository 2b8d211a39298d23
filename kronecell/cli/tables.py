"""Plain text tables: what the commands print. Whole lines where output is piped; in a terminal, a table that is too
wide for it is shown in parts, because wrapped rows cannot be read."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterator, Sequence

GAP = "  "


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], text: Collection[int] = (0,), width: int | None = None
) -> str:
    """Columns aligned with two spaces between; the `text` columns to the left, numbers to the right.

    A table wider than `width` (by default the terminal's; a pipe has none) becomes several, each with the first column;
    if that leaves too little room, every row becomes a list.

    >>> print(text_table(("name", "clips", "correct"), [("up", "2", "1")], width=14))
    name  clips
    ----  -----
    up        2
    <BLANKLINE>
    name  correct
    ----  -------
    up          1
    """
    lines = [[*map(str, line)] for line in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    if width is None or sum(widths) + len(GAP) * (len(widths) - 1) <= width:
        return _columns(lines, widths, range(len(header)), text)
    if widths[0] + len(GAP) + max(widths[1:], default=0) <= width:
        return "\n\n".join(_columns(lines, widths, part, text) for part in _parts(widths, width))
    name = max(map(len, header))
    return "\n\n".join(
        "\n".join(f"{h:<{name}}{GAP}{c}" for h, c in zip(header, line, strict=True)) for line in lines[1:]
    )


def _parts(widths: Sequence[int], width: int) -> Iterator[list[int]]:
    """The first column, and as many others as fit, until all have been shown."""
    part, used = [0], widths[0]
    for i in range(1, len(widths)):
        if used + len(GAP) + widths[i] > width:
            yield part
            part, used = [0], widths[0]
        part.append(i)
        used += len(GAP) + widths[i]
    yield part


def _columns(lines: Sequence[Sequence[str]], widths: Sequence[int], part: Sequence[int], text: Collection[int]) -> str:
    def show(line: Sequence[str]) -> str:
        return GAP.join(line[i].ljust(widths[i]) if i in text else line[i].rjust(widths[i]) for i in part).rstrip()

    rule = GAP.join("-" * widths[i] for i in part)
    return "\n".join([show(lines[0]), rule, *map(show, lines[1:])])
