"""The first two products in one kernel: what it computes, where it is used, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kronecell as kc
from kronecell.ops import compiled, fold
from kronecell.ops.narrow import COMPILED_COLUMNS, LANES
from tests.test_compiled import EPS, built, counted, operand, used

SIZES = {
    "rows": st.integers(1, 9),
    "places": st.one_of(st.integers(1, 90), st.integers(380, 400)),
    "depth": st.integers(0, 100),
    "outer": st.integers(1, 3),
    "shared": st.integers(1, 4),
    "inner": st.integers(1, 5),
    "others": st.one_of(st.integers(1, 9), st.just(16)),
    "bytes_": st.booleans(),
}


def in_doubles(x: Tensor, weight: Tensor, factors: Tensor, inner: int) -> tuple[Tensor, Tensor]:
    """y (r, p, c) and z (r, g, o, a, b) by their definitions; x (r, p, k), weight (c, k), factors (g, o, p)."""
    y = torch.einsum("rpk,ck->rpc", x.double(), weight.double())
    columns = y.unflatten(2, (-1, len(factors), inner))
    return y, torch.einsum("rpagb,gop->rgoab", columns, factors.double())


@built
@settings(max_examples=150)
@given(**SIZES)
@example(rows=1, places=160, depth=8, outer=1, shared=1, inner=4, others=1, bytes_=False)  # rows lie together
@example(rows=5, places=160, depth=8, outer=1, shared=1, inner=4, others=3, bytes_=False)
@example(rows=8, places=160, depth=40, outer=1, shared=1, inner=4, others=4, bytes_=True)
@example(rows=33, places=13, depth=40, outer=1, shared=1, inner=4, others=16, bytes_=False)
@example(rows=9, places=390, depth=0, outer=1, shared=3, inner=1, others=4, bytes_=False)
@example(rows=5, places=160, depth=0, outer=1, shared=4, inner=4, others=4, bytes_=False)  # as many as fill registers
@example(rows=3, places=45, depth=430, outer=1, shared=2, inner=4, others=3, bytes_=False)  # in slices of the depth
@example(rows=7, places=33, depth=5, outer=1, shared=1, inner=COMPILED_COLUMNS, others=16, bytes_=False)
def test_the_kernels_are_two_products_and_their_gradients(
    rows: int, places: int, depth: int, outer: int, shared: int, inner: int, others: int, bytes_: bool
) -> None:
    columns, depth = outer * shared * inner, compiled.LEAST_DEPTH + depth
    assume(columns <= COMPILED_COLUMNS)
    x = operand(rows * places, depth, bytes_)
    weight, factors = operand(columns, depth, False, 1), operand(shared * others, places, False, 2)
    upstream = operand(rows, others * columns, False, 3)
    sizes = (places, columns, shared, inner, others)
    y, z = torch.empty(rows * places, columns), torch.empty(rows, others * columns)
    v = None if bytes_ else torch.empty(rows, shared * others, depth)
    compiled.few_columns_folded(x, weight, factors, y, z, v, sizes)

    exact = [t.double().requires_grad_() for t in (weight, factors.view(shared, others, places))]
    whole = x.view(rows, places, depth)
    wanted_y, wanted_z = in_doubles(whole, *exact, inner)
    most_y, most_z = in_doubles(whole.float().abs(), *(t.detach().abs() for t in exact), inner)
    assert bool(((y.view_as(wanted_y) - wanted_y).abs() <= depth * EPS * most_y).all())
    assert bool(((z.view_as(wanted_z) - wanted_z).abs() <= (depth + places) * EPS * most_z).all())
    without = torch.empty_like(z)
    compiled.few_columns_folded(x, weight, factors, None, without, None, sizes)
    assert torch.equal(without, z)
    if v is None:  # bytes have no gradients here
        return
    wanted_v, most_v = factors.double() @ whole.double(), factors.double().abs() @ whole.double().abs()
    assert bool(((v - wanted_v).abs() <= places * EPS * most_v).all())

    wanted = torch.autograd.grad(wanted_z, exact, upstream.double().view_as(wanted_z))
    bounds = [t.detach().abs().requires_grad_() for t in exact]
    most = torch.autograd.grad(
        in_doubles(whole.float().abs(), *bounds, inner)[1], bounds, upstream.double().abs().view_as(wanted_z)
    )
    got = torch.ones_like(weight), torch.ones_like(factors)
    compiled.folded_gradients(y, v, upstream, *got, sizes)
    for total, want, bound in zip(got, wanted, most, strict=True):
        error = (total.view_as(want) - 1 - want).abs()
        assert bool((error <= (rows * places + depth + others) * EPS * (bound + 1)).all())


@built
@pytest.mark.parametrize("columns", [4, 7, 8, COMPILED_COLUMNS])
@pytest.mark.parametrize(("own", "others"), [(False, 3), (False, 16), (True, 3)])
def test_a_row_has_the_same_bits_alone_among_others_and_with_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, columns: int, own: bool, others: int
) -> None:
    monkeypatch.setattr(compiled, "WORTH_A_THREAD", 1)
    places, depth, shared = 33, 100, columns if own else 1  # every column has factors of its own, or none has
    sizes = (places, columns, shared, columns // shared, others)
    x, weight = operand(7 * places, depth, False), operand(columns, depth, False, 1)
    factors, upstream = operand(shared * others, places, False, 2), operand(7, others * columns, False, 3)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y, z = torch.empty(7 * places, columns), torch.empty(7, others * columns)
            v = torch.empty(7, shared * others, depth)
            compiled.few_columns_folded(x, weight, factors, y, z, v, sizes)
            of_weight, of_factors = torch.zeros_like(weight), torch.zeros_like(factors)
            compiled.folded_gradients(y, v, upstream, of_weight, of_factors, sizes)
            results.append((z, v, of_weight, of_factors))
    finally:
        torch.set_num_threads(before)
    for result in results:
        for got, want in zip(result, results[0], strict=True):
            assert torch.equal(got, want)
    for i in range(7):
        alone, turned = torch.empty(1, others * columns), torch.empty(1, shared * others, depth)
        compiled.few_columns_folded(x[i * places : (i + 1) * places], weight, factors, None, alone, turned, sizes)
        assert torch.equal(alone[0], results[0][0][i]) and torch.equal(turned[0], results[0][1][i])


@built
@pytest.mark.parametrize(("columns", "others"), [(1, 1), (4, 16), (7, 3), (COMPILED_COLUMNS, 4)])
def test_nothing_is_read_or_written_beside_the_operands(columns: int, others: int) -> None:
    rows, places, depth = 3, 13, compiled.LEAST_DEPTH + 5
    memories = []

    def within(tensor: Tensor) -> Tensor:
        """The tensor between walls of NaN."""
        memories.append(torch.full((tensor.numel() + 256,), torch.nan))
        return memories[-1][128:-128].view(tensor.shape).copy_(tensor)

    x, weight = within(operand(rows * places, depth, False)), within(operand(columns, depth, False, 1))
    factors, upstream = within(operand(others, places, False, 2)), within(operand(rows, others * columns, False, 3))
    y, z = within(torch.zeros(rows * places, columns)), within(torch.zeros(rows, others * columns))
    v = within(torch.zeros(rows, others, depth))
    of_weight, of_factors = within(torch.zeros_like(weight)), within(torch.zeros_like(factors))
    sizes = (places, columns, 1, columns, others)
    compiled.few_columns_folded(x, weight, factors, y, z, v, sizes)
    compiled.folded_gradients(y, v, upstream, of_weight, of_factors, sizes)
    for memory in memories:
        assert bool(memory[:128].isnan().all()) and bool(memory[-128:].isnan().all())
        assert bool(memory[128:-128].isfinite().all())


# Where it is used ----------------------------------------------------------------------------------------------------

LAYERS = {
    "the paper's": (kc.KCP((8, 20, 20, 18), (4, 4, 4, 4), 4, 4, 2), 20),
    "in chunks": (kc.KCP((8, 20, 20, 18), (4, 4, 4, 4), 4, 4, 2), 430),
    "other ranks": (kc.KCP((10, 6, 12, 25), (3, 2, 3, 2), 3, 2, 2), 70),
}
folds = pytest.mark.skipif(LANES == 4 or compiled.library is None, reason="the compiled kernels are not used here")


@folds
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bytes_", [False, True])
def test_a_layer_and_its_split_agree_with_double_precision(name: str, shared: bool, bytes_: bool) -> None:
    fmt, rows = LAYERS[name]
    layer = kc.TensorLinear(fmt, gates=4, shared=shared)
    exact = kc.TensorLinear(fmt, gates=4, shared=shared).double()
    exact.load_state_dict(layer.state_dict())
    x = operand(rows, fmt.M, bytes_)
    for product in (lambda m, x: m(x), lambda m, x: m.columns(x, m.split(len(x)))[0]):
        results = []
        for module, source in ((layer, x), (exact, x if bytes_ else x.double())):
            with torch.no_grad():
                inference = product(module, source)
            y = product(module, source)
            used = [p for p in module.parameters() if p is not module.bias]
            gradients = torch.autograd.grad(y.square().sum(), used, allow_unused=True)
            results.append([inference, y, *(g for g in gradients if g is not None)])
        for got, want in zip(*results, strict=True):
            assert (got - want).norm() <= 1e-5 * want.norm()


@built
@used
@pytest.mark.parametrize(("shared", "frozen"), [(False, ()), (True, ()), (False, ("A1", "A2")), (False, ("A3", "A4"))])
def test_a_recurrent_layer_folds_unless_only_one_of_the_two_operands_learns(
    monkeypatch: pytest.MonkeyPatch, shared: bool, frozen: tuple[str, ...]
) -> None:
    torch.manual_seed(0)  # in one of a hundred draws, float32 loses more than is allowed below
    fmt = kc.KCP((8, 20, 20, 18), (4, 4, 4, 4), 4, 4, 2)
    lstm = kc.LSTM(fmt.M, fmt.N, input_format=fmt, shared=shared)
    for name, parameter in lstm.named_parameters():
        parameter.requires_grad_(name.split(".")[-1] not in frozen)
    exact = kc.LSTM(fmt.M, fmt.N, input_format=fmt, shared=shared).double()
    exact.load_state_dict(lstm.state_dict())
    x = operand(6 * 16, fmt.M, False).view(6, 16, fmt.M)
    with counted(monkeypatch) as calls:
        learning = [(n, p) for n, p in lstm.named_parameters() if p.requires_grad]
        gradients = torch.autograd.grad(lstm(x)[0].square().sum(), [p for _, p in learning])
    assert calls[0] == "few_columns_folded"
    assert calls[1:] == (["folded_gradients"] if not frozen else ["column_sums"] if "A1" in frozen else [])
    named = dict(exact.named_parameters())
    wanted = torch.autograd.grad(exact(x.double())[0].square().sum(), [named[n] for n, _ in learning])
    for got, want in zip(gradients, wanted, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


@folds
def test_steps_are_a_fold_if_x_lies_as_it_should_and_the_second_sums_over_all_places() -> None:
    plan = kc.KCP((8, 20, 20, 18), (4, 4, 4, 4), 4, 4, 2).plan("separable", 96, gates=4)
    wide = replace(plan, wide=True).program.hot
    found = fold.fold_of(wide)
    assert found is not None and found.sizes == (160, 16, 4, 4, 4)
    assert fold.fold_of(plan.program.hot) is None  # a product for every gate
    assert fold.fold_of(wide[:1]) is None and fold.fold_of(wide[1:]) is None
    turned = replace(wide[0], a=replace(wide[0].a, permutation=(0, 1)))
    assert fold.fold_of((turned, wide[1])) is None
    large = kc.KCP((80, 20, 20, 18), (4, 4, 4, 4), 4, 4, 2).plan("separable", 96, gates=4)
    assert fold.fold_of(replace(large, wide=True).program.hot) is None


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", [kc.KCP, kc.TR])  # the second does not fold
def test_an_exported_large_layer_serves_every_number_of_rows(kind: type[kc.Format], shared: bool) -> None:
    m, n = (8, 20, 20, 18), (4, 4, 4, 4)
    fmt = kc.KCP(m, n, 4, 4, 2) if kind is kc.KCP else kc.TR(m, n, 3)
    layer = kc.TensorLinear(fmt, gates=4, shared=shared).eval()
    rows = {"x": {0: torch.export.Dim("rows", min=1, max=4096)}}
    exported = torch.export.export(layer, (operand(3, fmt.M, False),), dynamic_shapes=rows).module()
    for count in (1, 40):
        x = operand(count, fmt.M, False)
        torch.testing.assert_close(exported(x), layer(x), rtol=1e-4, atol=1e-5)


@folds
@pytest.mark.parametrize("frozen", [(), ("A1", "A2"), ("A3", "A4")])
def test_gradients_of_gradients_pass_through_both_operands(frozen: tuple[str, ...]) -> None:
    fmt = kc.KCP((8, 20, 20, 18), (4, 4, 4, 4), 4, 4, 2)
    layer = kc.TensorLinear(fmt, gates=4, bias=False)
    exact = kc.TensorLinear(fmt, gates=4, bias=False).double()
    exact.load_state_dict(layer.state_dict())
    x, results = operand(20, fmt.M, False), []
    for module, source in ((layer, x), (exact, x.double())):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in frozen)
        learning = [p for p in module.parameters() if p.requires_grad]
        first = torch.autograd.grad(module(source).square().sum(), learning, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), learning))
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= 1e-4 * want.norm()
