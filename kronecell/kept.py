"""Prepared weights kept between calls in eval mode, until a parameter changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kronecell.candidates import Runner


class Kept:
    """The tensors of the last `prepare`, valid as long as every parameter is the same storage at the same version.

    In-place updates, optimiser steps and load_state_dict raise a parameter's version; `.to` gives it other storage.
    Only edits through `parameter.data` are invisible to torch itself; switching to train mode and back makes them seen.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._tensors: dict[str, Tensor] = {}

    def prepare(self, runner: Runner, factors: Mapping[str, Tensor], training: bool) -> Mapping[str, Tensor]:
        """runner.prepare(factors), or what it gave last time if nothing has changed since."""
        tensors = [*factors.values()]
        if training or torch.is_grad_enabled() or torch.compiler.is_compiling() or not _plain(tensors):
            self.drop()
            return runner.prepare(factors)
        key = (id(runner), [(t.data_ptr(), t._version, t.dtype) for t in tensors])
        if key != self._key:
            self._tensors = runner.prepare(factors)
            self._key, self._runner = key, runner  # holding the runner keeps its id from being reused
        return self._tensors

    def drop(self) -> None:
        """Forget."""
        self._key, self._tensors = None, {}

    def __getstate__(self) -> dict[str, Any]:
        return {}  # nothing of it belongs into a copy or a file

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.drop()


def _plain(tensors: list[Tensor]) -> bool:
    """Parameters as a module holds them: not the stand-ins of torch.func, nor inference tensors without a version."""
    return not [t for t in tensors if type(t) is not nn.Parameter or t.is_inference() or t.is_meta]
