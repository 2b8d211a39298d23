"""x W^T for a tall x and at most sixteen columns, the first product of most plans and nearly all of their time.

BLAS repacks x before it multiplies, which costs as much as the product when W is one vector register wide. oneDNN reads
x where it lies. On one core it takes about 0.8 of the time (benchmarks/results/kernels.md).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

COLUMNS = 16  # one register of float32; with more, BLAS is mostly as good or better
DEPTH = 128  # with fewer summed elements the product is too short for either to matter, and BLAS starts faster
ELEMENTS = 2**21  # of x; below, there is little to gain and the start of oneDNN's kernel to lose

_kernel: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # absent where torch is built without oneDNN


def narrow(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear(x, weight), by oneDNN where that is faster and nobody asks for a gradient here."""
    return _kernel(x, weight, None, "none", [], "") if _suits(x, weight) else F.linear(x, weight)


def ordinary(x: Tensor) -> bool:
    """Nobody follows the operations but backward(): no compiler, transform of torch.func, forward mode or autocast."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()
        or (x.device.type != "meta" and torch.is_autocast_enabled(x.device.type))
    )


def _suits(x: Tensor, weight: Tensor) -> bool:
    return (
        _kernel is not None
        and 1 < weight.shape[0] <= COLUMNS
        and x.shape[1] >= DEPTH
        and ordinary(x)
        and x.numel() >= ELEMENTS
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and type(x) is Tensor
        and x.is_contiguous()
        and weight.is_contiguous()
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and bool(torch.backends.mkldnn.enabled)
    )
