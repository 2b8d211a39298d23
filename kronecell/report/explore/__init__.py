"""A local web page where one types sizes, format and ranks, and sees what the library says about them."""

from kronecell.report.explore.answers import answer, measured
from kronecell.report.explore.server import Server

__all__ = ["Server", "answer", "measured"]
