"""A local web page: sizes, format and ranks in, what the library says about them out."""

from kronecell.report.explore.answers import answer, measured
from kronecell.report.explore.server import Server

__all__ = ["Server", "answer", "measured"]
