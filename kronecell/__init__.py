"""Kronecell: recurrent networks whose weight matrices are stored, multiplied and trained as tensor networks."""

from kronecell.errors import CheckpointError, DataError, KronecellError, PlanError, RankError, ShapeError
from kronecell.formats import BT, CP, HT, KCP, KT, TR, TT, Dense, Format, LowRank, Tucker, parse
from kronecell.modes import factorize
from kronecell.network import Factor, Network
from kronecell.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "BT",
    "CP",
    "HT",
    "KCP",
    "KT",
    "TR",
    "TT",
    "CheckpointError",
    "DataError",
    "Dense",
    "Factor",
    "Format",
    "KronecellError",
    "LowRank",
    "Network",
    "Plan",
    "PlanError",
    "RankError",
    "ShapeError",
    "Tucker",
    "factorize",
    "parse",
]
