"""Products of matrices: what the kernel computes, and where it takes the place of BLAS."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kronecell as kc
from kronecell.ops import compiled, matrices, narrow
from kronecell.ops.candidates import Chunked, Runner, candidates
from kronecell.ops.processor import LANES
from tests.cases import dense_product
from tests.test_compiled import EPS, built, counted, operand


@pytest.fixture
def slow_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor on which the kernel is used, whatever this one is."""
    monkeypatch.setattr(matrices, "HALF_BLAS", True)


def matrix(batch: int, rows: int, columns: int, turned: bool, gap: int, seed: int) -> Tensor:
    """(batch, rows, columns) whose columns or rows lie together, each `gap` numbers from the next, which are NaN."""
    lines, length = (columns, rows) if turned else (rows, columns)
    memory = torch.full((batch, lines, length + gap), torch.nan)
    memory[:, :, :length] = operand(batch * lines, length, False, seed).view(batch, lines, length)
    numbers = memory[:, :, :length]
    return numbers.mT if turned else numbers


@built
@settings(max_examples=150)
@given(
    batch=st.integers(1, 4), rows=st.integers(1, 30), depth=st.integers(1, 40), columns=st.integers(1, 70),
    turned=st.tuples(st.booleans(), st.booleans()), gaps=st.tuples(*[st.integers(0, 3)] * 3), add=st.booleans(),
    shared=st.sampled_from(["neither", "a", "b"]), threads=st.integers(1, 3),
)  # fmt: skip
@example(2, 200, 900, 40, (False, True), (0, 1, 2), True, "neither", 2)  # more than one slice of the depth, TALL rows
@example(1, 13, 385, 700, (True, False), (1, 0, 0), False, "neither", 1)  # more columns than are packed at once
@example(1, 385, 20, 520, (True, True), (0, 0, 1), True, "neither", 3)
def test_the_kernel_multiplies_matrices_as_they_lie(
    batch: int, rows: int, depth: int, columns: int, turned: tuple[bool, bool], gaps: tuple[int, int, int], add: bool,
    shared: str, threads: int,
) -> None:  # fmt: skip
    a = matrix(1 if shared == "a" else batch, rows, depth, turned[0], gaps[0], 0).expand(batch, -1, -1)
    b = matrix(1 if shared == "b" else batch, depth, columns, turned[1], gaps[1], 1).expand(batch, -1, -1)
    memory = torch.full((batch, rows, columns + gaps[2]), torch.nan)
    out = memory[:, :, :columns]
    if add:
        out.fill_(1)
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrices, "WORTH_A_THREAD", 1)
        try:
            torch.set_num_threads(threads)
            matrices._run(a, b, out, add)
        finally:
            torch.set_num_threads(before)
    wanted, most = a.double() @ b.double() + add, a.double().abs() @ b.double().abs() + 1
    assert bool(((out - wanted).abs() <= (depth + 2) * EPS * most).all())
    assert bool(memory[:, :, columns:].isnan().all())


@built
def test_threads_leave_the_bits(monkeypatch: pytest.MonkeyPatch, slow_blas: None) -> None:
    monkeypatch.setattr(matrices, "WORTH_A_THREAD", 1)
    before = torch.get_num_threads()
    try:
        for batch in (1, 5):
            a, b = operand(batch * 50, 70, False).view(batch, 50, 70), operand(batch * 70, 40, False, 1)
            found = []
            for threads in (1, 2, 4):
                torch.set_num_threads(threads)
                found.append(matrices.multiply(a, b.view(batch, 70, 40)))
            assert all(torch.equal(product, found[0]) for product in found)
    finally:
        torch.set_num_threads(before)


@built
def test_a_row_has_the_same_bits_alone_and_among_others(slow_blas: None) -> None:
    a, b = operand(205, 400, False), operand(400, 48, False, 1)
    whole, some = torch.empty(205, 48), torch.empty(1, 48)
    matrices._run(a, b, whole, add=False)
    for row in (0, 11, 12, 191, 192, 204):
        matrices._run(a[row : row + 1], b, some, add=False)
        assert torch.equal(some[0], whole[row])


MODES = (8, 10, 10, 12), (4, 4, 2, 2)


@built
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "fmt", [kc.TT(*MODES, 4), kc.BT(*MODES, 4, P=2), kc.HT(*MODES, 4), kc.CP(*MODES, 8)], ids=lambda fmt: fmt.kind
)
def test_all_ways_to_run_a_product_are_as_exact_as_with_blas_and_most_use_the_kernel(
    monkeypatch: pytest.MonkeyPatch, slow_blas: None, fmt: kc.Format, shared: bool
) -> None:
    rows = 16
    factors = fmt.init(torch.Generator().manual_seed(0), gates=4, shared=shared)
    exact = {name: tensor.double().requires_grad_() for name, tensor in factors.items()}
    leaves = {name: tensor.requires_grad_() for name, tensor in factors.items()}
    x, bias = operand(rows, fmt.M, False), operand(1, 4 * fmt.N, False, 1)[0]
    upstream = operand(rows, 4 * fmt.N, False, 2)
    y = dense_product(fmt, x.double(), exact, 4, shared) + bias.double()
    wanted = [y.detach(), y.detach(), *torch.autograd.grad(y, [*exact.values()], upstream.double())]
    plans = candidates(fmt, rows, 4, shared)
    runners = {**plans, "in small chunks": Chunked(replace(next(iter(plans.values())), rows=8))}
    used = 0

    def errors(runner: Runner) -> list[float]:
        got = runner.execute(x, leaves, bias)
        gradients = torch.autograd.grad(got, [*leaves.values()], upstream)
        with torch.no_grad():
            without = runner.execute(x, leaves, bias)
        made = (got.detach(), without, *gradients)
        return [float((one - two).norm() / two.norm()) for one, two in zip(made, wanted, strict=True)]

    for name, runner in runners.items():
        with counted(monkeypatch, ("matrix_products",)) as calls:
            found = errors(runner)
        with monkeypatch.context() as patch:
            patch.setattr(matrices, "HALF_BLAS", False)
            by_blas = errors(runner)
        used += bool(calls)
        assert all(error <= max(2e-6, 1.2 * other) for error, other in zip(found, by_blas, strict=True)), name
    assert used > len(runners) / 2


@built
def test_what_the_kernel_does_not_take_is_for_torch(monkeypatch: pytest.MonkeyPatch, slow_blas: None) -> None:
    a, b = torch.ones(64, 64), torch.ones(64, 64)
    assert matrices.suits(a, b, None) and matrices.suits(a.t(), b.t(), torch.empty(64, 64))
    assert matrices.suits(a.expand(3, 64, 64), b.expand(3, 64, 64), None)
    assert not matrices.suits(a, b, torch.empty(64, 64).t())
    assert not matrices.suits(a, b, torch.empty(1, 64).expand(64, 64))
    assert not matrices.suits(a, b, torch.empty(8, 64))
    three = a.expand(3, 64, 64)
    assert not matrices.suits(three, three, torch.empty(1, 64, 64).expand(3, 64, 64))
    assert not matrices.suits(a.double(), b.double(), None)
    assert not matrices.suits(a.to("meta"), b.to("meta"), None)
    assert not matrices.suits(a, b[:, :7], None)
    assert not matrices.suits(a[:7], b, None)
    assert not matrices.suits(a[:8, :8], b[:8, :8], None)
    assert not matrices.suits(a, b[:63], None)  # torch says what is wrong
    assert not matrices.suits(a.expand(3, 64, 64), b.expand(2, 64, 64), None)
    assert not matrices.suits(a.clone().requires_grad_(), b, None)
    with torch.no_grad():
        assert matrices.suits(a.clone().requires_grad_(), b, None)
    with torch.autocast("cpu"):
        assert not matrices.suits(a, b, None)
    assert torch.equal(
        torch.vmap(lambda v: matrices.multiply(v, b))(a.expand(2, 64, 64)), torch.full((2, 64, 64), 64.0)
    )
    monkeypatch.setattr(compiled, "library", None)
    assert not matrices.suits(a, b, None)


@built
def test_where_blas_uses_the_whole_processor_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "HALF_BLAS", False)
    with counted(monkeypatch, ("matrix_products",)) as calls:
        product = matrices.multiply(torch.ones(64, 64), torch.ones(64, 64))
        total = matrices.add_product(torch.ones(2, 64, 64), torch.ones(2, 64, 64), torch.ones(2, 64, 64))
    assert not calls and bool((product == 64).all()) and bool((total == 65).all())


def test_no_memory_for_buffers_is_an_error(monkeypatch: pytest.MonkeyPatch, slow_blas: None) -> None:
    monkeypatch.setattr(compiled, "library", SimpleNamespace(matrix_products=lambda *arguments: 1))
    with pytest.raises(MemoryError, match="products of matrices"):
        matrices.multiply(torch.ones(64, 64), torch.ones(64, 64))


@built
@pytest.mark.skipif(LANES != 16 or narrow._kernel is None, reason="needs AVX-512 and a torch with oneDNN")
def test_only_long_rows_are_for_onednn_where_the_kernel_takes_the_place_of_blas(
    monkeypatch: pytest.MonkeyPatch, slow_blas: None
) -> None:
    long, short = torch.ones(2**21 // narrow.LONG, narrow.LONG), torch.ones(2**11, 2**10)
    assert narrow.kernel(long, torch.ones(48, narrow.LONG)) == "oneDNN"
    assert narrow.kernel(short, torch.ones(48, 2**10)) == "BLAS"
    monkeypatch.setattr(matrices, "HALF_BLAS", False)
    assert narrow.kernel(short, torch.ones(48, 2**10)) == "oneDNN"
