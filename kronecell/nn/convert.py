"""torch.nn's layers and cells beside ours: the same made dense, ours fitted to it, and how large it would be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from kronecell.errors import ShapeError
from kronecell.nn.linear import TensorLinear

Kind = TypeVar("Kind", bound=nn.Module)

ARGUMENTS = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
CELL_ARGUMENTS = ("input_size", "hidden_size", "bias")


def arguments_of(module: Any) -> dict[str, Any]:
    """The arguments of torch.nn's constructor for a layer or cell of these sizes; a GRU knows no projection."""
    if issubclass(getattr(module, "DENSE", type(module)), nn.RNNCellBase):
        return {name: getattr(module, name) for name in CELL_ARGUMENTS}
    projection = {"proj_size": module.proj_size} if module.proj_size else {}
    return {name: getattr(module, name) for name in ARGUMENTS} | projection


@torch.no_grad()
def as_dense(module: Any) -> Any:
    """torch.nn's module with the same function as one of ours."""
    like = next(tensor for tensor in module.state_dict().values() if tensor.is_floating_point())
    dense = module.DENSE(**arguments_of(module), device="meta", dtype=like.dtype).to_empty(device=like.device)
    for name, target in dense.named_parameters():
        weight = getattr(module, name)
        if isinstance(weight, nn.Module):
            dense_weight: Any = weight.dense_weight
            weight = dense_weight()[:, : target.shape[1]]  # padded inputs are zero: their columns go
        target.copy_(weight)
    if isinstance(dense, nn.RNNBase):
        dense.flatten_parameters()
    return dense.train(module.training)


def fitted(kind: type[Kind], trained: nn.Module, fit_options: Mapping[str, Any], **options: Any) -> Kind:
    """A new module of this kind, close to a trained one of torch.nn."""
    wanted = kind.DENSE  # type: ignore[attr-defined]
    if not isinstance(trained, wanted):
        raise ShapeError(f"{kind.__name__}.from_dense takes a torch.nn.{wanted.__name__}, got {type(trained).__name__}")
    like = next(trained.parameters())
    module = kind(**arguments_of(trained), device=like.device, dtype=like.dtype, **options)
    fit_to(module, trained, fit_options)
    return module.train(trained.training)


def fit_to(module: nn.Module, trained: nn.Module, fit_options: Mapping[str, Any]) -> None:
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
