"""Whole files for data: a failure to write is told apart from a failure to read a video."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from kronecell.deploy.atomic import replace_whole
from kronecell.data.video import printable
from kronecell.errors import DataError


class OutputError(DataError):
    """The place to write to is at fault (full disk, no permission), not the video being read."""


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Call ``write(file)`` so that ``path`` appears with all of it or, whatever happens, does not change."""

    def fill(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            write(file)

    try:
        replace_whole(path, fill)
    except OSError as error:
        raise OutputError(f"{printable(path)}: cannot be written: {error.strerror or error}") from None
