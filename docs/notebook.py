"""The tutorial as a notebook: docs/tutorial.ipynb, made from docs/tutorial.md by docs/generate.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
PAGE, NOTEBOOK = DOCS / "tutorial.md", DOCS / "tutorial.ipynb"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n?", re.S | re.M)
HERE = "This notebook is made from `docs/tutorial.md`. Run it in an empty folder, where `kronecell` is installed."


def notebook(page: str) -> str:
    """A page of Markdown as a notebook; commands become lines for the shell, a TOML block becomes mine.toml."""
    cells: list[dict[str, Any]] = []

    def add(kind: str, text: str) -> None:
        code: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
        lines = text.strip().splitlines(keepends=True)
        if lines:
            cells.append({"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": lines, **code})

    title, _, rest = page.partition("\n")
    add("markdown", f"{title}\n\n{HERE}")
    end = 0
    for block in FENCE.finditer(rest):
        add("markdown", rest[end : block.start()])
        end, (kind, text) = block.end(), block.groups()
        if kind == "sh":
            text = "\n".join(f"!{line}" for line in text.strip().splitlines())
        elif kind == "toml":
            text = f"%%writefile mine.toml\n{text}"
        add("code", text)
    add("markdown", rest[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
