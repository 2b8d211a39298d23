"""Whether tensors are nothing but numbers in memory, and nobody watches what is done with them.

Only then may a kernel of this package read and write them: tracers, transforms, counters of operations and hooks of
torch see the operations of torch alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

_TYPES = (Tensor, nn.Parameter)


def ordinary(x: Tensor) -> bool:
    """Nobody follows the operations but backward(): no compiler, transform of torch.func, forward mode or autocast."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()
        or (
            torch._C._is_any_autocast_enabled() and x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
        )
    )


def autocast_off(like: Tensor) -> AbstractContextManager[Any]:
    """No autocast on this tensor's device; there are devices for which torch cannot even be asked for none."""
    kind = like.device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else nullcontext()


def plain(x: Tensor, small: Tensor) -> bool:
    """Whether the two are numbers in memory, and nobody wants to know what is done with them."""
    return (
        ordinary(x)  # first of all: a tracer would take a look at sizes for a condition
        and unwatched(x)
        and numbers(small)
        and x.is_cpu
        and x.is_contiguous()
        and small.is_contiguous()
        and not (torch.is_grad_enabled() and (x.requires_grad or small.requires_grad))
    )


def numbers(*tensors: Tensor) -> bool:
    """Whether these are float32 in the memory of the CPU, and no mode of torch wants to hear of operations."""
    for tensor in tensors:
        if tensor.dtype is not torch.float32 or not tensor.is_cpu:
            return False
    return unwatched(*tensors)


def unwatched(*tensors: Tensor) -> bool:
    """Whether these are tensors and nothing but that, and no mode of torch wants to hear of operations.

    Written without calls that are not needed: a training step asks of some fifty tensors.
    """
    if torch._C._len_torch_dispatch_stack():  # a counter of operations does not see the kernels here
        return False
    for tensor in tensors:
        if (
            type(tensor) not in _TYPES
            or not torch._C._has_storage(tensor)  # one of a batch of gradients has none of its own
            or tensor.is_neg()  # the numbers of this and of the next are not those in memory
            or tensor._is_zerotensor()
        ):
            return False
    return True
