"""Kronecell: recurrent networks whose weight matrices are stored, multiplied and trained as tensor networks.

This is the table of contents. A name is imported when it is first used: `import kronecell`, `kronecell --help` and the
processes that only decode videos do without torch, which takes two seconds and 300 MB to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same table for type checkers and editors, which do not run __getattr__
    from kronecell.compress import compress
    from kronecell.compress.finetune import finetune
    from kronecell.compress.suggest import suggest
    from kronecell.deploy.c_source.export import export_c
    from kronecell.deploy.choices import load_choices, save_choices
    from kronecell.deploy.modules import save
    from kronecell.deploy.onnx import export_onnx
    from kronecell.deploy.program import export_program
    from kronecell.errors import CheckpointError, DataError, KronecellError, PlanError, RankError, ShapeError
    from kronecell.formats import BT, CP, HT, KCP, KT, TR, TT, Dense, Doped, Format, LowRank, Tucker, parse
    from kronecell.formats.modes import factorize
    from kronecell.nn.cells import GRUCell, LSTMCell
    from kronecell.nn.counting import count
    from kronecell.nn.embedding import TensorEmbedding
    from kronecell.nn.freeze import freeze
    from kronecell.nn.linear import TensorLinear
    from kronecell.nn.quantize import dequantize, quantize
    from kronecell.nn.rates import param_groups
    from kronecell.nn.rnn import GRU, LSTM
    from kronecell.ops.tune import tune
    from kronecell.plans.counting import Cost
    from kronecell.plans.network import Factor, Network
    from kronecell.plans.plan import Plan
    from kronecell.training.classifier import VideoClassifier
    from kronecell.training.predict import Prediction, Preprocessing
    from kronecell.training.saved import load
    from kronecell.training.sparsity import SparsitySchedule, train_sparsity

__version__ = "0.2.0"

_CONTENTS = {
    "errors": ("CheckpointError", "DataError", "KronecellError", "PlanError", "RankError", "ShapeError"),
    "plans.network": ("Factor", "Network"),
    "plans.plan": ("Plan",),
    "ops.tune": ("tune",),
    "formats": ("BT", "CP", "HT", "KCP", "KT", "TR", "TT", "Dense", "Doped", "Format", "LowRank", "Tucker", "parse"),
    "formats.modes": ("factorize",),
    "nn.cells": ("GRUCell", "LSTMCell"),
    "nn.counting": ("count",),
    "plans.counting": ("Cost",),
    "nn.linear": ("TensorLinear",),
    "nn.embedding": ("TensorEmbedding",),
    "nn.rates": ("param_groups",),
    "nn.rnn": ("GRU", "LSTM"),
    "nn.freeze": ("freeze",),
    "nn.quantize": ("dequantize", "quantize"),
    "deploy.c_source.export": ("export_c",),
    "deploy.choices": ("load_choices", "save_choices"),
    "deploy.modules": ("save",),
    "deploy.onnx": ("export_onnx",),
    "deploy.program": ("export_program",),
    "training.classifier": ("VideoClassifier",),
    "training.predict": ("Prediction", "Preprocessing"),
    "training.saved": ("load",),
    "training.sparsity": ("SparsitySchedule", "train_sparsity"),
    "compress": ("compress",),
    "compress.finetune": ("finetune",),
    "compress.suggest": ("suggest",),
}
_HOME = {name: module for module, names in _CONTENTS.items() for name in names}
_PACKAGES = ("cli", "compress", "data", "deploy", "formats", "nn", "ops", "paper", "plans", "report", "training")

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
    "Doped",
    "Factor",
    "Format",
    "GRUCell",
    "KronecellError",
    "LSTMCell",
    "LowRank",
    "Network",
    "Plan",
    "PlanError",
    "Prediction",
    "Preprocessing",
    "RankError",
    "ShapeError",
    "SparsitySchedule",
    "TensorEmbedding",
    "TensorLinear",
    "Tucker",
    "VideoClassifier",
    "compress",
    "count",
    "dequantize",
    "export_c",
    "export_onnx",
    "export_program",
    "factorize",
    "finetune",
    "freeze",
    "load",
    "load_choices",
    "param_groups",
    "parse",
    "quantize",
    "save",
    "save_choices",
    "suggest",
    "train_sparsity",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:  # first, because kronecell.compress is a package that can be called
        return import_module(f"kronecell.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'kronecell' has no attribute {name!r}")
    value = getattr(import_module(f"kronecell.{_HOME[name]}"), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
