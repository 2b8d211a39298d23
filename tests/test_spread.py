"""The gradient of a small matrix that multiplies a batch of others: what its kernel computes, and where it is used."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kronecell as kc
from kronecell.ops import compiled, narrow
from tests.test_compiled import EPS, built, counted, operand, used


@built
@settings(max_examples=100)
@given(
    batch=st.integers(0, 9), places=st.integers(1, 25), depth=st.integers(0, 40), lines=st.integers(1, 20)
)  # fmt: skip
@example(batch=3, places=20, depth=264, lines=16)
def test_the_kernel_sums_the_products_of_a_batch(batch: int, places: int, depth: int, lines: int) -> None:
    depth += compiled.LEAST_DEPTH
    x, up = operand(batch * places, depth, False), operand(batch * lines, depth, False, 1)
    x, up = x.view(batch, places, depth), up.view(batch, lines, depth)
    total = torch.ones(lines, places)
    compiled.spread_gradient(x, up, total)
    wanted = torch.einsum("bld,bpd->lp", up.double(), x.double())
    most = torch.einsum("bld,bpd->lp", up.double().abs(), x.double().abs())
    assert bool(((total - 1 - wanted).abs() <= (batch * depth + 2) * EPS * (most + 1)).all())


@built
def test_threads_leave_the_bits_and_nothing_is_read_or_written_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "WORTH_A_THREAD", 1)
    batch, places, depth, lines = 3, 7, compiled.LEAST_DEPTH + 5, 6
    walls: list[Tensor] = []

    def within(tensor: Tensor) -> Tensor:
        """The tensor between walls of NaN."""
        memory = torch.full((tensor.numel() + 256,), torch.nan)
        walls.extend((memory[:128], memory[-128:]))
        return memory[128:-128].view(tensor.shape).copy_(tensor)

    x = within(operand(batch * places, depth, False).view(batch, places, depth))
    up = within(operand(batch * lines, depth, False, 1).view(batch, lines, depth))
    before, totals = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            totals.append(within(torch.zeros(lines, places)))
            compiled.spread_gradient(x, up, totals[-1])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(total, totals[0]) and bool(total.isfinite().all()) for total in totals)
    assert all(bool(wall.isnan().all()) for wall in walls)


@built
@used
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("fmt", [kc.BT((8, 20, 20, 18), (4, 4, 4, 4), 4, P=2), kc.Tucker((8, 20, 20, 18), (4,) * 4, 4)])
def test_layers_use_it_and_agree_with_double_precision(
    monkeypatch: pytest.MonkeyPatch, fmt: kc.Format, shared: bool
) -> None:
    layer = kc.TensorLinear(fmt, gates=4, shared=shared)
    exact = kc.TensorLinear(fmt, gates=4, shared=shared).double()
    exact.load_state_dict(layer.state_dict())
    x = operand(16, fmt.M, False)
    with counted(monkeypatch, ("spread_gradient",)) as calls:
        gradients = torch.autograd.grad(layer(x).square().sum(), [*layer.parameters()])
    assert calls
    wanted = torch.autograd.grad(exact(x.double()).square().sum(), [*exact.parameters()])
    for got, want in zip(gradients, wanted, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


@built
@used
def test_what_the_kernel_does_not_take_is_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, up = torch.ones(8, 20, 360), torch.ones(8, 16, 360)
    assert narrow.spread_compiled(x, up, None) and narrow.spread_compiled(x, up, torch.ones(16, 20))
    assert not narrow.spread_compiled(x, up, torch.ones(20, 16).t())
    assert not narrow.spread_compiled(x.double(), up.double(), None)
    assert not narrow.spread_compiled(x.mT.contiguous().mT, up, None)
    assert not narrow.spread_compiled(x[:1], up[:1], None)
    assert not narrow.spread_compiled(x[..., :8], up[..., :8], None)
    monkeypatch.setattr(compiled, "library", None)
    assert not narrow.spread_compiled(x, up, None)


def test_no_memory_for_buffers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "library", SimpleNamespace(spread_gradient=lambda *arguments: 1))
    with pytest.raises(MemoryError):
        compiled.spread_gradient(torch.ones(1, 1, 1), torch.ones(1, 1, 1), torch.ones(1, 1))
