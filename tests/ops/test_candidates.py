"""The forms that exist for speed compute the same product: wide, chunked, split, dense, bytes, kept weights."""

from __future__ import annotations

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kronecell as kc
from kronecell.ops.candidates import Chunked, candidates
from kronecell.ops.plan import Plan
from tests.cases import KINDS, dense_product, formats

F64 = torch.float64


@pytest.mark.parametrize("kind", KINDS)
def test_every_candidate_is_the_dense_product_with_its_gradients(kind: str) -> None:
    @settings(max_examples=6)
    @given(formats(kind), st.sampled_from([(1, False), (3, False), (3, True)]), st.sampled_from([1, 8]))
    def law(fmt: kc.Format, gating: tuple[int, bool], rows: int) -> None:
        gates, shared = gating
        generator = torch.Generator().manual_seed(0)
        factors = fmt.init(generator, dtype=F64, gates=gates, shared=shared)
        leaves = [tensor.requires_grad_() for tensor in factors.values()]
        x = torch.randn(rows, fmt.M, generator=generator, dtype=F64).requires_grad_()
        bias = torch.randn(gates * fmt.N, generator=generator, dtype=F64).requires_grad_()
        leaves += [x, bias]
        expected = dense_product(fmt, x, factors, gates, shared) + bias
        wanted = torch.autograd.grad(expected.square().sum(), leaves)
        known = candidates(fmt, rows, gates, shared)
        chunks = {f"{name} by 3": Chunked(replace(p, rows=3)) for name, p in known.items() if isinstance(p, Plan)}
        for name, runner in {**known, **chunks}.items():
            y = runner.apply(x, runner.prepare(factors), bias)
            torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
            for got, want in zip(torch.autograd.grad(y.square().sum(), leaves), wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")

    law()


WIDE = kc.KCP((8, 6, 6, 8), (2, 2, 2, 2), 3, 2, 2)


def test_the_wide_form_is_taken_where_x_is_big_and_is_the_same_product() -> None:
    """At the size of the paper's layer; the narrow form it is held against is held against dense by the law suite."""
    fmt = kc.KCP((8, 20, 20, 18), (4, 4, 4, 4), 4, 4, 2)
    factors = fmt.init(torch.Generator().manual_seed(0), dtype=F64, gates=4)
    leaves = [tensor.requires_grad_() for tensor in factors.values()]
    x = torch.randn(32, fmt.M, dtype=F64, generator=torch.Generator().manual_seed(1))
    narrow = fmt.plan("separable", 32, gates=4)
    plan = replace(narrow, wide=True)
    assert any(op.diagonal for op in plan.program.hot) and not any(op.diagonal for op in narrow.program.hot)
    y, expected = plan.execute(x, factors), narrow.execute(x, factors)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    for got, want in zip(
        torch.autograd.grad(y.square().sum(), leaves), torch.autograd.grad(expected.square().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_chunks_of_rows_are_the_same_product_for_any_number_of_rows() -> None:
    fmt = kc.TT((4, 3), (2, 2), 2)
    factors = fmt.init(torch.Generator().manual_seed(0), dtype=F64)
    chunked = Chunked(fmt.plan(rows=3))
    for shape in ((1,), (3,), (7,), (2, 5)):
        x = torch.randn(*shape, 12, dtype=F64)
        torch.testing.assert_close(chunked.execute(x, factors), fmt.matmul(x, factors), rtol=1e-13, atol=1e-14)


# Bytes ---------------------------------------------------------------------------------------------------------------

GATINGS = st.sampled_from([(1, False), (3, False), (3, True)])


def of_bytes(fmt: kc.Format, gates: int, shared: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Bytes, factors, and the product of the dense matrix with the bytes as numbers from 0 to 1."""
    generator = torch.Generator().manual_seed(0)
    factors = {n: t.requires_grad_() for n, t in fmt.init(generator, dtype=F64, gates=gates, shared=shared).items()}
    x = torch.randint(0, 256, (5, fmt.M), dtype=torch.uint8, generator=generator)
    return x, factors, dense_product(fmt, x.double() / 255, factors, gates, shared)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_numbers_divided_by_255_in_every_candidate(kind: str) -> None:
    @settings(max_examples=4)
    @given(formats(kind), GATINGS)
    def law(fmt: kc.Format, gating: tuple[int, bool]) -> None:
        x, factors, expected = of_bytes(fmt, *gating)
        leaves = [*factors.values()]
        wanted = torch.autograd.grad(expected.square().sum(), leaves)
        for name, runner in candidates(fmt, 5, *gating).items():
            y = runner.execute(x, factors)
            torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
            for got, want in zip(torch.autograd.grad(y.square().sum(), leaves), wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")

    law()


@pytest.mark.parametrize("elements", [2**21, 60, 1])  # all rows at once, some at a time, one at a time
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_without_gradients_go_through_all_steps_some_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, kind: str, elements: int
) -> None:
    monkeypatch.setattr("kronecell.ops.plan.CONVERTED_ELEMENTS", elements)
    monkeypatch.setattr("kronecell.ops.plan.SHARE", 0)

    @settings(max_examples=4)
    @given(formats(kind), GATINGS)
    @torch.no_grad()
    def law(fmt: kc.Format, gating: tuple[int, bool]) -> None:
        x, factors, product = of_bytes(fmt, *gating)
        bias = torch.randn(product.shape[1], generator=torch.Generator().manual_seed(1), dtype=F64)
        for name, runner in candidates(fmt, 5, *gating).items():
            y = runner.apply(x, runner.prepare(factors), bias)
            torch.testing.assert_close(y, product + bias, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
            assert runner.apply(x[:0], runner.prepare(factors), bias).shape == (0, len(bias))

    law()


@pytest.mark.parametrize("elements", [2**18, 1])
@pytest.mark.parametrize("fmt", [kc.KCP((3, 2), (2, 2), 2, 2, 2), kc.TT((3, 2), (2, 2), 2)], ids=str)
def test_the_byte_product_has_second_derivatives(
    monkeypatch: pytest.MonkeyPatch, fmt: kc.Format, elements: int
) -> None:
    monkeypatch.setattr("kronecell.ops.bytes.CHUNK_ELEMENTS", elements)
    monkeypatch.setattr("kronecell.ops.bytes.SHARE", 0 if elements == 1 else 4)  # one row a chunk
    x = torch.randint(0, 256, (4, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    factors = {n: t.requires_grad_() for n, t in fmt.init(torch.Generator().manual_seed(1), dtype=F64).items()}

    def product(*tensors: torch.Tensor) -> torch.Tensor:
        return fmt.matmul(x, dict(zip(factors, tensors, strict=True)))

    assert torch.autograd.gradcheck(product, [*factors.values()])
    assert torch.autograd.gradgradcheck(product, [*factors.values()])


@pytest.mark.parametrize("fmt", [kc.KCP((4, 3), (2, 2), 2, 2, 2), kc.TT((4, 3), (2, 2), 2)], ids=str)
def test_many_byte_chunks_are_one_product(monkeypatch: pytest.MonkeyPatch, fmt: kc.Format) -> None:
    monkeypatch.setattr("kronecell.ops.bytes.CHUNK_ELEMENTS", 40)
    monkeypatch.setattr("kronecell.ops.bytes.SHARE", 0)
    factors = {n: t.requires_grad_() for n, t in fmt.init(torch.Generator().manual_seed(1), dtype=F64).items()}
    x = torch.randint(0, 256, (11, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y, expected = fmt.matmul(x, factors), fmt.matmul(x.double() / 255, factors)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-13)
    for got, want in zip(
        torch.autograd.grad(y.square().sum(), [*factors.values()]),
        torch.autograd.grad(expected.square().sum(), [*factors.values()]),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("cell", [kc.LSTM, kc.GRU])
@pytest.mark.parametrize("text", [None, "kcp:m=4x3,n=2x2,K=2,CA=2,CB=2", "tt:m=4x3,n=2x2,r=2", "lowrank:m=12,n=4,r=2"])
def test_recurrent_layers_read_bytes(cell: type, text: str | None) -> None:
    torch.manual_seed(0)
    rnn = cell(12, 4, batch_first=True, input_format=text and kc.parse(text), dtype=F64)
    x = torch.randint(0, 256, (3, 5, 12), dtype=torch.uint8)
    y, expected = rnn(x)[0], rnn(x.double() / 255)[0]
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-13)
    parameters = [*rnn.parameters()]
    for got, want in zip(
        torch.autograd.grad(y.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


# Prepared weights kept in eval mode ----------------------------------------------------------------------------------


def changed_in_place(layer: kc.TensorLinear) -> None:
    with torch.no_grad():
        layer.A1.mul_(2)


def loaded(layer: kc.TensorLinear) -> None:
    layer.load_state_dict({name: tensor * 2 for name, tensor in layer.state_dict().items()})


def optimised(layer: kc.TensorLinear) -> None:
    layer(torch.ones(2, layer.in_features, dtype=layer.A1.dtype)).sum().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()


def converted(layer: kc.TensorLinear) -> None:
    layer.float().double()
    with torch.no_grad():
        layer.B1.add_(1)


def reset(layer: kc.TensorLinear) -> None:
    layer.reset_parameters()


def optimised_by_a_fused_kernel(layer: kc.TensorLinear) -> None:
    """Which changes parameters without raising their version, after an evaluation between backward and step."""
    x = torch.ones(2, layer.in_features, dtype=layer.A1.dtype)
    layer(x).sum().backward()
    with torch.no_grad():
        layer(x)
    torch.optim.SGD(layer.parameters(), 0.1, fused=True).step()


def changed_through_data_and_switched(layer: kc.TensorLinear) -> None:
    layer.A1.data.mul_(2)
    layer.train()
    layer.eval()


CHANGES = [changed_in_place, loaded, optimised, optimised_by_a_fused_kernel, converted, reset]


@pytest.mark.parametrize("change", [*CHANGES, changed_through_data_and_switched])
def test_kept_weights_follow_every_change_of_the_parameters(change: object) -> None:
    torch.manual_seed(0)
    layer = kc.TensorLinear(WIDE, gates=4, dtype=F64).eval()
    x = torch.randn(3, WIDE.M, dtype=F64)
    with torch.no_grad():
        before = layer(x)
        assert torch.equal(layer(x), before)
        assert layer._kept._held
    change(layer)
    with torch.no_grad():
        after = layer(x)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, layer.to_dense()(x).detach(), rtol=1e-11, atol=1e-12)


def test_threads_may_run_one_layer_with_different_numbers_of_rows() -> None:
    layer = kc.TensorLinear(WIDE, gates=4, dtype=F64).eval()
    xs = [torch.randn(rows, WIDE.M, dtype=F64) for rows in (1, 3, 200)]
    expected = [layer(x).detach() for x in xs]

    def run(i: int) -> bool:
        with torch.no_grad():
            return all(torch.allclose(layer(xs[i]), expected[i]) for _ in range(40))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(run, [0, 1, 2] * 3))
    finally:
        sys.setswitchinterval(before)


def test_kept_weights_stay_out_of_copies_files_and_training() -> None:
    layer = kc.TensorLinear(WIDE, gates=4).eval()
    with torch.no_grad():
        layer(torch.zeros(3, WIDE.M))
    assert layer._kept._held
    assert not copy.deepcopy(layer)._kept._held
    assert not pickle.loads(pickle.dumps(layer))._kept._held
    assert len(layer.state_dict()) == len([*layer.parameters()])
    layer.train()(torch.zeros(3, WIDE.M)).sum().backward()
    assert layer.A1.grad is not None and not layer._kept._held
