"""The last product by its kernel: what it computes, where it is used, and that nothing else changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kronecell as kc
from kronecell.ops import compiled, last
from kronecell.ops.processor import LANES
from tests.test_compiled import EPS, PAPER, built, counted, operand, used


def in_doubles(a: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.einsum("grk,gkn->rgn", a.double(), w.double()).flatten(1)
    return y if bias is None else y + bias.double()


SIZES = {
    "groups": st.integers(1, 5),
    "rows": st.integers(last.LEAST_ROWS, 60),
    "depth": st.integers(1, last.MOST_DEPTH),
    "registers": st.integers(1, 5),
    "order": st.sampled_from(["rgk", "grk", "a part"]),
}


def operands(groups: int, rows: int, depth: int, registers: int, order: str) -> tuple[Tensor, Tensor]:
    """a (groups, rows, depth), however it lies, and w."""
    x = operand(groups * rows, depth, False)
    a = x.view(rows, groups, depth).transpose(0, 1) if order == "rgk" else x.view(groups, rows, depth)
    if order == "a part":
        a = operand(groups * (rows + 1), depth + 3, False).view(groups, rows + 1, depth + 3)[:, 1:, :depth]
    return a, operand(groups * depth, registers * LANES, False, 1).view(groups, depth, -1)


@built
@used
@settings(max_examples=100)
@given(**SIZES, biased=st.booleans())
def test_the_kernel_is_a_product_for_every_group(
    groups: int, rows: int, depth: int, registers: int, order: str, biased: bool
) -> None:
    a, w = operands(groups, rows, depth, registers, order)
    bias = operand(1, groups * w.shape[2], False, 2)[0] if biased else None
    assert last.suits(a, w, bias)
    y = last.product(a, w, bias)
    most = in_doubles(a.abs(), w.abs(), None if bias is None else bias.abs())
    assert bool(((y - in_doubles(a, w, bias)).abs() <= (depth + 1) * EPS * most).all())
    for row in (0, rows // 2, rows - 1):  # the same bits alone and among others
        four = a[:, [row] * 4]
        assert torch.equal(last.product(four.contiguous(), w, bias)[0], y[row])


@built
@used
@settings(max_examples=100)
@given(**SIZES, wanted=st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_its_gradients_are_those_of_the_product_added_to_what_is_there(
    groups: int, rows: int, depth: int, registers: int, order: str, wanted: tuple[bool, bool, bool]
) -> None:
    a, w = operands(groups, rows, depth, registers, order)
    up = operand(rows, groups * w.shape[2], False, 3)
    exact, absolute = ([t.double().requires_grad_() for t in tensors] for tensors in ((a, w), (a.abs(), w.abs())))
    bias = torch.zeros(up.shape[1], dtype=torch.float64, requires_grad=True)
    found = [torch.empty_strided(a.shape, a.stride()), torch.ones_like(w), torch.ones(up.shape[1])]
    last.gradients(a, w, up, *(tensor if flag else None for tensor, flag in zip(found, wanted, strict=True)))
    expected = torch.autograd.grad(in_doubles(*exact, bias), [*exact, bias], up.double())
    most = torch.autograd.grad(in_doubles(*absolute, bias), [*absolute, bias], up.double().abs())
    for i, (one, other, limit) in enumerate(zip(found, expected, most, strict=True)):
        if wanted[i]:
            added, terms = int(i > 0), max(rows, w.shape[2]) + 2
            assert bool(((one - (other + added)).abs() <= terms * EPS * (limit + added)).all())
        elif i:
            assert bool((one == 1).all())


@built
def test_no_memory_for_the_gradients_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "library", SimpleNamespace(last_gradients=lambda *arguments: 1))
    with pytest.raises(MemoryError, match="last product"):
        last.gradients(torch.ones(2, 8, 4), torch.ones(2, 4, 16), torch.ones(8, 32), None, None, None)


@built
@used
def test_threads_divide_rows_or_groups_and_leave_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last, "WORTH_A_THREAD", 1)
    a, w = operands(5, 31, 16, 32, "rgk")
    up = operand(31, 5 * w.shape[2], False, 3)
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        made = [last.product(a, w, None), torch.empty_like(a), torch.zeros_like(w), torch.zeros(up.shape[1])]
        last.gradients(a, w, up, *made[1:])
        found.append(made)
    torch.set_num_threads(before)
    for made in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(made, found[0], strict=True))


@built
@used
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("learns", [False, True])
def test_a_layer_uses_it_and_agrees_with_double_precision(
    monkeypatch: pytest.MonkeyPatch, shared: bool, bias: bool, learns: bool
) -> None:
    torch.manual_seed(0)
    layer = kc.TensorLinear(PAPER, gates=4, shared=shared, bias=bias).train(learns)
    exact = kc.TensorLinear(PAPER, gates=4, shared=shared, bias=bias).double()
    exact.load_state_dict(layer.state_dict())
    x = operand(96, PAPER.M, False)
    with counted(monkeypatch, ("last_product", "last_gradients")) as calls, torch.set_grad_enabled(learns):
        y = layer(x)
        gradients = torch.autograd.grad(y.square().sum(), [*layer.parameters()]) if learns else ()
    assert calls == ["last_product", "last_gradients"][: 1 + learns]
    wanted = exact(x.double())
    torch.testing.assert_close(y.double(), wanted, rtol=0, atol=2e-5 * float(wanted.detach().abs().max()))
    exactly = torch.autograd.grad(wanted.square().sum(), [*exact.parameters()]) if learns else ()
    for one, other in zip(gradients, exactly, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=2e-5 * float(other.abs().max()))


@built
@used
@pytest.mark.parametrize(
    ("why", "a", "w"),
    [
        ("doubles", torch.ones(2, 8, 4, dtype=torch.float64), torch.ones(2, 4, 16, dtype=torch.float64)),
        ("long sums", torch.ones(2, 8, last.MOST_DEPTH + 1), torch.ones(2, last.MOST_DEPTH + 1, 16)),
        ("few rows", torch.ones(2, last.LEAST_ROWS - 1, 4), torch.ones(2, 4, 16)),
        ("part of a register", torch.ones(2, 8, 4), torch.ones(2, 4, LANES + 1)),
        ("sums along columns", torch.ones(2, 4, 8).mT, torch.ones(2, 4, 16)),
        ("w turned", torch.ones(2, 8, 4), torch.ones(2, 16, 4).mT),
        ("no numbers", torch.ones(2, 8, 4, device="meta"), torch.ones(2, 4, 16, device="meta")),
        ("a subclass", torch.ones(2, 8, 4), torch.ones(2, 4, 16).as_subclass(type("Own", (Tensor,), {}))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_kernel_cannot_read_is_left_to_torch(why: str, a: Tensor, w: Tensor) -> None:
    assert not last.suits(a, w, None)


def test_without_the_kernels_torch_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "library", None)
    assert not last.suits(torch.ones(2, 8, 4), torch.ones(2, 4, 16), None)
