"""One law suite for all formats: every order is the same operator, costs what it says, and has the right gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import kronecell as kc
from kronecell.ops import flops as flops  # registers what is counted
from kronecell.ops.execute import execute
from tests.cases import KINDS, dense_product, drawn, formats

ROWS = 3


def orders_of(fmt: kc.Format) -> list[str]:
    """All orders; the naive one is exponential by nature and only run where that is affordable."""
    return [name for name in [*fmt.orders(), "optimal"] if name != "naive" or fmt.plan(name).total_macs < 300_000]


@pytest.mark.parametrize("kind", KINDS)
def test_every_order_is_the_dense_product_with_its_gradients_at_its_count(kind: str) -> None:
    @settings(max_examples=200)
    @given(formats(kind), st.sampled_from([(1, False), (3, False), (3, True)]), st.integers(0, 2**31))
    def law(fmt: kc.Format, gating: tuple[int, bool], seed: int) -> None:
        gates, shared = gating
        generator = torch.Generator().manual_seed(seed)
        factors = drawn(fmt, generator, dtype=torch.float64, gates=gates, shared=shared)
        trained = [t for t in factors.values() if t.is_floating_point() and t.numel()]
        assert sum(t.numel() for t in trained) == fmt.params(gates, shared)
        sparse = fmt.sparse(gates)
        entries = 0 if sparse is None else sparse.num_values
        x = torch.randn(ROWS, fmt.M, generator=generator, dtype=torch.float64)
        weights = torch.randn(ROWS, gates * fmt.N, generator=generator, dtype=torch.float64)
        leaves = [x.requires_grad_(), *(t.requires_grad_() for t in trained)]
        expected = dense_product(fmt, x, factors, gates, shared)
        wanted = torch.autograd.grad((expected * weights).sum(), leaves)
        for order in orders_of(fmt):
            plan = fmt.plan(order, ROWS, gates=gates, shared=shared)
            with FlopCounterMode(display=False) as counter:
                y = fmt.matmul(x, factors, order, gates=gates, shared=shared)
            assert counter.get_total_flops() == 2 * (plan.total_macs + ROWS * entries), order
            results = {order: y}
            if not entries:
                results[f"{order} wide"] = execute(replace(plan, wide=True), x, factors)
            for name, result in results.items():
                torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")
                for got, want in zip(torch.autograd.grad((result * weights).sum(), leaves), wanted, strict=True):
                    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")

    law()


@pytest.mark.parametrize("kind", KINDS)
def test_text_form_round_trips(kind: str) -> None:
    @settings(max_examples=50)
    @given(formats(kind))
    def law(fmt: kc.Format) -> None:
        assert kc.parse(str(fmt)) == fmt

    law()


@pytest.mark.parametrize("kind", KINDS)
def test_any_leading_shape_gives_the_same_rows(kind: str) -> None:
    @settings(max_examples=15)
    @given(formats(kind))
    def law(fmt: kc.Format) -> None:
        factors = drawn(fmt, torch.Generator().manual_seed(0), dtype=torch.float64)
        x = torch.randn(2, 3, 2, fmt.M, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        y = fmt.matmul(x, factors)
        assert y.shape == (2, 3, 2, fmt.N)
        torch.testing.assert_close(y.reshape(-1, fmt.N), fmt.matmul(x.reshape(-1, fmt.M), factors), rtol=1e-13, atol=0)
        torch.testing.assert_close(fmt.matmul(x[0, 0, 0], factors), y[0, 0, 0], rtol=1e-12, atol=1e-14)
        assert fmt.matmul(x[:0], factors).shape == (0, 3, 2, fmt.N)

    law()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "text",
    [
        "tt:m=4x3,n=2x2,r=2",
        "kcp:m=4x3x2,n=2x2x2,K=2,CA=2,CB=2",
        "ht:m=2x3x2,n=2x2x2,r=2",
        "doped:0.2+tt:m=4x3,n=2x2,r=2",
    ],
)
def test_every_float_dtype_is_kept(dtype: torch.dtype, text: str) -> None:
    fmt = kc.parse(text)
    factors = drawn(fmt, torch.Generator().manual_seed(0), dtype=dtype)
    x = torch.ones(2, fmt.M, dtype=dtype)
    y = fmt.matmul(x, factors)
    exact = x.double() @ fmt.to_dense({name: t.double() if t.is_floating_point() else t for name, t in factors.items()})
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, rtol=64 * torch.finfo(dtype).eps, atol=64 * torch.finfo(dtype).eps)


def test_the_ucf11_orders_cost_what_the_paper_says_and_are_one_operator() -> None:
    fmt = kc.KCP((8, 20, 20, 18), (4, 4, 4, 4), K=4, CA=4, CB=2)
    assert fmt.macs("algorithm1") == 11_943_936
    assert fmt.macs("algorithm2") == 2_978_816
    assert fmt.macs("separable") <= 280_000
    assert fmt.macs("optimal") <= fmt.macs("separable")
    factors = fmt.init(torch.Generator().manual_seed(0), dtype=torch.float64)
    for t in factors.values():
        t.requires_grad_()
    x = torch.randn(2, fmt.M, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = {}
    for order in ("separable", "algorithm1", "algorithm2", "optimal"):
        y = fmt.matmul(x, factors, order)
        results[order] = [y.detach(), *torch.autograd.grad(y.square().sum(), [*factors.values()])]
    for order, tensors in results.items():
        for got, want in zip(tensors, results["separable"], strict=True):
            assert ((got - want).norm() / want.norm()).item() < 1e-12, order
