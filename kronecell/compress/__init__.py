"""A trained model made smaller: matrices found, ranks chosen, layers fitted and replaced, the loss reported."""

from kronecell.compress.model import compress
from kronecell.compress.report import LayerReport, Report

__all__ = ["LayerReport", "Report", "compress"]
