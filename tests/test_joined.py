"""Products of weights and steps with x as one operation: where it is one, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import prod

import pytest
import torch
from torch import Tensor

import kronecell as kc
from kronecell.nn.branch_parallel import KCPBranches
from kronecell.ops import compiled
from kronecell.ops.plan import Plan
from kronecell.plans.order import Tree
from tests.cases import dense_product
from tests.test_compiled import built, counted, operand, used

GATES = 4
SMALL = kc.KCP((16, 10, 15, 17), (2, 2, 4, 2), 3, 2, 2)  # 40,800 x 32
PAPER = kc.KCP((8, 20, 20, 18), (4, 4, 4, 4), 4, 4, 2)
ROWS = 27
CASES = [(SMALL, ROWS), (PAPER, 19)]  # with about as many rows as make the kernels worth it
KERNELS = ("products", "few_columns_folded", "last_product", "last_gradients", "folded_gradients")

pytestmark = [built, used]


ORDER = ((("x", ("A3", "A4")), ("A1", "A2")), (("B1", "B2"), ("B3", "B4")))  # what `auto` chooses for the paper's batch


def plan_of(fmt: kc.KCP, rows: int, shared: bool = False) -> Plan:
    return Plan(fmt.network(GATES, shared), ORDER, rows, wide=True)


def learning(plan: Plan, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    factors = {name: torch.randn(shape, generator=generator) for name, shape in plan.network.shapes.items()}
    bias = torch.randn(prod(plan.network.shape(plan.network.outputs)), generator=generator)
    return {name: tensor.requires_grad_() for name, tensor in factors.items()}, bias.requires_grad_()


def is_one(y: Tensor) -> bool:
    return type(y.grad_fn).__name__ == "_JoinedBackward"


def in_two(plan: Plan, x: Tensor, factors: dict[str, Tensor], bias: Tensor | None) -> Tensor:
    y = plan.apply(x, plan.prepare(factors), bias)
    assert not is_one(y)
    return y


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("fmt", "rows"), CASES, ids=["small", "paper"])
def test_one_operation_has_the_bits_of_two_and_the_values_of_the_dense_matrix(
    fmt: kc.KCP, rows: int, with_bias: bool, shared: bool
) -> None:
    plan = plan_of(fmt, rows, shared)
    (factors, bias), x = learning(plan), operand(rows, fmt.M, False, 1)
    leaves = [*factors.values(), *([bias] if with_bias else [])]
    given = bias if with_bias else None
    y, other = plan.execute(x, factors, given), in_two(plan, x, factors, given)
    assert is_one(y) and torch.equal(y, other)
    upstream = operand(rows, y.shape[1], False, 2)
    found, others = (torch.autograd.grad(made, leaves, upstream) for made in (y, other))
    assert all(torch.equal(one, two) for one, two in zip(found, others, strict=True))

    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in factors.items()}
    wanted = dense_product(fmt, x.double(), exact, GATES, shared)
    gradients = torch.autograd.grad(wanted, [*exact.values()], upstream.double())
    if with_bias:
        wanted, gradients = wanted + bias.double(), (*gradients, upstream.double().sum(0))
    for got, want in ((y, wanted), *zip(found, gradients, strict=True)):
        assert got.shape == want.shape
        assert (got - want).norm() <= 2e-6 * want.norm()


def test_layers_and_lstms_train_by_one_operation_and_every_kernel_is_called_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = operand(96, PAPER.M, False)
    layer = kc.TensorLinear(PAPER, gates=GATES)
    assert layer.plan(96).order == "optimal/128" and is_one(layer(x))
    with counted(monkeypatch, KERNELS) as calls:
        layer(x.view(6, 16, -1)).sum().backward()
    assert [calls.count(name) for name in KERNELS] == [2, 1, 1, 1, 1]  # products of weights forward and backward
    lstm = kc.LSTM(PAPER.M, PAPER.N, input_format=PAPER)
    with counted(monkeypatch, KERNELS) as calls:
        lstm(x.view(6, 16, -1))[0].sum().backward()
    assert [calls.count(name) for name in KERNELS] == [2, 1, 1, 1, 1]


def test_what_the_operation_is_not_for_goes_the_usual_way() -> None:
    plan, x = plan_of(SMALL, ROWS), operand(ROWS, SMALL.M, False)
    factors, bias = learning(plan)
    first = next(iter(factors))
    wide = torch.empty(ROWS, 2 * SMALL.M)[:, ::2].copy_(x)
    assert is_one(plan.execute(x, factors, bias))
    assert not is_one(plan.execute(x.clone().requires_grad_(), factors, bias))
    assert not is_one(plan.execute(x, factors, bias.detach()))
    assert not is_one(plan.execute(x, {**factors, first: factors[first].detach()}, bias))
    assert not is_one(plan.execute(x, {**factors, first: factors[first].mT.contiguous().mT}, bias))
    assert not is_one(plan.execute(wide, factors, bias))
    assert not is_one(plan.execute(x[:9], factors, bias))  # too few numbers
    assert not is_one(plan.execute((x * 9).to(torch.uint8), factors, bias))
    doubles = {name: tensor.double() for name, tensor in factors.items()}
    assert not is_one(plan.execute(x.double(), doubles, bias.double()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_one(kc.TensorLinear(SMALL, gates=GATES, order=ORDER)(x))
    with torch.no_grad():
        assert plan.execute(x, factors, bias).grad_fn is None


ODD = kc.KCP((8, 20, 360), (4, 4, 16), 4, 4, 2)  # the last mode stands alone, summed with a constant
SIX = kc.KCP((2, 2, 10, 15, 17, 16), (2,) * 6, 2, 2, 2)


@pytest.mark.parametrize(
    ("fmt", "shared", "order"),
    [
        (ODD, False, ((("x", ("A3", "iA2")), ("A1", "A2")), (("B1", "B2"), ("B3", "iB2")))),
        (
            SIX,
            ("A5", "A6", "A1"),  # the fold takes one part of x after the other
            (
                (("x", ("A5", "A6")), ("A3", "A4")),
                (((("A1", "B1"), "A2"), "B2"), (("B3", "B4"), ("B5", "B6"))),
            ),
        ),
        (KCPBranches.of(PAPER, 0, 1), ("A3", "A4", "B1"), ORDER),  # a rank of one is the last leg of what is left of x
    ],
    ids=["constants", "parts of x", "rank one"],
)
def test_unusual_networks_have_the_values_of_the_dense_matrix(
    fmt: kc.Format, shared: bool | tuple[str, ...], order: Tree
) -> None:
    plan, rows = Plan(fmt.network(GATES, shared), order, 27, wide=True), 27
    (factors, bias), x = learning(plan), operand(rows, fmt.M, False, 1)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in factors.items()}
    oracle = dense_product(fmt, x.double(), exact, GATES, shared) + bias.double()
    y = plan.execute(x, factors, bias)
    assert (y - oracle).norm() <= 2e-6 * oracle.norm()
    found, wanted = (
        torch.autograd.grad(y.sum(), [*factors.values()]),
        torch.autograd.grad(oracle.sum(), [*exact.values()]),
    )
    for got, want in zip(found, wanted, strict=True):
        assert (got - want).norm() <= 3e-6 * want.norm()


@pytest.mark.parametrize("size", [1, 32, 127, 129])
def test_a_bias_of_another_size_is_an_error(size: int) -> None:
    plan, x = plan_of(SMALL, ROWS), operand(ROWS, SMALL.M, False)
    factors, _ = learning(plan)
    layer = kc.TensorLinear(SMALL, gates=GATES, order=ORDER)
    bias = torch.zeros(size, requires_grad=True)
    with pytest.raises(kc.ShapeError, match=rf"bias .* expected \(128,\) .* got \({size},\)"):
        layer(x, bias)
    with pytest.raises(RuntimeError):  # torch's own, from the operations of torch
        plan.execute(x, factors, bias)


def test_a_bias_may_change_before_the_backward() -> None:
    plan, x = plan_of(SMALL, ROWS), operand(ROWS, SMALL.M, False)
    factors, bias = learning(plan)
    y = plan.execute(x, factors, bias)
    with torch.no_grad():
        bias.zero_()
    assert is_one(y) and torch.equal(torch.autograd.grad(y.sum(), bias)[0], torch.full_like(bias, ROWS))


def test_nothing_made_in_inference_mode_is_lent_to_training() -> None:
    plan, x = plan_of(SMALL, ROWS), operand(ROWS, SMALL.M, False)
    factors, bias = learning(plan)
    with torch.inference_mode(), torch.enable_grad(), suppress(RuntimeError):  # torch refuses to keep such tensors
        plan.execute(x, factors, bias)
    y = plan.execute(x, factors, bias)
    y.sum().backward()
    assert is_one(y) and all(tensor.grad is not None for tensor in factors.values())


def test_one_row_that_is_not_finite_does_not_spoil_the_others() -> None:
    for rows in (ROWS, ROWS + 1, ROWS + 2, ROWS + 3):  # some rows are left over from those that go at once
        plan, x = plan_of(SMALL, rows), operand(rows, SMALL.M, False)
        factors, bias = learning(plan)
        clean = plan.execute(x, factors, bias)
        x[-1, 7] = torch.nan
        spoilt = plan.execute(x, factors, bias)
        assert is_one(clean) and torch.equal(clean[:-1], spoilt[:-1]) and bool(spoilt[-1].isnan().all())
        without = torch.autograd.grad(spoilt[:-1].sum(), bias)[0]
        assert torch.equal(without, torch.full_like(bias, rows - 1))


def test_without_the_kernels_there_are_two_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    x = operand(ROWS, SMALL.M, False)
    plan = plan_of(SMALL, ROWS)
    factors, bias = learning(plan)
    y = plan.execute(x, factors, bias)
    monkeypatch.setattr(compiled, "library", None)
    other = plan.execute(x, factors, bias)
    assert is_one(y) and not is_one(other)
    leaves = [*factors.values(), bias]
    # A graph that was made with the kernels is differentiated without them, if they are gone.
    for got, want in zip(*(torch.autograd.grad(made.square().sum(), leaves) for made in (y, other)), strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


def test_second_derivatives_are_those_of_two_operations() -> None:
    plan, x = plan_of(SMALL, ROWS), operand(ROWS, SMALL.M, False)
    factors, bias = learning(plan)
    leaves = [*factors.values(), bias]

    def second(make: Callable[..., Tensor]) -> list[Tensor]:
        upstream = operand(ROWS, GATES * SMALL.N, False, 3).requires_grad_()
        y = make(x, factors, bias)
        gradients = torch.autograd.grad(y, leaves, upstream, create_graph=True)
        total = sum(gradient.square().sum() for gradient in gradients)
        return [y, *torch.autograd.grad(total, [*leaves[:-1], upstream])]

    one, two = second(plan.execute), second(lambda *given: in_two(plan, *given))
    assert is_one(one[0])
    for got, want in zip(one, two, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


def test_a_batch_of_gradients_is_each_of_them() -> None:
    plan, x = plan_of(SMALL, ROWS), operand(ROWS, SMALL.M, False)
    factors, bias = learning(plan)
    leaves = [*factors.values(), bias]
    y = plan.execute(x, factors, bias)
    assert is_one(y)
    upstream = operand(2 * ROWS, GATES * SMALL.N, False, 3).view(2, ROWS, -1)
    batched = torch.autograd.grad(y, leaves, upstream, is_grads_batched=True, retain_graph=True)
    for i in range(2):
        alone = torch.autograd.grad(y, leaves, upstream[i], retain_graph=True)
        for got, want in zip(batched, alone, strict=True):
            assert (got[i] - want).norm() <= 1e-5 * want.norm()


def turned(tensor: Tensor) -> Tensor:
    """The same numbers, the last two dimensions the other way round in memory."""
    return tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [(Tensor.clone, Tensor.clone), (Tensor.clone, turned), (Tensor.double, Tensor.float)],
    ids=["copies", "other strides", "there and back"],
)
def test_hooks_of_saved_tensors_may_give_back_other_memory(
    pack: Callable[[Tensor], Tensor], unpack: Callable[[Tensor], Tensor]
) -> None:
    plan, x = plan_of(SMALL, ROWS), operand(ROWS, SMALL.M, False)
    factors, bias = learning(plan)
    leaves = [*factors.values(), bias]
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = plan.execute(x, factors, bias)
    assert is_one(y)
    wanted = torch.autograd.grad(in_two(plan, x, factors, bias).square().sum(), leaves)
    for got, want in zip(torch.autograd.grad(y.square().sum(), leaves), wanted, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


def test_what_is_kept_for_one_backward_outlives_other_forwards() -> None:
    plan = plan_of(SMALL, ROWS)
    (factors, bias), inputs = learning(plan), [operand(ROWS, SMALL.M, False, seed) for seed in range(3)]
    leaves = [*factors.values(), bias]
    alone = [torch.autograd.grad(plan.execute(x, factors, bias).sum(), leaves) for x in inputs]
    together = [plan.execute(x, factors, bias) for x in inputs]
    for y, wanted in zip(together, alone, strict=True):
        for _ in range(2):  # a graph that is kept can be gone through again
            found = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
            assert all(torch.equal(got, want) for got, want in zip(found, wanted, strict=True))


def test_a_factor_that_is_changed_before_the_backward_is_an_error() -> None:
    plan, x = plan_of(SMALL, ROWS), operand(ROWS, SMALL.M, False)
    factors, bias = learning(plan)
    y = plan.execute(x, factors, bias)
    assert is_one(y)
    with torch.no_grad():
        next(iter(factors.values())).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_one_factor_in_two_places_gets_the_sum_of_both_gradients() -> None:
    fmt = kc.KCP((10, 10, 20, 18), (2, 2, 4, 2), 3, 2, 2)
    plan, x = plan_of(fmt, 30), operand(30, fmt.M, False)
    factors, bias = learning(plan)
    assert factors["A1"].shape == factors["A2"].shape
    both = torch.autograd.grad(plan.execute(x, factors | {"A2": factors["A1"]}, bias).sum(), factors["A1"])[0]
    copy = factors["A1"].detach().clone().requires_grad_()
    y = plan.execute(x, factors | {"A2": copy}, bias)
    parts = torch.autograd.grad(y.sum(), [factors["A1"], copy])
    assert is_one(y) and torch.equal(both, parts[0] + parts[1])
