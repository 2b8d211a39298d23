"""What is made of weights alone is kept between calls in eval mode, until a parameter changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

Made = TypeVar("Made")

_steps = 0  # of all optimisers: fused ones change parameters without raising their version


def _count_step(*_: object) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_count_step)


class Kept:
    """What was last made of parameters, valid as long as every one is the same storage at the same version.

    In-place updates and load_state_dict raise a parameter's version, `.to` gives it other storage, and steps of
    optimisers are counted. Nothing is kept of memory that another process may change (torch calls all tensors on a GPU
    shared, so they are not asked). Only edits through `parameter.data` are invisible to torch itself; a layer drops
    what it keeps when it is switched between train and eval mode.
    """

    def __init__(self) -> None:
        self._held: tuple[Any, Any, list[Tensor], Any] | None = None

    def get(self, tag: tuple[Any, ...], parameters: Iterable[Tensor], training: bool, make: Callable[[], Made]) -> Made:
        """make(), or what it gave last time if the tag is the same objects and no parameter has changed since."""
        tensors = [*parameters]
        if training or torch.is_grad_enabled() or torch.compiler.is_compiling() or not _plain(tensors):
            self.drop()
            return make()
        key = (_steps, [(t.data_ptr(), t._version, t.dtype) for t in tensors])
        held = self._held  # read once and written once: other threads may run the same layer
        if held is None or held[1] != key or any(old is not new for old, new in zip(held[0], tag, strict=True)):
            if any(t.is_cpu and t.is_shared() for t in tensors):  # to share memory is to move it, which changes the key
                self.drop()
                return make()
            pins = [t.detach() for t in tensors]  # their memory is held so that nothing else can come to its address
            held = (tag, key, pins, make())
            self._held = held
        made: Made = held[3]
        return made

    def drop(self) -> None:
        """Forget."""
        self._held = None

    def __getstate__(self) -> dict[str, Any]:
        return {}  # nothing of it belongs into a copy or a file

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.drop()


def _plain(tensors: list[Tensor]) -> bool:
    """Parameters as a module holds them: not the stand-ins of torch.func, nor inference tensors without a version."""
    return all(type(t) is nn.Parameter and not (t.is_inference() or t.is_meta) for t in tensors)
