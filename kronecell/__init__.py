"""Kronecell: recurrent networks whose weight matrices are stored, multiplied and trained as tensor networks."""

__version__ = "0.1.0"
