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
    return all(t.dtype == torch.float32 and t.is_cpu and unwatched(t) for t in tensors)


def unwatched(tensor: Tensor) -> bool:
    """Whether this is a tensor and nothing but that, and no mode of torch wants to hear of operations."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and torch._C._has_storage(tensor)  # one of a batch of gradients has none of its own
        and torch._C._len_torch_dispatch_stack() == 0  # a counter of operations does not see the kernels here
        and not (tensor.is_neg() or tensor._is_zerotensor())  # whose numbers are not those in memory
    )
