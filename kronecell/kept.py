"""Prepared weights kept between calls in eval mode, until a parameter changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from kronecell.candidates import Runner

_steps = 0  # of all optimisers: fused ones change parameters without raising their version


def _count_step(*_: object) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_count_step)


class Kept:
    """The tensors of the last `prepare`, valid as long as every parameter is the same storage at the same version.

    In-place updates and load_state_dict raise a parameter's version, `.to` gives it other storage, and steps of
    optimisers are counted. Only edits through `parameter.data` are invisible to torch itself; a layer drops what it
    keeps when it is switched between train and eval mode.
    """

    def __init__(self) -> None:
        self._held: tuple[Runner, Any, Mapping[str, Tensor]] | None = None

    def prepare(self, runner: Runner, factors: Mapping[str, Tensor], training: bool) -> Mapping[str, Tensor]:
        """runner.prepare(factors), or what it gave last time if nothing has changed since."""
        tensors = [*factors.values()]
        if training or torch.is_grad_enabled() or torch.compiler.is_compiling() or not _plain(tensors):
            self.drop()
            return runner.prepare(factors)
        key = (_steps, [(t.data_ptr(), t._version, t.dtype) for t in tensors])
        held = self._held  # read once and written once: other threads may run the same layer
        if held is None or held[0] is not runner or held[1] != key:
            held = (runner, key, runner.prepare(factors))
            self._held = held
        return held[2]

    def drop(self) -> None:
        """Forget."""
        self._held = None

    def __getstate__(self) -> dict[str, Any]:
        return {}  # nothing of it belongs into a copy or a file

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.drop()


def _plain(tensors: list[Tensor]) -> bool:
    """Parameters as a module holds them: not the stand-ins of torch.func, nor inference tensors without a version."""
    return not [t for t in tensors if type(t) is not nn.Parameter or t.is_inference() or t.is_meta]
