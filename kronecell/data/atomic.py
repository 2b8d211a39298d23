"""Files that are either whole or not there: write under a temporary name, flush to the disk, then rename."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from kronecell.data.video import printable
from kronecell.errors import DataError


class OutputError(DataError):
    """The place to write to is at fault (full disk, no permission), not the video being read."""


TEMPORARY = ".tmp-"  # followed by the process id; whatever still has it after a crash can be deleted


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Call ``write(file)`` so that ``path`` appears with all of it or, whatever happens, does not change."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        try:
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_folder(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(f"{printable(path)}: cannot be written: {error.strerror or error}") from None


def _sync_folder(folder: Path) -> None:
    """Make the rename itself last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporaries(folder: Path) -> None:
    """Delete what writers that were killed left behind."""
    for path in folder.glob(f"{TEMPORARY}*"):
        path.unlink(missing_ok=True)
