"""Measured choices of plans as a file, for other processes on the same kind of machine."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from kronecell.deploy.atomic import write_atomically
from kronecell.deploy.records import named, read_json, table, text, whole
from kronecell.errors import PlanError
from kronecell.ops.tune import choices

FILE_VERSION = 1
CHOICES = table({"kronecell_choices": whole(FILE_VERSION, FILE_VERSION), "choices": named(text())}, {"torch": text()})


def save_choices(path: Path | str) -> None:
    """Write what `kc.tune` chose in this process to a JSON file."""
    document = {"kronecell_choices": FILE_VERSION, "torch": torch.__version__, "choices": choices.names}
    content = json.dumps(document, indent=2)
    write_atomically(Path(path), lambda temporary: temporary.write_text(content))


def load_choices(path: Path | str) -> int:
    """Use the choices that `save_choices` wrote; returns how many. Unknown candidates are refused on first use."""
    advice = "write a file of choices with kronecell.save_choices"
    names: dict[str, str] = read_json(path, CHOICES, PlanError, advice)["choices"]
    choices.update(names)
    return len(names)
