"""kc.freeze: a module for inference that holds products of weights instead of computing them at each forward."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch import nn

from kronecell.errors import ShapeError
from kronecell.nn.embedding import TensorEmbedding
from kronecell.nn.linear import TensorLinear
from kronecell.nn.recurrent import Recurrent

Module = TypeVar("Module", bound=nn.Module)

ROWS = (1, 16, 128, 1024)  # numbers of rows of x (batch * time) for which products of weights are held


def freeze(module: Module, rows: Sequence[int] = ROWS) -> Module:
    """A copy of `module` in eval mode whose layers of this package hold their products of weights as buffers.

    The plan of a product depends on the number of rows; the plans for `rows` are held, and a call takes the next larger
    one. The copy refuses to train and takes no gradients for its weights. Its state dict is that of the module:
    loading one computes the products anew.

    >>> frozen = freeze(TensorLinear("tt:m=8x8,n=4x4,r=3"))
    >>> frozen.training
    False
    """
    if not isinstance(module, nn.Module):
        raise ShapeError(f"freeze takes a torch module, got {type(module).__name__}")
    if not rows or any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in rows):
        raise ShapeError(f"rows must be positive integers such as (1, 128), got {rows!r}")
    frozen = copy.deepcopy(module).eval().requires_grad_(False)
    for layer in _layers(frozen):
        if not layer.frozen:
            layer.register_load_state_dict_post_hook(_refreeze)
        layer.frozen_rows = tuple(rows)
        _refreeze(layer)
    return frozen


def _layers(module: nn.Module) -> Iterator[TensorLinear | TensorEmbedding | Recurrent]:
    """Layers of this package; a recurrent one answers for those inside it."""
    if isinstance(module, (TensorLinear, TensorEmbedding, Recurrent)):
        yield module
        return
    for child in module.children():
        yield from _layers(child)


def _refreeze(layer: TensorLinear | TensorEmbedding | Recurrent, _: object = None) -> None:
    """Compute what is held from the present parameters. A function of the module: a lambda cannot be pickled."""
    layer.frozen = type(layer.frozen)()
    layer.freeze_products(layer.frozen_rows)
