"""Memory that chunks use again: results do not depend on it, nothing of it leaves a call, and none is fresh."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import kronecell as kc
from kronecell.ops.candidates import Chunked, candidates
from kronecell.ops.hot import _scratch
from kronecell.ops.space import Lender, Space

F64 = torch.float64
ROWS, CHUNK = 11, 3
FORMATS = [
    kc.KCP((4, 3, 2, 3), (2, 2, 2, 1), 2, 2, 2),
    kc.TT((4, 3, 2), (2, 2, 2), 2),
    kc.TR((4, 3, 2), (2, 2, 2), 2),
    kc.BT((3, 2, 2), (2, 2, 2), 2, P=2),
    kc.HT((4, 3, 2, 2), (2, 2, 2, 2), 2),
    kc.CP((4, 3, 2), (2, 2, 2), 3),
    kc.LowRank((6,), (4,), 2),
]


def test_a_slot_keeps_its_memory_and_grows_when_it_must() -> None:
    space, like = Space(), torch.zeros(0, dtype=F64)
    first = space.take(("a", "product"), (4, 3), like)
    assert first.shape == (4, 3) and first.dtype == F64 and first.is_contiguous()
    assert space.take(("a", "product"), (2, 3), like).data_ptr() == first.data_ptr()
    assert space.take(("a", "gradient"), (4, 3), like).data_ptr() != first.data_ptr()
    assert space.take(("a", "product"), (5, 3), like).shape == (5, 3)
    turned = torch.randn(3, 4, dtype=F64).t()
    copied = space.copy(("a", "product"), turned)
    assert copied.is_contiguous() and torch.equal(copied, turned)


def test_between_calls_the_largest_buffers_are_given_back_until_the_rest_may_be_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kronecell.ops.space.KEPT_BYTES", 100)
    space, like = Space(), torch.zeros(0)
    sizes = {"a": 10, "b": 26, "c": 12, "d": 14}  # of 4 bytes
    taken = [space.take((slot, "product"), (size,), like).data_ptr() for slot, size in sizes.items()]
    space.keep_some()
    assert [buffer is not None for buffer in space._buffers] == [True, False, True, False]
    again = [space.take((slot, "product"), (10,), like).data_ptr() for slot in "xyz"]  # another layer's slots
    assert again[0] == taken[0] and again[2] == taken[2]
    space.keep_some()
    assert space.take(("a", "product"), (10,), like.double()).dtype == F64
    space.keep_some()  # of 80 and 40 bytes, the larger goes
    assert [buffer is not None for buffer in space._buffers] == [False, True, False, False]


def test_memory_is_lent_again_only_when_nobody_has_it() -> None:
    lender, like = Lender(), torch.zeros(0)
    first, second = (lender.take(("a", "product"), (4, 3), like) for _ in range(2))
    place = first.data_ptr()
    assert first.shape == (4, 3) and second.data_ptr() != place
    part, first = first[1], second  # of a tensor that is gone, a view is left
    assert lender.take(("a", "product"), (4, 3), like).data_ptr() != place
    del part
    assert lender.take(("a", "product"), (10,), like).data_ptr() == place
    assert lender.take(("a", "product"), (5,), like).data_ptr() != place  # much too large for that
    assert lender.take(("a", "product"), (12,), like.double()).dtype == F64


def test_a_lender_has_no_more_memory_than_it_may_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kronecell.ops.space.LEARNING_BYTES", 100)
    lender, like = Lender(), torch.zeros(0)
    for sizes in ((20,), (10, 12), (30,), (4, 8, 12, 16)):
        lent = [lender.take(("a", "product"), (size,), like) for size in sizes]
        assert [tensor.numel() for tensor in lent] == [*sizes]
        assert 0 < sum(buffer.nbytes for buffer in lender._lent) <= 100


def test_without_a_count_of_owners_all_memory_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kronecell.ops.space._owners", None)
    lender = Lender()
    assert lender.take(("a", "product"), (3,), torch.zeros(0)).shape == (3,) and not lender._lent


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("fmt", FORMATS[1:], ids=str)
def test_what_autograd_keeps_is_not_overwritten_before_its_backward(
    monkeypatch: pytest.MonkeyPatch, fmt: kc.Format, retain: bool
) -> None:
    """Several graphs at once, of which some are dropped and others used twice, in memory that is lent again."""
    monkeypatch.setattr("kronecell.ops.hot.LARGE", 1)
    monkeypatch.setattr(_scratch, "lender", Lender())
    torch.manual_seed(0)
    layer = kc.TensorLinear(fmt, gates=4, dtype=F64, order=next(iter(fmt.orders())))
    inputs, parameters = torch.randn(6, ROWS, fmt.M, dtype=F64).unbind(), [*layer.parameters()]
    graphs: list[Tensor] = []
    for turn in range(3):
        graphs = graphs[-1:] + [layer(x).square().sum() for x in inputs[2 * turn : 2 * turn + 2]]
        for y, x in zip(graphs, inputs[2 * turn + 2 - len(graphs) :], strict=False):
            got = torch.autograd.grad(y, parameters, retain_graph=retain or y is graphs[-1])
            dense = torch.nn.functional.linear(x, layer.dense_weight(), layer.bias).square().sum()
            for one, other in zip(got, torch.autograd.grad(dense, parameters), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    graphs.clear()
    del y  # the last graph
    places = {buffer.data_ptr() for buffer in _scratch.lender._lent}
    torch.autograd.grad(layer(inputs[0]).sum(), parameters)
    assert places and {buffer.data_ptr() for buffer in _scratch.lender._lent} == places


@pytest.mark.parametrize("gates", [1, 4])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_results_are_not_overwritten_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch, fmt: kc.Format, gates: int
) -> None:
    monkeypatch.setattr("kronecell.ops.hot.LARGE", 1)
    generator = torch.Generator().manual_seed(0)
    factors = fmt.init(generator, dtype=F64, gates=gates)
    first, second = torch.randn(2, ROWS, fmt.M, dtype=F64, generator=generator)
    for runner in candidates(fmt, ROWS, gates).values():
        for chunk in (None, CHUNK):
            plan = getattr(runner, "plan", getattr(runner, "inner", runner))
            with torch.enable_grad():  # where no memory is used again
                wanted = [plan.apply(x, plan.prepare(factors), None, chunk) for x in (first, second)]
            with torch.no_grad():
                prepared = plan.prepare(factors)
                got = [plan.apply(x, prepared, None, chunk) for x in (first, second, second)]
            for one, other in zip(got, [*wanted, wanted[1]], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_gradients_are_not_overwritten_by_the_backward_of_another_layer() -> None:
    """Both have steps of the same names, and the memory of one backward is that of the next."""
    fmt = kc.KCP((8, 4, 5, 3), (2, 2, 2, 2), 2, 2, 2)
    torch.manual_seed(0)
    layers = [kc.TensorLinear(fmt, gates=4, dtype=dtype) for dtype in (torch.float32, F64, torch.float32)]
    found, expected = [], []
    for layer in layers * 2:
        x = torch.randn(7, fmt.M, dtype=layer._dtype)
        found.append(torch.autograd.grad(layer(x).square().sum(), [*layer.parameters()]))
        y = torch.nn.functional.linear(x, layer.dense_weight(), layer.bias)
        expected.append(torch.autograd.grad(y.square().sum(), [*layer.parameters()]))
    for got, want in zip(found, expected, strict=True):
        for one, other in zip(got, want, strict=True):
            assert (one - other).norm() <= (1e-12 if one.dtype == F64 else 1e-5) * other.norm()


@pytest.mark.parametrize("mode", ["fake", "inference"])
def test_memory_of_a_tracer_or_of_inference_is_not_used_again(mode: str) -> None:
    fmt = kc.KCP((8, 4, 5, 3), (2, 2, 2, 2), 2, 2, 2)
    torch.manual_seed(0)
    layer, x = kc.TensorLinear(fmt, gates=4, order="separable"), torch.randn(9, fmt.M)
    if mode == "fake":
        with FakeTensorMode():
            kc.TensorLinear(fmt, gates=4, order="separable")(torch.randn(9, fmt.M)).sum().backward()
    else:
        y = layer(x).sum()
        with torch.inference_mode():
            y.backward()
    got = torch.autograd.grad(layer(x).square().sum(), [*layer.parameters()])
    dense = torch.nn.functional.linear(x, layer.dense_weight(), layer.bias)
    for one, other in zip(got, torch.autograd.grad(dense.square().sum(), [*layer.parameters()]), strict=True):
        assert type(one) is Tensor
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("gates", [1, 4])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_chunks_give_what_the_whole_gives_with_every_order_and_form(fmt: kc.Format, gates: int) -> None:
    generator = torch.Generator().manual_seed(0)
    factors = {n: t.requires_grad_() for n, t in fmt.init(generator, dtype=F64, gates=gates).items()}
    x = torch.randn(ROWS, fmt.M, dtype=F64, generator=generator, requires_grad=True)
    bias = torch.randn(gates * fmt.N, dtype=F64, generator=generator, requires_grad=True)
    leaves = [x, bias, *factors.values()]

    def results(plan: kc.Plan, chunk: int | None) -> list[Tensor]:
        y = plan.apply(x, plan.prepare(factors), bias, chunk)
        with torch.no_grad():
            inferred = plan.apply(x, plan.prepare(factors), bias, chunk)
        gradients = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
        return [y, inferred, *(g for g in gradients if g is not None)]

    for order in [name for name in fmt.orders() if name != "naive"] + ["optimal"]:
        for wide in (False, True):
            plan = kc.Plan(fmt.network(gates), fmt.plan(order, CHUNK, gates=gates).tree, CHUNK, order, wide)
            for got, want in zip(results(plan, CHUNK), results(plan, None), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("grad", [False, True])
def test_what_a_call_returns_is_not_overwritten_by_the_next(grad: bool) -> None:
    for fmt in FORMATS:
        runner = Chunked(fmt.plan("optimal", CHUNK))
        factors = fmt.init(torch.Generator().manual_seed(0), dtype=F64)
        x = torch.randn(ROWS, fmt.M, dtype=F64, requires_grad=grad)
        y = runner.execute(x, factors)
        kept = [y.detach().clone()]
        outputs = [y]
        if grad:
            outputs.append(torch.autograd.grad(y.sum(), x)[0])
            kept.append(outputs[1].clone())
        again = runner.execute(torch.zeros_like(x, requires_grad=grad), factors)
        if grad:
            again.sum().backward()
        for got, want in zip(outputs, kept, strict=True):
            assert torch.equal(got.detach(), want)


def test_chunks_after_the_first_ask_for_little_memory() -> None:
    fmt = kc.BT((8, 8, 8), (4, 4, 4), 4, P=2)
    factors = fmt.init(torch.Generator().manual_seed(0))

    def asked(rows: int) -> int:
        """Bytes that a call takes from the allocator, freed ones included."""
        x, runner = torch.randn(rows, fmt.M), Chunked(fmt.plan("optimal", 8))
        with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
            runner.execute(x, factors)
        events = profile.profiler.kineto_results.events() if profile.profiler is not None else []
        return sum(event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0)

    one, many = asked(8), asked(80)
    output = 80 * fmt.N * 4
    assert many < one + 4 * output  # ten times the rows, but the intermediates are those of one chunk


@pytest.mark.parametrize("grad", [False, True])
def test_a_copy_that_permutes_nothing_is_made_too(grad: bool) -> None:
    """A summed leg of size 1 leaves no side of the matrix with stride one, though its legs are in order."""
    fmt = kc.TR((2, 8, 4), (2, 2, 2), 1)
    factors = fmt.init(torch.Generator().manual_seed(0), dtype=F64, gates=4)
    x = torch.randn(4, fmt.M, dtype=F64)
    W = fmt.to_dense(factors, gates=4)
    expected = torch.cat([x @ W[gate] for gate in range(4)], 1)
    for runner in candidates(fmt, 1, 4, False).values():
        if isinstance(runner, kc.Plan):
            leaves = {name: tensor.requires_grad_(grad) for name, tensor in factors.items()}
            y = runner.apply(x, runner.prepare(leaves), None, chunk=1)
            torch.testing.assert_close(y.detach(), expected, rtol=1e-12, atol=1e-12)
            if grad:
                y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_backward_inside_autocast_of_a_forward_outside_it_keeps_the_dtype(dtype: torch.dtype) -> None:
    fmt = kc.TT((4, 3, 2), (2, 2, 2), 2)
    factors = {n: t.requires_grad_() for n, t in fmt.init(torch.Generator().manual_seed(0)).items()}
    x = torch.randint(0, 256, (ROWS, fmt.M), dtype=torch.uint8).to(dtype)
    plan = fmt.plan("optimal", CHUNK)

    def gradients(autocast: bool) -> tuple[Tensor, ...]:
        y = plan.apply(x, plan.prepare(factors), None, CHUNK)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return torch.autograd.grad(y.sum(), [*factors.values()])

    for got, want in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(got, want)
