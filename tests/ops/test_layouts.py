"""Layouts that leave x, and its gradient, where the next product wants it: products in parts, turned matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kronecell as kc
from kronecell.ops.candidates import Chunked, candidates
from kronecell.ops.operation import Op, View
from kronecell.ops.plan import Plan
from tests.cases import dense_product

F64 = torch.float64
GATES = 2

# A format whose plan for few rows and two gates has a step of that kind.
KINDS = {
    "in parts": (kc.Tucker((2, 8, 4, 4), (2, 2, 2, 2), 2), "optimal", 4),
    "turned": (kc.CP((2, 3, 4, 5), (2, 2, 2, 2), 3), "backward", 4),
    "turned, the small operand on the right": (kc.HT((2, 3, 4, 3), (2, 2, 2, 2), 2), "inorder", 1),
}


def is_of(kind: str, op: Op) -> bool:
    if kind == "in parts":
        return op.parts > 1
    return op.turned and op.swapped is (kind == "turned")


def made(kind: str) -> tuple[Plan, dict[str, Tensor], Tensor]:
    """The plan, and factors and x of doubles."""
    fmt, order, rows = KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    factors = {n: t.requires_grad_() for n, t in fmt.init(generator, dtype=F64, gates=GATES).items()}
    x = torch.randn(rows, fmt.M, dtype=F64, generator=generator, requires_grad=True)
    plan = fmt.plan(order, rows, gates=GATES)
    assert any(is_of(kind, op) for op in plan.program.hot)
    return plan, factors, x


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_is_the_dense_product_with_first_and_second_derivatives(kind: str, chunk: int | None) -> None:
    plan, factors, x = made(kind)
    y = plan.apply(x, plan.prepare(factors), None, chunk)
    torch.testing.assert_close(y, dense_product(KINDS[kind][0], x, factors, GATES, False), rtol=1e-12, atol=1e-13)

    def product(x: Tensor, *tensors: Tensor) -> Tensor:
        return plan.apply(x, plan.prepare(dict(zip(factors, tensors, strict=True))), None, chunk)

    assert torch.autograd.gradcheck(product, (x, *factors.values()), fast_mode=True)
    assert torch.autograd.gradgradcheck(product, (x, *factors.values()), fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_has_batches_of_gradients(kind: str) -> None:
    plan, factors, x = made(kind)
    fixed = {name: tensor.detach() for name, tensor in factors.items()}

    def product(x: Tensor) -> Tensor:
        return plan.execute(x, fixed)

    plain = torch.autograd.functional.jacobian(product, x)
    torch.testing.assert_close(torch.autograd.functional.jacobian(product, x, vectorize=True), plain)
    torch.testing.assert_close(torch.func.jacrev(product)(x), plain)


def test_what_the_next_product_sums_over_is_made_beside_what_it_sums_over_already() -> None:
    """The paper's layer in Tucker form: of the legs that the first product adds, n2 comes before r2."""
    plan = candidates(kc.Tucker((8, 20, 20, 18), (4, 4, 4, 4), 4), 128, GATES, True)["optimal/32"]
    assert isinstance(plan, Plan)
    first, second, *_ = plan.program.hot
    assert first.legs[-4:] == ("n2", "r2", "m3", "m4")
    assert not first.copied and not second.copied


@pytest.mark.parametrize("shared", [False, True])
def test_no_product_with_a_large_x_in_block_term_form_copies_it(shared: bool) -> None:
    plan = candidates(kc.BT((8, 20, 20, 18), (4, 4, 4, 4), 4, P=2), 128, 4, shared)["optimal/32 in chunks"]
    assert isinstance(plan, Chunked)
    first, second, *_ = plan.plan.program.hot
    assert first.parts == (2 if shared else 8) and not first.copied and not second.copied


@given(data=st.data())
def test_a_view_is_a_permutation_of_legs_and_can_be_undone(data: st.DataObject) -> None:
    legs = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    permutation = data.draw(st.permutations(range(len(legs))))
    moved = [legs[i] for i in permutation]
    cut, rows = (data.draw(st.integers(0, len(legs) - least)) for least in (0, 1))
    given_legs = tuple(-1 if i == rows else size for i, size in enumerate(legs))
    as_given = tuple(given_legs[i] for i in permutation)
    groups = data.draw(st.sampled_from([tuple(moved), as_given, (torch.Size(moved[:cut]).numel(), -1)]))
    tensor = torch.arange(torch.Size(legs).numel()).reshape(legs)
    view = View(given_legs, tuple(permutation), groups)
    assert torch.equal(view(tensor), tensor.permute(permutation).reshape(groups))
    assert torch.equal(view.undo(view(tensor)).reshape(legs), tensor)
