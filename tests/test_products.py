"""The products of weights by one call: what it computes, where it is used, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kronecell as kc
from kronecell.ops import compiled, products
from kronecell.ops.candidates import candidates
from kronecell.ops.plan import Plan
from kronecell.ops.products import Products
from tests.cases import dense_product, formats
from tests.test_compiled import EPS, built, counted

PAIR = kc.KCP((6, 5, 4, 3), (2, 3, 2, 2), 3, 2, 2)


def made_of(plan: Plan) -> Products:
    found = plan._products
    assert found is not None
    return found


def drawn(plan: Plan, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in plan.network.shapes.items()}


def inputs_of(found: Products, factors: Mapping[str, Tensor], plan: Plan) -> list[Tensor]:
    """What the steps take that no step makes; constants among them are in no mapping of factors."""
    prepared = plan.prepare(factors)
    return [prepared[name] for name in found.inputs]


@built
@pytest.mark.parametrize("kind", ["tt", "tr", "ht", "kcp-pair", "kcp-all"])  # of others, steps are seldom hoisted
@settings(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_the_kernel_makes_the_products_and_their_gradients(kind: str, data: st.DataObject) -> None:
    fmt = data.draw(formats(kind))
    shared = data.draw(st.booleans())
    gates = data.draw(st.sampled_from([1, 4]))
    name = data.draw(st.sampled_from([*fmt.orders(), "optimal"]))
    plan = fmt.plan(name, data.draw(st.sampled_from([7, 4096])), gates=gates, shared=shared)
    assume(plan._products is not None)
    found = made_of(plan)
    leaves = [t.requires_grad_() for t in inputs_of(found, drawn(plan), plan)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    most = [t.detach().double().abs().requires_grad_() for t in leaves]
    got = [*found.run(dict(zip(found.inputs, leaves, strict=True))).values()]
    want, bound = found.differentiable(exact), found.differentiable(most)
    upstream = [torch.randn(t.shape, generator=torch.Generator().manual_seed(i)) for i, t in enumerate(got)]
    results = [
        torch.autograd.grad(tensors, sources, gradients)
        for tensors, sources, gradients in (
            (got, leaves, upstream),
            (want, exact, [t.double() for t in upstream]),
            (bound, most, [t.double().abs() for t in upstream]),
        )
    ]
    depth = sum(op.a.groups[-2] + op.a.groups[-1] + op.b.groups[-1] + 2 for op in found.ops)  # of the longest sums
    for one, two, limit in (*zip(got, want, bound, strict=True), *zip(*results, strict=True)):
        assert one.shape == two.shape
        assert bool(((one - two).abs() <= depth * EPS * limit).all())


@built
@pytest.mark.parametrize("gating", [(1, False), (4, False), (4, True)])
@pytest.mark.parametrize("kind", ["tt", "tr", "ht", "kcp-pair", "kcp-all"])
def test_a_product_with_them_is_that_of_the_dense_matrix(kind: str, gating: tuple[int, bool]) -> None:
    fmt = {
        "tt": kc.TT((4, 3, 5), (2, 3, 2), 3),
        "tr": kc.TR((4, 3, 5), (2, 3, 2), 2),
        "ht": kc.HT((4, 3, 5, 2), (2, 3, 2, 2), 2),
        "kcp-pair": PAIR,
        "kcp-all": kc.KCP((6, 5, 4, 3), (2, 3, 2, 2), 3, 2, 2, tie="all"),
    }[kind]
    x = torch.randn(7, fmt.M, generator=torch.Generator().manual_seed(1))
    plans = [plan for plan in candidates(fmt, 7, *gating).values() if isinstance(plan, Plan)]
    assert any(plan._products is not None for plan in plans)
    for plan in plans:
        factors = {name: t.requires_grad_() for name, t in drawn(plan).items()}
        doubles = {name: t.detach().double().requires_grad_() for name, t in factors.items()}
        y, want = plan.execute(x, factors), dense_product(fmt, x.double(), doubles, *gating)
        ours = torch.autograd.grad(y.square().sum(), [*factors.values()])
        theirs = torch.autograd.grad(want.square().sum(), [*doubles.values()])
        for one, two in ((y, want), *zip(ours, theirs, strict=True)):
            assert (one - two).norm() <= 5e-6 * two.norm()


@built
@pytest.mark.parametrize("frozen", [(), ("A1", "A2"), ("A3",), ("B1", "B2", "B3", "B4")])
def test_only_what_learns_has_gradients(monkeypatch: pytest.MonkeyPatch, frozen: tuple[str, ...]) -> None:
    plan = PAIR.plan("separable", 7, gates=4)
    factors = drawn(plan)
    for name, tensor in factors.items():
        tensor.requires_grad_(name not in frozen)
    learning = [t for t in factors.values() if t.requires_grad]
    x = torch.randn(7, PAIR.M, generator=torch.Generator().manual_seed(1))
    with counted(monkeypatch, ("products",)) as calls:
        prepared = plan.prepare(factors)
        gradients = torch.autograd.grad(plan.apply(x, prepared).square().sum(), learning)
    assert calls == ["products"] * 2
    for op, names in zip(made_of(plan).hot, made_of(plan).sources, strict=True):
        assert prepared[op.out].requires_grad == (not names <= {*frozen})
    doubles = {name: t.detach().double().requires_grad_() for name, t in factors.items()}
    wanted = torch.autograd.grad(
        plan.execute(x.double(), doubles).square().sum(), [doubles[n] for n in factors if n not in frozen]
    )
    for got, want in zip(gradients, wanted, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


@built
@pytest.mark.parametrize("unused", [0, 1, 2])
def test_a_result_that_nobody_uses_adds_nothing(unused: int) -> None:
    plan = PAIR.plan("separable", 7, gates=4)
    found, factors = made_of(plan), drawn(plan)
    leaves = [factors[name].requires_grad_() for name in found.inputs]
    used = [t for i, t in enumerate(found.run(factors).values()) if i != unused]
    got = torch.autograd.grad([t.sum() for t in used], leaves, allow_unused=True)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    kept = [t for i, t in enumerate(found.differentiable(exact)) if i != unused]
    want = torch.autograd.grad([t.sum() for t in kept], exact, allow_unused=True)
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if two is None else two.float())


@built
def test_gradients_of_gradients_of_one_tensor_in_two_places() -> None:
    plan = PAIR.plan("separable", 7, gates=4)
    factors = drawn(plan)
    doubles = {name: tensor.double() for name, tensor in factors.items()}
    x = torch.randn(7, PAIR.M, generator=torch.Generator().manual_seed(1))
    results = []
    for source, weights in ((x, factors), (x.double(), doubles)):
        B = weights["B3"].requires_grad_()
        tied = {**weights, "B3": B, "B4": B}  # of the same shape
        y = plan.execute(source, tied).square().sum()
        (first,) = torch.autograd.grad(y, B, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), B)
        results.append((first, second))
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= 1e-4 * want.norm()


@built
def test_batches_of_gradients_and_saved_tensors_that_come_back_otherwise() -> None:
    plan = PAIR.plan("separable", 7, gates=4)
    found, factors = made_of(plan), drawn(plan)
    leaves = [factors[name].requires_grad_() for name in found.inputs]
    plain = [*found.run(factors).values()]
    upstream = [torch.randn(3, *t.shape, generator=torch.Generator().manual_seed(i)) for i, t in enumerate(plain)]
    one_by_one = [torch.autograd.grad(plain, leaves, [u[i] for u in upstream], retain_graph=True) for i in range(3)]
    together = torch.autograd.grad(plain, leaves, upstream, is_grads_batched=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.mT.contiguous(), lambda t: t.mT):
        packed = [*found.run(factors).values()]
    turned = torch.autograd.grad(packed, leaves, [u[0] for u in upstream])
    for i, of in enumerate(zip(*one_by_one, strict=True)):
        torch.testing.assert_close(together[i], torch.stack(of), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(turned[i], of[0], rtol=1e-4, atol=1e-4)


def test_the_same_numbers_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PAIR.plan("separable", 7, gates=4)
    factors, x = drawn(plan), torch.ones(7, PAIR.M)
    y = plan.execute(x, factors)
    monkeypatch.setattr(compiled, "library", None)
    torch.testing.assert_close(plan.execute(x, factors), y)


@built
def test_doubles_large_products_and_watched_ones_are_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PAIR.plan("separable", 7, gates=4)
    found, factors = made_of(plan), drawn(plan)
    assert found.suits(factors)
    assert not found.suits({name: tensor.double() for name, tensor in factors.items()})
    assert not found.suits({name: tensor.mT for name, tensor in factors.items()})
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert not found.suits(factors)
    monkeypatch.setattr(products, "MOST", 100)
    assert PAIR.plan("separable", 7, gates=4)._products is None


@built
@pytest.mark.parametrize("learns", [False, True])
def test_bytes_whose_steps_want_another_layout_find_their_operands(learns: bool) -> None:
    fmt = kc.KCP((6, 5, 4, 3), (2, 3, 2, 2), 3, 2, 2)
    x = torch.randint(0, 256, (9, fmt.M), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    for order in (*fmt.orders(), "optimal"):
        plan = fmt.plan(order, 9, gates=4, shared=True)
        factors = {name: t.requires_grad_(learns) for name, t in drawn(plan).items()}
        wanted = plan.execute(x.double() / 255, {name: t.double() for name, t in factors.items()})
        got = plan.execute(x, factors)
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()
        for op in plan.program.hot:
            operand = plan._operand(plan.prepare(factors), op.right)
            torch.testing.assert_close(op.lay_out(operand), plan.prepare(factors)[op.out])


@built
def test_no_memory_for_buffers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PAIR.plan("separable", 7, gates=4)
    factors = drawn(plan)
    plan.prepare(factors)
    monkeypatch.setattr(compiled, "library", SimpleNamespace(products=lambda *arguments: 1))
    with pytest.raises(MemoryError, match="products of weights"):
        plan.prepare(factors)
