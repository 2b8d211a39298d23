"""Measured choices of plans as a file, for other processes on the same kind of machine."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from kronecell.deploy.atomic import write_atomically
from kronecell.errors import PlanError
from kronecell.ops.tune import choices

FILE_VERSION = 1


def save_choices(path: Path | str) -> None:
    """Write what `kc.tune` chose in this process to a JSON file."""
    document = {"kronecell_choices": FILE_VERSION, "torch": torch.__version__, "choices": choices.names}
    text = json.dumps(document, indent=2)
    write_atomically(Path(path), lambda temporary: temporary.write_text(text))


def load_choices(path: Path | str) -> int:
    """Use the choices that `save_choices` wrote; returns how many. Unknown candidates are refused on first use."""
    try:
        document = json.loads(Path(path).read_text())
        names = document["choices"]
        if document["kronecell_choices"] != FILE_VERSION or not all(isinstance(name, str) for name in names.values()):
            raise ValueError
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PlanError(f"{path} is not a file of choices; write one with kronecell.save_choices") from None
    choices.update(names)
    return len(names)
