"""Run directories -> one offline HTML page, a Markdown table, or JSON."""

from kronecell.report.groups import Group, group_runs
from kronecell.report.load import Broken, Run, find_runs, load_runs
from kronecell.report.page import write_report
from kronecell.report.tables import markdown, summary

__all__ = [
    "Broken",
    "Group",
    "Run",
    "find_runs",
    "group_runs",
    "load_runs",
    "markdown",
    "summary",
    "write_report",
]
