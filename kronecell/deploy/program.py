"""kc.export_program: torch.export for programs that run without Python, such as packages of AOTInductor."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from kronecell.errors import CheckpointError
from kronecell.nn.freeze import freeze
from kronecell.ops.library import why_not
from kronecell.ops.registration import OPERATORS


@torch.no_grad()
def export_program(module: nn.Module, example: tuple[Any, ...], dynamic_shapes: Any = None) -> Any:
    """A torch.export.ExportedProgram of torch's own operators and of our compiled ones, which need no Python.

    The module is frozen, as by `kc.freeze`: products of weights are constants of the program. Operators that exist in
    Python only, which read a plan, become the products of that plan. `example` and `dynamic_shapes` are those of
    torch.export.export. Who runs the program loads `kronecell/_kernels.so` first.

    >>> from kronecell import LSTM
    >>> program = export_program(LSTM(16, 8, input_format="lowrank:r=2"), (torch.randn(5, 1, 16),))
    >>> program.module()(torch.randn(5, 1, 16))[0].shape
    torch.Size([5, 1, 8])
    """
    if not isinstance(module, nn.Module):
        raise CheckpointError(f"export_program takes a torch module, got {type(module).__name__}")
    if not isinstance(example, tuple):
        raise CheckpointError(f"the example must be a tuple of inputs, such as (x,), got {type(example).__name__}")
    if (reason := why_not()) is not None:
        raise CheckpointError(f"a program without Python needs the compiled kernels: {reason}")
    program = torch.export.export(freeze(module), example, dynamic_shapes=dynamic_shapes, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about functions of its own that it calls
        return program.run_decompositions({of.kernel: of.reference for of in OPERATORS if not of.compiled})
