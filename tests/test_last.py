"""The last product by its kernel: what it computes, where it is used, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kronecell as kc
from kronecell import compiled, last
from kronecell.processor import LANES
from tests.test_compiled import EPS, PAPER, built, counted, operand, used


def in_doubles(a: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.einsum("grk,gkn->rgn", a.double(), w.double()).flatten(1)
    return y if bias is None else y + bias.double()


@built
@used
@settings(max_examples=100)
@given(
    groups=st.integers(1, 5),
    rows=st.integers(last.LEAST_ROWS, 30),
    depth=st.integers(1, last.MOST_DEPTH),
    registers=st.integers(1, 5),
    order=st.sampled_from(["rgk", "grk", "a part"]),
    biased=st.booleans(),
    threads=st.sampled_from([1, 2]),
)
def test_the_kernel_is_a_product_for_every_group(
    groups: int, rows: int, depth: int, registers: int, order: str, biased: bool, threads: int
) -> None:
    columns = registers * LANES
    x = operand(groups * rows, depth, False)
    a = x.view(rows, groups, depth).transpose(0, 1) if order == "rgk" else x.view(groups, rows, depth)
    if order == "a part":
        a = operand(groups * (rows + 1), depth + 3, False).view(groups, rows + 1, depth + 3)[:, 1:, :depth]
    w = operand(groups * depth, columns, False, 1).view(groups, depth, columns)
    bias = operand(1, groups * columns, False, 2)[0] if biased else None
    assert last.suits(a, w, bias)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = last.product(a, w, bias)
    finally:
        torch.set_num_threads(before)
    most = in_doubles(a.abs(), w.abs(), None if bias is None else bias.abs())
    assert bool(((y - in_doubles(a, w, bias)).abs() <= (depth + 1) * EPS * most).all())
    for row in (0, rows // 2, rows - 1):  # the same bits alone and among others
        four = a[:, [row] * 4]
        assert torch.equal(last.product(four.contiguous(), w, bias)[0], y[row])


@built
@used
def test_threads_divide_the_rows_and_leave_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last, "WORTH_A_THREAD", 1)
    a, w = operand(4 * 31, 16, False).view(4, 31, 16), operand(64, 256, False, 1).view(4, 16, 256)
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(last.product(a, w, None))
    torch.set_num_threads(before)
    assert all(torch.equal(y, found[0]) for y in found)


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
    with counted(monkeypatch, ("last_product",)) as calls, torch.set_grad_enabled(learns):
        y = layer(x)
    assert calls == ["last_product"]
    wanted = exact(x.double())
    torch.testing.assert_close(y.double(), wanted, rtol=0, atol=2e-5 * float(wanted.detach().abs().max()))


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
