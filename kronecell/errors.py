"""One family of errors: each message says what was wrong, what was expected, what was got, and a way out."""

from __future__ import annotations

import os
from typing import ClassVar


def on_one_line(text: str, most: int) -> str:
    """The text on one line of at most `most` characters, cut in the middle; what no terminal should get is escaped."""
    if len(text) > 4 * most:
        text = f"{text[: 2 * most]} {text[-2 * most :]}"
    line = " ".join(text.split())
    if not line.isprintable():  # escape sequences, and bytes of file names that are not UTF-8
        line = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in line)
    if len(line) <= most:
        return line
    end = most // 3  # the end has the way out
    return f"{line[: most - end - 5]} ... {line[-end:]}"


class KronecellError(ValueError):
    """Base of everything Kronecell raises on purpose; the command line prints it on one line and exits 2.

    The message is cut here, once, because it may quote input of any size.
    A subclass for what is no mistake of the caller, such as a run that diverged, has 1 as its `exit_code`.
    """

    exit_code = 2

    LONGEST: ClassVar[int] = 1000  # characters of a message

    def __init__(self, message: object = "") -> None:
        super().__init__(on_one_line(str(message), self.LONGEST))


class ShapeError(KronecellError):
    """Modes, widths or tensor shapes that do not fit together."""


class RankError(KronecellError):
    """A rank that is not a positive integer, or larger than its network can use."""


class PlanError(KronecellError):
    """A contraction order that does not exist or does not fit its network."""


class DataError(KronecellError):
    """A video, data set or cache that cannot be read."""

    LONGEST = 300


class CheckpointError(KronecellError):
    """A saved model that is incomplete, damaged, or not what its description says."""

    LONGEST = 300


def printable(path: str | os.PathLike[str]) -> str:
    """A file name that any terminal and any log can take: bytes that are not UTF-8 become backslash escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
