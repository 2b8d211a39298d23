"""The compiled recurrence of an LSTM: what it computes, and in which memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kronecell.ops import compiled, lstm_kernel
from tests.lstm_cases import (
    EPS,
    assert_agrees,
    assert_rounded,
    built,
    combination,
    doubled,
    equations,
    infer,
    operands,
    rms,
)
from tests.test_compiled import counted

SIZES = [(1, 1, 1), (6, 1, 48), (2, 3, 256), (3, 16, 300), (2, 100, 17), (1, 7, 520)]


@built
@settings(max_examples=150)
@given(steps=st.integers(1, 5), batch=st.integers(1, 20), hidden=st.integers(1, 80))
def test_values_and_gradients_are_those_of_the_equations(steps: int, batch: int, hidden: int) -> None:
    assert_agrees(operands(steps, batch, hidden))


@built
@pytest.mark.parametrize("size", SIZES)
def test_the_same_for_sizes_at_the_ends_of_blocks(size: tuple[int, int, int]) -> None:
    assert_agrees(operands(*size))


@built
@pytest.mark.parametrize("size", SIZES)
def test_inference_has_the_bits_of_training(size: tuple[int, int, int]) -> None:
    tensors = operands(*size)
    with torch.no_grad():
        for got, want in zip(infer(*tensors), lstm_kernel.train(*tensors), strict=True):
            assert torch.equal(got, want)


def functions(x: Tensor) -> tuple[Tensor, Tensor]:
    """sigmoid and tanh of x (rows, width) as the kernel has them: c = 1 tanh(g) + 0, h = sigmoid(o) 1."""
    large = torch.full_like(x, 200)
    weight, zero = torch.zeros(4 * x.shape[1], x.shape[1]), torch.zeros_like(x)
    _, _, tanh = infer(torch.cat([large, large, x, x], -1)[None], weight, zero, zero)
    _, sigmoid, _ = infer(torch.cat([-large, large, x, x], -1)[None], weight, zero, zero + 100)
    return sigmoid[0], tanh[0]


@built
def test_sigmoid_and_tanh_are_exact_to_a_few_roundings() -> None:
    sizes = torch.cat([torch.logspace(-37, 2, 4000), torch.linspace(0, 20, 20000)])
    x = torch.cat([sizes, -sizes]).view(-1, 20)
    sigmoid, tanh = functions(x)
    exact = x.double()
    normal = exact.sigmoid() > 2e-38  # smaller ones may be rounded to 0
    assert bool(((sigmoid - exact.sigmoid()).abs() <= 3 * EPS * exact.sigmoid())[normal].all())
    assert bool((sigmoid[~normal] < 2e-38).all())
    assert bool(((tanh - exact.tanh()).abs() <= 3 * EPS * exact.tanh().abs()).all())


@built
def test_sigmoid_and_tanh_have_their_limits_and_keep_what_is_not_a_number() -> None:
    inf, nan = torch.inf, torch.nan
    sigmoid, tanh = functions(torch.tensor([[0.0, -0.0, 100, -100, 1e30, -1e30, inf, -inf, 3e38, -3e38]]))
    assert sigmoid.tolist() == [[0.5, 0.5, 1, 0, 1, 0, 1, 0, 1, 0]]
    assert tanh.tolist() == [[0, 0, 1, -1, 1, -1, 1, -1, 1, -1]]
    for part in functions(torch.tensor([[nan, -nan, 1.0]])):
        assert part.isnan().tolist() == [[True, True, False]]


@built
@pytest.mark.parametrize("scale", [30, 1000])
def test_saturated_gates_have_finite_gradients_like_those_of_the_equations(scale: float) -> None:
    gates, weight, h, c = operands(3, 5, 20)
    tensors = [(scale * gates.detach()).requires_grad_(), weight, h, c]
    exact = doubled(tensors)
    got, want = lstm_kernel.train(*tensors), equations(*exact)
    assert_rounded(got, want, 100)
    theirs = torch.autograd.grad(combination(want), exact)
    for a, b in zip(torch.autograd.grad(combination(got), tensors), theirs, strict=True):
        assert (a - b).abs().max() <= 1e-5 * (1 + b.abs().max())


@built
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("rests", [False, True])  # with a first state of zeros, U is left out if it is finite
def test_what_is_not_finite_goes_where_the_equations_send_it(place: int, bad: float, rests: bool) -> None:
    tensors = operands(3, 4, 10)
    with torch.no_grad():
        if rests:
            tensors[2].zero_()
        tensors[place].view(-1)[3] = bad
    got, want = lstm_kernel.train(*tensors), equations(*doubled(tensors))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.isnan(), b.isnan())


@built
@pytest.mark.parametrize("hidden", [1, 10, 64])
def test_a_first_state_of_zeros_is_like_any_other(hidden: int) -> None:
    gates, weight, h, c = operands(2, 5, hidden)
    for rows in (slice(0, 5), slice(0, 2)):  # all of the batch, or some of it
        with torch.no_grad():
            h[rows] = 0
        tensors = (gates, weight, h, c)
        assert_rounded(lstm_kernel.train(*tensors), equations(*doubled(tensors)))
        assert_rounded(infer(*tensors), equations(*doubled(tensors)))


# The gradient of U ---------------------------------------------------------------------------------------------------


def factors(steps: int, batch: int, hidden: int, seed: int = 0) -> list[Tensor]:
    """The gradients of the gates, the first state and the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((steps, batch, 4 * hidden), (batch, hidden), (steps, batch, hidden))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def torchs_product(d_gates: Tensor, h: Tensor, out: Tensor) -> Tensor:
    before = torch.cat([h[None], out[:-1]])
    return d_gates.flatten(0, 1).t() @ before.flatten(0, 1)


def assert_exact_product(tensors: Sequence[Tensor]) -> None:
    """The kernel's is as exact as torch's, or as sums are whose roundings grow with the root of their length."""
    exact = doubled(tensors)
    want, size = torchs_product(*exact), rms(torchs_product(*(t.square() for t in exact)).sqrt())
    got, theirs = (rms(f(*tensors) - want) for f in (lstm_kernel._weight_gradient, torchs_product))
    assert got <= max(theirs, (2 + tensors[0][..., 0].numel() ** 0.5 / 4) * EPS * size)


@built
@settings(max_examples=150)
@given(steps=st.integers(1, 7), batch=st.integers(1, 80), hidden=st.integers(1, 70), rests=st.booleans())
def test_the_gradient_of_U_is_as_exact_as_torchs(steps: int, batch: int, hidden: int, rests: bool) -> None:
    d_gates, h, out = factors(steps, batch, hidden)
    assert_exact_product((d_gates, h.zero_() if rests else h, out))


SUMS = [(1, 1, 1), (7, 1, 256), (3, 80, 32), (1, 241, 33), (2, 240, 12), (5, 97, 13), (9, 99, 100), (2, 1, 300)]


@built
@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize("size", SUMS)
def test_the_same_at_the_ends_of_blocks(size: tuple[int, int, int], rests: bool) -> None:
    d_gates, h, out = factors(*size)
    tensors = d_gates, h.zero_() if rests else h, out
    assert_exact_product(tensors)
    whole = [(8 * tensor).round() for tensor in tensors]  # sums of these are not rounded
    assert torch.equal(lstm_kernel._weight_gradient(*whole).double(), torchs_product(*doubled(whole)))


@built
@pytest.mark.parametrize("size", [(1, 3, 10), (3, 0, 10)])
def test_where_nothing_is_summed_the_gradient_of_U_is_zero(size: tuple[int, int, int]) -> None:
    d_gates, h, out = factors(*size)
    assert torch.equal(lstm_kernel._weight_gradient(d_gates, h.zero_(), out), torch.zeros(40, 10))


@built
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [(0, 0), (0, 1), (1, 0), (2, 0)])  # of the operands, and of the steps
@pytest.mark.parametrize("rests", [False, True])  # with a first state of zeros, that step is left out if it is finite
def test_what_is_not_finite_goes_where_torchs_product_sends_it(place: tuple[int, int], bad: float, rests: bool) -> None:
    for hidden in (10, 32):
        tensors = factors(3, 4, hidden)
        if rests:
            tensors[1].zero_()
        which, step = place
        tensors[which].view(-1, 4, tensors[which].shape[-1])[step, -1, -2] = bad
        got, want = lstm_kernel._weight_gradient(*tensors), torchs_product(*tensors)
        assert not bool(want.isfinite().all())
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())


@built
@pytest.mark.parametrize("size", [(3, 5, 20), (6, 50, 33), (2, 3, 1)])
def test_threads_leave_the_bits_of_the_gradient_of_U(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(lstm_kernel, "WORTH_A_THREAD", 1)
    tensors, threads, results = factors(*size), torch.get_num_threads(), []
    try:
        for n in (1, 2, 3, 2):
            torch.set_num_threads(n)
            results.append(lstm_kernel._weight_gradient(*tensors))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(other, results[0]) for other in results[1:])


@built
def test_long_sums_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lstm_kernel, "MOST_ROWS", 12)
    for steps in (3, 4):
        tensors = operands(steps, 4, 9)
        exact = doubled(tensors)
        with counted(monkeypatch, ["lstm_weight_gradient"]) as calls:
            got = torch.autograd.grad(lstm_kernel.train(*tensors)[0].sum(), tensors[1])
        assert len(calls) == (steps == 3)
        assert_rounded(got, torch.autograd.grad(equations(*exact)[0].sum(), exact[1]))


@built
def test_no_memory_for_the_gradient_of_U_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "library", SimpleNamespace(lstm_weight_gradient=lambda *arguments: 1))
    with pytest.raises(MemoryError, match="gradient of U"):
        lstm_kernel._weight_gradient(*factors(2, 3, 4))


# Bits, memory, threads -----------------------------------------------------------------------------------------------


def all_results(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Values, and the gradients that have a row for each of the batch."""
    results = lstm_kernel.train(*tensors)
    gates, _, h, c = tensors
    return [*results, *torch.autograd.grad(results[0].square().sum(), [gates, h, c])]


@built
@pytest.mark.parametrize(("batch", "hidden"), [(7, 9), (13, 80), (30, 33)])
def test_a_row_has_the_same_bits_alone_and_among_others(batch: int, hidden: int) -> None:
    gates, weight, h, c = operands(4, batch, hidden)
    whole = all_results((gates, weight, h, c))
    for some in (slice(0, 1), slice(2, 4), slice(1, 4), slice(3, 7), slice(0, 5)):
        part = all_results((gates[:, some], weight, h[some], c[some]))
        assert all(torch.equal(a, b[..., some, :]) for a, b in zip(part, whole, strict=True))


@built
@pytest.mark.parametrize("batch", [5, 16, 97, 200])
def test_threads_divide_the_rows_and_leave_the_bits(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    monkeypatch.setattr(lstm_kernel, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(lstm_kernel, "ROWS_OF_A_THREAD", 1)
    tensors = operands(3, batch, 20)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            assert lstm_kernel._threads(3, batch, 20) == n
            results.append(all_results(tensors))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


@built
def test_small_work_is_done_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert lstm_kernel._threads(6, 16, 256) == 4  # rows
    assert lstm_kernel._threads(6, 64, 256) == 8
    assert lstm_kernel._threads(6, 64, 20) == 1  # too little to do
    assert lstm_kernel._threads(6, 1, 2304) == 1


@built
@pytest.mark.parametrize(("steps", "batch", "hidden"), [(1, 1, 1), (3, 5, 13), (2, 7, 64), (2, 3, 100)])
def test_nothing_is_read_or_written_beside_the_operands(steps: int, batch: int, hidden: int) -> None:
    walls: list[Tensor] = []

    def within(tensor: Tensor) -> Tensor:
        """The tensor between walls of NaN."""
        memory = torch.full((tensor.numel() + 256,), torch.nan)
        walls.extend((memory[:128], memory[-128:]))
        return memory[128:-128].view(tensor.shape).copy_(tensor)

    library = compiled.library
    with torch.no_grad():
        gates, weight, h, c = (within(t) for t in operands(steps, batch, hidden))
        forward, backward = (within(lstm_kernel.packed(weight, kind)) for kind in (False, True))
        rows = (steps, batch, hidden), (steps, batch, hidden), (steps, batch, 4 * hidden)
        out, cells, active = (within(torch.full(shape, torch.nan)) for shape in rows)
        sizes = (steps, batch, hidden, 1)
        read = [t.data_ptr() for t in (gates, forward, h, c)]
        library.lstm_pack(weight.data_ptr(), forward.data_ptr(), hidden, False)
        library.lstm_pack(weight.data_ptr(), backward.data_ptr(), hidden, True)
        last = [within(torch.full((batch, hidden), torch.nan)) for _ in range(2)]
        library.lstm_forward(*read, *(t.data_ptr() for t in (out, cells, active, *last)), True, *sizes)
        assert torch.equal(last[0], out[-1]) and torch.equal(last[1], cells[-1])
        d_out, dh, dc = within(torch.ones_like(out)), within(torch.ones_like(h)), within(torch.ones_like(c))
        d_gates = within(torch.full_like(active, torch.nan))
        arguments = (d_out, backward, active, cells, c, dh, dc, d_gates)
        library.lstm_backward(*(t.data_ptr() for t in arguments), True, *sizes)
        d_weight = within(torch.full_like(weight, torch.nan))
        assert not library.lstm_weight_gradient(*(t.data_ptr() for t in (d_gates, h, out, d_weight)), *sizes)
    for result in (forward, backward, out, cells, active, dh, dc, d_gates, d_weight):
        assert bool(result.isfinite().all())
    assert all(bool(wall.isnan().all()) for wall in walls)


@built
def test_threads_of_python_do_not_share_their_scratch() -> None:
    cases = [operands(6, 8, hidden, seed) for seed, hidden in enumerate((40, 60, 80))]
    expected = [all_results(tensors) for tensors in cases]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(30):
            got = all_results(cases[i])
            if not all(torch.equal(a, b) for a, b in zip(got, expected[i], strict=True)):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


@built
def test_results_are_float32_on_the_cpu_whatever_torch_makes_by_default() -> None:
    tensors = operands(3, 4, 9)
    want = all_results(tensors)
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            got = all_results(tensors)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
