"""A local web page where one types sizes, format and ranks, and sees what the library says about them."""

from kronecell.explore.answer import answer, measured
from kronecell.explore.server import Server

__all__ = ["Server", "answer", "measured"]
