"""The modules that tests of torch's own tools share, small, in every form: one per route through the library."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import kronecell as kc
from kronecell.nn.sparse import SparseMatrix
from tests.nn.recurrent_cases import flat

KCP, TT, BT = "kcp:K=2,CA=2,CB=2", "tt:r=2", "bt:r=2,P=2"


def grown(module: nn.Module) -> nn.Module:
    """The module with sparse parts that are not zero."""
    for part in module.modules():
        if isinstance(part, SparseMatrix):
            nn.init.normal_(part.entries, std=0.3)
    return module


# All take (3, 2, 12): three steps of two rows, or six rows.
BUILD: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: kc.TensorLinear("tt:m=3x4,n=2x4,r=2"),
    "linear-kcp": lambda: kc.TensorLinear("kcp:m=3x4,n=2x4,K=2,CA=2,CB=2"),
    "lstm-dense": lambda: kc.LSTM(12, 8),
    "lstm-kcp": lambda: kc.LSTM(12, 8, input_format=KCP),
    "lstm-tt": lambda: kc.LSTM(12, 8, input_format=TT, hidden_format=TT),
    "lstm-bt": lambda: kc.LSTM(12, 8, input_format=BT, hidden_format="lowrank:r=2"),
    "lstm-deep": lambda: kc.LSTM(12, 8, 2, bidirectional=True, proj_size=4, input_format=KCP, hidden_format=TT),
    "gru-kcp": lambda: kc.GRU(12, 8, input_format=KCP, shared=True),
    "gru-tt": lambda: kc.GRU(12, 8, input_format=TT, hidden_format="lowrank:r=2"),
    "gru-deep": lambda: kc.GRU(12, 8, 2, bidirectional=True, batch_first=True, input_format=TT),
    "lstm-doped": lambda: grown(kc.LSTM(12, 8, input_format=f"doped:0.1+{TT}", hidden_format="doped:0.03+lowrank:r=2")),
    "gru-doped": lambda: grown(
        kc.GRU(12, 8, input_format=f"doped:0.05,block=4+{KCP}", hidden_format=f"doped:0.1+{TT}")
    ),
    "lstm-loop": lambda: kc.LSTM(12, 8, input_format=TT, hidden_format=TT, recurrence="loop"),
}
NAMES = [*BUILD]
QUICK = ["linear-kcp", "lstm-kcp", "lstm-tt", "lstm-bt", "gru-kcp", "gru-tt"]


def build(name: str, **to: Any) -> nn.Module:
    """The module of this name, always with the same numbers."""
    torch.manual_seed(0)
    return BUILD[name]().to(**to)


def given(dtype: torch.dtype = torch.float32) -> Tensor:
    """An input of every module."""
    return torch.randn(3, 2, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def results(module: nn.Module | Callable[..., Any], x: Tensor, *rest: Any) -> list[Tensor]:
    """All tensors that a module gives."""
    return tensors_of(module(x, *rest))


def tensors_of(result: Any) -> list[Tensor]:
    """The same for a result."""
    return [result] if isinstance(result, Tensor) else flat(result)


def oracle(module: nn.Module) -> nn.Module:
    """torch.nn's module with dense weights in double precision, made of the parameters as they are now."""
    return copy.deepcopy(module).double().to_dense()


def assert_fresh(module: nn.Module, x: Tensor, tolerance: float = 1e-5) -> None:
    """The module gives what its parameters say now, in both modes, with and without gradients."""
    twin = oracle(module)
    mode = module.training
    for training, grad in ((mode, True), (mode, False), (False, False), (True, True), (False, True)):
        module.train(training)
        with torch.set_grad_enabled(grad):
            for a, b in zip(results(module, x), results(twin, x.double()), strict=True):
                torch.testing.assert_close(a.detach().double(), b.detach(), rtol=tolerance, atol=tolerance)
    module.train(mode)


def factor_items(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Every parameter as (owner, name)."""
    for owner in module.modules():
        for name, _ in owner.named_parameters(recurse=False):
            yield owner, name
