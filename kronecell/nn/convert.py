"""torch.nn's LSTM and GRU beside ours: the same layer made dense, ours fitted to it, and how large it would be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kronecell.nn.linear import TensorLinear

ARGUMENTS = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")


def arguments_of(module: Any) -> dict[str, Any]:
    """The arguments of torch.nn's constructor for a layer of these sizes; a GRU knows no projection."""
    projection = {"proj_size": module.proj_size} if module.proj_size else {}
    return {name: getattr(module, name) for name in ARGUMENTS} | projection


@torch.no_grad()
def as_dense(module: Any) -> Any:
    """torch.nn's module with the same function as one of ours."""
    like = next(module.parameters())
    dense = module.DENSE(**arguments_of(module), device="meta", dtype=like.dtype).to_empty(device=like.device)
    for name, target in dense.named_parameters():
        weight = getattr(module, name)
        if isinstance(weight, TensorLinear):
            weight = weight.dense_weight()[:, : target.shape[1]]  # padded inputs are zero: their columns go
        target.copy_(weight)
    dense.flatten_parameters()
    return dense.train(module.training)


def fit_to(module: nn.Module, trained: nn.LSTM | nn.GRU, fit_options: Mapping[str, Any]) -> None:
    """Dense parameters are copied, compressed ones fitted."""
    for name, source in trained.named_parameters():
        target = getattr(module, name)
        if isinstance(target, TensorLinear):
            target.fit(F.pad(source.detach(), (0, target.in_features - source.shape[1])), **fit_options)
        else:
            with torch.no_grad():
                target.copy_(source)


def parameters_of(module: Any) -> int:
    """Parameters of torch.nn's module of the same sizes."""
    total, rows = 0, module.GATES * module.hidden_size
    for layer in range(module.num_layers):
        width = module.input_size if layer == 0 else module.directions * module.output_size
        one = rows * (width + module.output_size + 2 * module.bias) + module.proj_size * module.hidden_size
        total += module.directions * one
    return total
