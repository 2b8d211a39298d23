"""Kronecell: recurrent networks whose weight matrices are stored, multiplied and trained as tensor networks."""

from kronecell.nn.counting import Cost, count
from kronecell.compress import compress
from kronecell.errors import CheckpointError, DataError, KronecellError, PlanError, RankError, ShapeError
from kronecell.deploy.onnx import export_onnx
from kronecell.deploy.modules import load, save
from kronecell.formats import BT, CP, HT, KCP, KT, TR, TT, Dense, Format, LowRank, Tucker, parse
from kronecell.nn.linear import TensorLinear
from kronecell.formats.modes import factorize
from kronecell.plans.network import Factor, Network
from kronecell.ops.plan import Plan
from kronecell.nn.rnn import GRU, LSTM
from kronecell.compress.suggest import suggest
from kronecell.ops.tune import measure_on_first_use, tune

__version__ = "0.1.0"

__all__ = [
    "BT",
    "CP",
    "GRU",
    "HT",
    "KCP",
    "KT",
    "LSTM",
    "TR",
    "TT",
    "CheckpointError",
    "Cost",
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
    "TensorLinear",
    "Tucker",
    "compress",
    "count",
    "export_onnx",
    "factorize",
    "load",
    "measure_on_first_use",
    "parse",
    "save",
    "suggest",
    "tune",
]
