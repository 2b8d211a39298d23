"""One family of errors: each message says what was wrong, what was expected, what was got, and a way out."""

from __future__ import annotations

import os


class KronecellError(ValueError):
    """Base of everything Kronecell raises on purpose; the command line prints it on one line and exits 2."""


class ShapeError(KronecellError):
    """Modes, widths or tensor shapes that do not fit together."""


class RankError(KronecellError):
    """A rank that is not a positive integer, or larger than its network can use."""


class PlanError(KronecellError):
    """A contraction order that does not exist or does not fit its network."""


class DataError(KronecellError):
    """A video, data set or cache that cannot be read."""


class CheckpointError(KronecellError):
    """A saved model that is incomplete, damaged, or not what its description says."""


def printable(path: str | os.PathLike[str]) -> str:
    """A file name that any terminal and any log can take: bytes that are not UTF-8 become backslash escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
