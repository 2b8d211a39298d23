"""Every way of running a matrix is the dense product, with its first and second derivatives: floats and bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kronecell as kc
from kronecell.ops.contract import apply, prepare
from kronecell.ops.execute import execute
from tests.cases import STRUCTURES, dense_product, formats
from tests.ops.plan_cases import CHUNKS, F64, GATINGS, assert_same, derivatives, every_plan, leaves_of

ROWS = st.sampled_from([1, 2, 7])


@pytest.mark.parametrize("kind", STRUCTURES)
def test_every_plan_is_the_dense_product_with_first_and_second_derivatives(kind: str) -> None:
    @settings(max_examples=5)
    @given(formats(kind), st.sampled_from(GATINGS), ROWS)
    def law(fmt: kc.Format, gating: tuple[int, bool], rows: int) -> None:
        factors = leaves_of(fmt, *gating)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(rows, fmt.M, generator=generator, dtype=F64, requires_grad=True)
        bias = torch.randn(gating[0] * fmt.N, generator=generator, dtype=F64, requires_grad=True)
        leaves = [x, bias, *factors.values()]
        want = derivatives(lambda: dense_product(fmt, x, factors, *gating) + bias, leaves)
        for name, plan in every_plan(fmt, rows, *gating).items():
            assert_same(derivatives(lambda plan=plan: execute(plan, x, factors, bias), leaves), want, f"{fmt} {name}")

    law()


@pytest.mark.parametrize("kind", STRUCTURES)
def test_bytes_are_numbers_from_0_to_1_in_every_plan(kind: str) -> None:
    @settings(max_examples=4)
    @given(formats(kind), st.sampled_from(GATINGS), ROWS)
    def law(fmt: kc.Format, gating: tuple[int, bool], rows: int) -> None:
        factors = leaves_of(fmt, *gating)
        leaves = [*factors.values()]
        x = torch.randint(0, 256, (rows, fmt.M), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        want = derivatives(lambda: dense_product(fmt, x.double() / 255, factors, *gating), leaves)
        for name, plan in every_plan(fmt, rows, *gating).items():
            assert_same(derivatives(lambda plan=plan: execute(plan, x, factors), leaves), want, f"{fmt} {name}")

    law()


@pytest.mark.parametrize("kind", STRUCTURES)
def test_operands_can_be_prepared_once_and_applied_to_any_number_of_rows(kind: str) -> None:
    @settings(max_examples=4)
    @given(formats(kind), st.sampled_from(GATINGS))
    def law(fmt: kc.Format, gating: tuple[int, bool]) -> None:
        factors = leaves_of(fmt, *gating)
        generator = torch.Generator().manual_seed(1)
        xs = [torch.randn(*shape, fmt.M, generator=generator, dtype=F64) for shape in ((), (1,), (5,), (2, 3), (0, 4))]
        for name, plan in every_plan(fmt, 4, *gating).items():
            with torch.no_grad():
                operands = prepare(plan.text, factors)
                got = [apply(plan.text, x, operands) for x in xs]
            assert_same(got, [dense_product(fmt, x, factors, *gating).detach() for x in xs], f"{fmt} {name}")

    law()


def test_no_rows_have_no_gradient() -> None:
    fmt = kc.KCP((4, 3), (2, 2), 2, 2, 2)
    for gates, shared in GATINGS:
        factors = leaves_of(fmt, gates, shared)
        for dtype in (F64, torch.uint8):
            x = torch.zeros(0, fmt.M, dtype=dtype).requires_grad_(dtype == F64)
            for name, plan in every_plan(fmt, 4, gates, shared).items():
                y = execute(plan, x, factors)
                assert y.shape == (0, gates * fmt.N)
                leaves = [*factors.values()] + ([x] if x.requires_grad else [])
                found = torch.autograd.grad(y.sum(), leaves, materialize_grads=True)
                assert all(g.shape == leaf.shape and not g.any() for g, leaf in zip(found, leaves, strict=True)), name


def test_gradients_of_some_tensors_only_are_those_of_all() -> None:
    fmt = kc.TT((3, 4), (2, 2), 2)
    factors = leaves_of(fmt, 3)
    x = torch.randn(5, fmt.M, dtype=F64, generator=torch.Generator().manual_seed(1))
    bias = torch.zeros(3 * fmt.N, dtype=F64)
    tensors = {"x": x, "bias": bias, **factors}
    for name, plan in every_plan(fmt, 5, 3).items():
        for chosen in ({"x"}, {"bias"}, {"G1"}, {"G2"}, {"x", "G2"}, {"bias", "G1"}):
            given_ = {key: tensor.detach().requires_grad_(key in chosen) for key, tensor in tensors.items()}
            leaves = [given_[key] for key in sorted(chosen)]

            def product(plan=plan, given_=given_) -> Tensor:
                return execute(plan, given_["x"], given_, given_["bias"])

            def dense(given_=given_) -> Tensor:
                return dense_product(fmt, given_["x"], given_, 3, False) + given_["bias"]

            assert_same(derivatives(product, leaves), derivatives(dense, leaves), f"{name} {sorted(chosen)}")


# Sizes at which compiled kernels take over ---------------------------------------------------------------------------

M, N = (8, 10, 10, 9), (4, 2, 4, 2)
PARTS = kc.KCP((2, 20, 16, 16), N, 4, 2, 2)  # whose gates share W: parts of x are folded one by one
LARGE = [
    kc.KCP(M, N, 4, 4, 2),
    kc.KCP(M, N, 2, 2, 2, tie="all"),
    PARTS,
    kc.TT(M, N, 4),
    kc.TR(M, N, 3),
    kc.BT(M, N, 2, P=2),
    kc.HT(M, N, 3),
    kc.Tucker(M, N, 3),
    kc.CP(M, N, 6),
    kc.KT((90, 80), (8, 8), 3),
    kc.LowRank((7200,), (64,), 8),
]
SINGLE = 5e-5  # float32 rounds sums of 7,200 terms, and the terms of a Tucker network that nearly cancel
DEAR = 8  # plans that take so many times the multiply-adds of the cheapest are left to the small sizes


@pytest.mark.parametrize("of_bytes", [False, True], ids=["floats", "bytes"])
@pytest.mark.parametrize("fmt", LARGE, ids=str)
def test_large_products_in_float32_are_the_dense_product(fmt: kc.Format, of_bytes: bool) -> None:
    gates, rows = 4, 160
    generator = torch.Generator().manual_seed(0)
    shared = fmt == PARTS or (fmt.kind in ("kcp", "tt") and of_bytes)
    factors = leaves_of(fmt, gates, shared)
    if of_bytes:
        x = torch.randint(0, 256, (rows, fmt.M), dtype=torch.uint8, generator=generator)
        exact = x.double() / 255
    else:
        x = torch.randn(rows, fmt.M, generator=generator)
        exact = x.double()
    upstream = torch.randn(rows, gates * fmt.N, generator=generator, dtype=F64)
    expected = dense_product(fmt, exact, factors, gates, shared)
    want = [expected.detach(), *torch.autograd.grad((expected * upstream).sum(), [*factors.values()])]
    single = {name: tensor.detach().float().requires_grad_() for name, tensor in factors.items()}
    plans = every_plan(fmt, rows, gates, shared)
    cheapest = min(plan.total_macs for plan in plans.values())
    for name, plan in plans.items():
        if plan.chunk in CHUNKS or plan.total_macs > DEAR * cheapest:
            continue
        y = execute(plan, x, single)
        got = [y.detach(), *torch.autograd.grad((y * upstream.float()).sum(), [*single.values()])]
        assert_same(got, want, f"{fmt} {name}", SINGLE)
        with torch.no_grad():
            assert_same([execute(plan, x, single)], want[:1], f"{fmt} {name}, inference", SINGLE)
