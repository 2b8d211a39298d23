"""x W^T for a tall x and few columns, the first product of most plans and nearly all of their time.

BLAS repacks x before it multiplies, which costs as much as the product when W is one or two registers wide. oneDNN
reads x where it lies. Which is faster where was measured on one core (benchmarks/results/kernels.md).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from kronecell.processor import LANES

MOST_COLUMNS = {16: 16, 8: 64}  # by lanes; with more columns BLAS is as good or better
LEAST_ELEMENTS = {16: 2**21, 8: 2**20}  # of x; with fewer, there is little to gain and the start of a kernel to lose
COLUMNS, ELEMENTS = MOST_COLUMNS.get(LANES, 16), LEAST_ELEMENTS.get(LANES, 2**20)  # what lies as W does, and large

_kernel: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # absent where torch is built without oneDNN


def narrow(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear(x, weight), by oneDNN where that is faster and nobody asks for a gradient here."""
    return _kernel(x, weight, None, "none", [], "") if suits(x, weight) else F.linear(x, weight)


def ordinary(x: Tensor) -> bool:
    """Nobody follows the operations but backward(): no compiler, transform of torch.func, forward mode or autocast."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()
        or (x.device.type != "meta" and torch.is_autocast_enabled(x.device.type))
    )


def autocast_off(like: Tensor) -> AbstractContextManager[Any]:
    """No autocast on this tensor's device; there are devices for which torch cannot even be asked for none."""
    kind = like.device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else nullcontext()


def faster(elements: int, depth: int, columns: int) -> bool:
    """Whether oneDNN is the faster for x of so many elements and sums of so many; not where nobody has measured."""
    if LANES not in MOST_COLUMNS or not 1 < columns <= COLUMNS:
        return False
    if LANES == 16:
        return depth >= 128 and elements >= ELEMENTS
    if columns <= LANES:
        # Half a register is worth it for short sums only: long ones BLAS makes as dot products, at full speed.
        return (columns > LANES // 2 or depth <= 64) and depth >= 8 and elements >= ELEMENTS // 4
    return depth >= 8 and elements >= ELEMENTS


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN can be asked, and is the faster."""
    return (
        _kernel is not None
        and ordinary(x)  # first of all: a tracer would take a look at sizes for a condition
        and faster(x.numel(), *reversed(weight.shape))
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and type(x) is Tensor
        and x.is_contiguous()
        and weight.is_contiguous()
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and bool(torch.backends.mkldnn.enabled)
    )
