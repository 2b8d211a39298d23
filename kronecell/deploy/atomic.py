"""Writing a file so that a reader sees the old one or the whole new one, never a part, whatever happens."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kronecell.errors import KronecellError

TEMPORARY = ".tmp-"  # followed by the process id; whatever still has it after a crash can be deleted


def write_atomically(target: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside the target, sync it, and rename it over the target."""
    try:
        replace_whole(Path(target), write)
    except OSError as error:
        raise KronecellError(f"cannot write {target}: {error.strerror or error}") from None


def replace_whole(target: Path, fill: Callable[[Path], object]) -> None:
    """The same, for callers that say in their own words what an OSError means."""
    temporary = target.with_name(f"{TEMPORARY}{os.getpid()}-{target.name}")
    try:
        fill(temporary)
        _sync(temporary)
        os.replace(temporary, target)
        _sync(target.parent)  # makes the rename itself last through a power cut
    finally:
        temporary.unlink(missing_ok=True)


def remove_temporaries(folder: Path) -> None:
    """Delete what writers that were killed left behind."""
    for path in folder.glob(".tmp*"):  # ours, and those that safetensors makes inside `fill`
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
