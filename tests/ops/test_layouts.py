"""Odd layouts: of plans, whose steps leave numbers where the next product wants them, and of x in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kronecell as kc
from kronecell.ops.contract import apply, prepare
from kronecell.ops.execute import execute
from tests.cases import dense_product
from tests.ops.plan_cases import CHUNKS, F64, assert_same, derivatives, every_plan, leaves_of

# A format, the order and number of rows for which a step has such a layout, and whether gates share factors.
LAYOUTS: dict[str, tuple[kc.Format, str, int, bool]] = {
    "a product in parts": (kc.Tucker((2, 8, 4, 4), (2, 2, 2, 2), 2), "optimal", 4, False),
    "a product in parts, of shared gates": (kc.BT((4, 6, 4, 3), (2, 2, 2, 2), 2, P=2), "optimal", 8, True),
    "x transposed": (kc.CP((2, 3, 4, 5), (2, 2, 2, 2), 3), "backward", 4, False),
    "x transposed, the small operand on the right": (kc.HT((2, 3, 4, 3), (2, 2, 2, 2), 2), "inorder", 1, False),
    "one product per leading index": (kc.TT((6, 4, 5), (3, 2, 3), 3), "backward", 2, False),
    "pairs of gates": (kc.KCP((8, 6, 6, 8), (2, 2, 2, 2), 3, 2, 2), "separable", 16, False),
    "modes of one": (kc.KCP((1, 6, 1, 8), (2, 1, 1, 2), 2, 1, 2), "separable", 3, False),
    "one row": (kc.TR((4, 3, 2), (2, 3), 2), "optimal", 1, True),
    "blocks of unequal ranks": (kc.KCP((4, 3, 2), (2, 2, 3), 3, (1, 2, 3), (2, 1, 1)), "separable", 5, True),
}
GATES = 2


def made(name: str) -> tuple[kc.Format, dict[str, Tensor], Tensor, Callable[[Tensor, dict[str, Tensor]], Tensor]]:
    fmt, order, rows, shared = LAYOUTS[name]
    x = torch.randn(rows, fmt.M, dtype=F64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    factors = leaves_of(fmt, GATES, shared)
    plan = fmt.plan(order, rows, gates=GATES, shared=shared)
    return fmt, factors, x, lambda x, factors: execute(plan, x, factors)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_first_and_second_derivatives(name: str) -> None:
    _, factors, x, product = made(name)

    def function(x: Tensor, *tensors: Tensor) -> Tensor:
        return product(x, dict(zip(factors, tensors, strict=True)))

    assert torch.autograd.gradcheck(function, (x, *factors.values()), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (x, *factors.values()), fast_mode=True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_the_dense_product_in_chunks_too(name: str) -> None:
    fmt, order, rows, shared = LAYOUTS[name]
    _, factors, x, _ = made(name)
    leaves = [x, *factors.values()]
    want = derivatives(lambda: dense_product(fmt, x, factors, GATES, shared), leaves)
    plan = fmt.plan(order, rows, gates=GATES, shared=shared)
    for each in (plan, *(plan.in_chunks(count) for count in CHUNKS)):
        assert_same(derivatives(lambda each=each: execute(each, x, factors), leaves), want, f"{name} {each.chunk}")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own rules for forward mode
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_batches_of_gradients_and_forward_mode(name: str) -> None:
    _, factors, x, product = made(name)
    fixed = {name: tensor.detach() for name, tensor in factors.items()}

    def of_x(x: Tensor) -> Tensor:
        return product(x, fixed)

    plain = torch.autograd.functional.jacobian(of_x, x)
    torch.testing.assert_close(torch.autograd.functional.jacobian(of_x, x, vectorize=True), plain)
    torch.testing.assert_close(torch.func.jacrev(of_x)(x), plain)
    torch.testing.assert_close(torch.func.jacfwd(of_x)(x), plain)


# x as it may lie in memory -------------------------------------------------------------------------------------------

STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every second column": lambda x: torch.stack([x, x + 1], -1).reshape(len(x), -1)[:, ::2],
    "every second row": lambda x: torch.stack([x, x + 1], 1).reshape(-1, x.shape[1])[::2],
    "columns of a wider tensor": lambda x: torch.nn.functional.pad(x, (3, 5), value=7)[:, 3:-5],
    "at an odd offset": lambda x: torch.cat([x.new_ones(1), x.flatten()])[1:].view(x.shape),
    "backwards in memory": lambda x: x.flip(0).contiguous().flip(0),
    "batches swapped": lambda x: x.reshape(2, -1, x.shape[1]).transpose(0, 1).contiguous().transpose(0, 1),
}
FORMATS = [
    kc.KCP((4, 6), (2, 3), 2, 2, 2),
    kc.TT((4, 6), (2, 3), 2),
    kc.LowRank((24,), (6,), 3),
    kc.HT((4, 6), (2, 3), 2),
]


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.uint8])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.kind)
def test_x_may_lie_in_memory_in_any_way(fmt: kc.Format, dtype: torch.dtype) -> None:
    factors = leaves_of(fmt, 2)
    plain = torch.randint(0, 256, (6, fmt.M), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    exact = plain.double() / 255
    expected = dense_product(fmt, exact, factors, 2, False)
    want = [expected.detach(), *torch.autograd.grad(expected.square().sum(), [*factors.values()])]
    own = torch.float32 if dtype == torch.float32 else F64
    leaves = {name: tensor.detach().to(own).requires_grad_() for name, tensor in factors.items()}
    given = plain if dtype == torch.uint8 else exact.to(dtype)
    for name, change in STRIDES.items():
        x = change(given)
        assert torch.equal(x.reshape(given.shape), given)
        for order, plan in every_plan(fmt, 6, 2).items():
            y = execute(plan, x, leaves).reshape(expected.shape)
            got = [y.detach(), *torch.autograd.grad(y.square().sum(), [*leaves.values()])]
            assert_same(got, want, f"{name}, {order}", 1e-5 if own == torch.float32 else 1e-12)


def test_a_row_repeated_in_memory_is_read_and_its_gradients_add_up() -> None:
    fmt = FORMATS[0]
    factors = leaves_of(fmt)
    row = torch.randn(1, fmt.M, dtype=F64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    leaves = [row, *factors.values()]
    want = derivatives(lambda: dense_product(fmt, row.repeat(5, 1), factors, 1, False), leaves)
    for name, plan in every_plan(fmt, 5).items():
        got = derivatives(lambda plan=plan: execute(plan, row.expand(5, -1), factors), leaves)
        assert_same(got, want, name)


def test_gradients_that_lie_oddly_in_memory_are_read_as_they_are() -> None:
    """An expanded one, as sum() gives, one of a slice, a transposed one, and none at all."""
    fmt = FORMATS[0]
    factors = leaves_of(fmt, 2)
    x = torch.randn(4, fmt.M, dtype=F64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    leaves = [x, *factors.values()]
    ends: list[Callable[[Tensor], Tensor]] = [
        lambda y: y.sum(),
        lambda y: y[:, 3:7].square().sum(),
        lambda y: (y.t().contiguous() ** 3).sum(),
        lambda y: y[1:3].sum() + y[0, 0] ** 2,
        lambda y: 0 * y.sum(),
    ]
    for end in ends:
        want = torch.autograd.grad(end(dense_product(fmt, x, factors, 2, False)), leaves)
        for name, plan in every_plan(fmt, 4, 2).items():
            assert_same(torch.autograd.grad(end(execute(plan, x, factors)), leaves), want, name)


def test_operands_may_lie_in_memory_in_any_way() -> None:
    """Those of a frozen layer may come from a file, a flat buffer or another device."""
    fmt = FORMATS[0]
    factors = leaves_of(fmt, 2)
    x = torch.randn(4, fmt.M, dtype=F64, generator=torch.Generator().manual_seed(1))
    expected = dense_product(fmt, x, factors, 2, False).detach()
    for name, plan in every_plan(fmt, 4, 2).items():
        with torch.no_grad():
            operands = prepare(plan.text, factors)
            moved = [operand.mT.contiguous().mT for operand in operands]
            spaced = [torch.stack([operand, operand + 1], -1)[..., 0] for operand in operands]
            assert_same([apply(plan.text, x, moved), apply(plan.text, x, spaced)], [expected] * 2, name)
