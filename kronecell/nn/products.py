"""Products with a dense W, and those of a few rows: one call, where starting a product costs more than the product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kronecell.ops.engine import BYTE
from kronecell.ops.kernels import linear, split_linear

FEW_ROWS = 64  # up to which one call that packs nothing takes less time than products of matrices
OWN_ROWS = 8  # from which our product takes less time to call than torch's
WORTH_THREADS = 2**21  # multiply-adds from which threads, which that call has not, would take less time


def is_few(x: Tensor, weight: Sequence[Tensor]) -> bool:
    """Whether the operator for few rows takes the least time, and may be called.

    It may not where a gradient follows, where autocast lowers the product, and in a graph, which serves any rows.
    """
    if torch.compiler.is_compiling() or x.numel() > FEW_ROWS * x.shape[-1]:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or weight[0].requires_grad):
        return False
    if x.dtype not in (weight[0].dtype, torch.uint8):
        return False
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return False
    macs = x.numel() // x.shape[-1] * sum([matrix.numel() for matrix in weight[:3]])
    return macs < WORTH_THREADS or torch.get_num_threads() == 1


def few_rows_product(x: Tensor, weight: Sequence[Tensor], gates: int, bias: Tensor | None) -> Tensor:
    """x W + bias for W = [W], [In, Out] or these and a sparse part, in one call."""
    if x.dtype == torch.uint8:
        x = x.to(weight[0].dtype) * BYTE
    y = split_linear(x if x.ndim == 2 else x.reshape(-1, x.shape[-1]), weight, gates, bias)
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], y.shape[-1])


def dense_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W + bias for a dense W (columns, depth), by the kernel that is fastest for so many rows."""
    if is_few(x, [weight]) and not (bias is not None and bias.requires_grad and torch.is_grad_enabled()):
        return few_rows_product(x, [weight], 1, bias)
    x = x.to(weight.dtype) * BYTE if x.dtype == torch.uint8 else x
    if torch.compiler.is_compiling() or x.numel() < OWN_ROWS * x.shape[-1]:
        return F.linear(x, weight, bias)
    rows = linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return rows.reshape(*x.shape[:-1], rows.shape[-1])
