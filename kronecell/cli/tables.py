"""Plain text tables: what the counting commands print. No wrapping and no colour, so that output can be piped."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], text: Collection[int] = (0,)) -> str:
    """Columns aligned with two spaces between; the `text` columns to the left, numbers to the right."""
    lines = [[*map(str, line)] for line in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def show(line: Sequence[str]) -> str:
        cells = (
            cell.ljust(w) if i in text else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join([show(lines[0]), "  ".join("-" * w for w in widths), *map(show, lines[1:])])
