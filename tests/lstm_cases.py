"""Operands of the compiled recurrence, the equations of an LSTM, and what it means that two results agree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kronecell.nn.recurrence import lstm_step, run_loop
from kronecell.ops import compiled, lstm_kernel

EPS = torch.finfo(torch.float32).eps

built = pytest.mark.skipif(compiled.library is None, reason="the compiled kernels are not built: no C compiler")
used = pytest.mark.skipif(not lstm_kernel.available(), reason="the compiled recurrence is not used here")


def operands(steps: int, batch: int, hidden: int, seed: int = 0) -> list[Tensor]:
    """Gates, U, h and c; all want a gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((steps, batch, 4 * hidden), (4 * hidden, hidden), (batch, hidden), (batch, hidden))
    gates, weight, h, c = (torch.randn(shape, generator=generator) for shape in shapes)
    return [t.requires_grad_() for t in (gates, weight / hidden**0.5, h, c)]


def equations(gates: Tensor, weight: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    step = partial(lstm_step, hidden=partial(F.linear, weight=weight), project=None)
    out, last = run_loop(step, gates, None, (h, c))
    return out, *last


def infer(gates: Tensor, weight: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    return lstm_kernel.infer(gates, lstm_kernel.packed(weight), h, c)


def doubled(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def assert_rounded(got: Sequence[Tensor], want: Sequence[Tensor], ulps: float = 10) -> None:
    """Equal up to some roundings of numbers as large as the largest of these tensors has on average."""
    largest = max(rms(b) for b in want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == torch.float32
        assert rms(a - b) <= ulps * EPS * largest


def rms(tensor: Tensor) -> float:
    return tensor.detach().double().square().mean().sqrt().item()


def combination(results: Sequence[Tensor], seed: int = 3) -> Tensor:
    """A number that depends on all results."""
    generator = torch.Generator().manual_seed(seed)
    terms = [(r * torch.randn(r.shape, generator=generator).to(r.dtype)).sum() for r in results]
    return torch.stack(terms).sum()


def assert_agrees(tensors: list[Tensor]) -> None:
    """The kernel has the values and gradients of the equations."""
    exact = doubled(tensors)
    got, want = lstm_kernel.train(*tensors), equations(*exact)
    assert_rounded(got, want)
    assert_rounded(torch.autograd.grad(combination(got), tensors), torch.autograd.grad(combination(want), exact))
