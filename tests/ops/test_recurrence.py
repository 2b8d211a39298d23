"""Laws of kronecell::lstm and kronecell::gru, for every form of U; torch.nn in float64 is the oracle."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kronecell.ops.kernels import register_width
from tests.ops.recurrence_cases import FORMS, SMALL, Case, Inputs, cases, draw, oracle

CELLS = ("lstm", "gru")
# Sums of torch depend on where rows lie and on how many there are; preconditions are checked by the kernels.
KERNELS = pytest.mark.skipif(not register_width(), reason="no kernels are built")


def assert_close(got: Tensor, want: Tensor, tolerance: float = 4e-6) -> None:
    """To a few units in the last place of the largest number."""
    assert got.shape == want.shape
    if want.numel():
        assert (got.double() - want).abs().max() <= tolerance * max(want.abs().max().item(), 0.1)


def gradients(inputs: Inputs, run: Callable[[Inputs], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], Any]:
    results = run(inputs)
    return results, torch.autograd.grad(inputs.loss(results), inputs.tensors)


def run(inputs: Inputs) -> tuple[Tensor, ...]:
    return inputs.run()


@pytest.mark.parametrize("case", cases(), ids=str)
def test_values_and_gradients_are_those_of_torch(case: Case) -> None:
    inputs = draw(case)
    got, got_gradients = gradients(inputs.to(torch.float32), run)
    want, want_gradients = gradients(inputs.to(torch.float64), oracle)
    for a, b in zip((*got, *got_gradients), (*want, *want_gradients), strict=True):
        assert a.dtype == torch.float32
        assert_close(a, b)


@pytest.mark.parametrize("case", cases()[:45], ids=str)
def test_float64_is_exact(case: Case) -> None:
    inputs = draw(case).to(torch.float64)
    got, got_gradients = gradients(inputs, run)
    want, want_gradients = gradients(inputs, oracle)
    for a, b in zip((*got, *got_gradients), (*want, *want_gradients), strict=True):
        assert_close(a, b, 1e-13)


@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("keep", [True, False])
def test_second_gradients(case: Case, keep: bool) -> None:
    def second(inputs: Inputs, run: Callable[[Inputs], tuple[Tensor, ...]]) -> Any:
        results = run(inputs)
        first = torch.autograd.grad(inputs.loss(results), inputs.tensors, create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in first), inputs.tensors)

    inputs = draw(case)
    want = second(inputs.to(torch.float64), oracle)
    for a, b in zip(second(inputs.to(torch.float64), lambda given: given.run(keep)), want, strict=True):
        assert_close(a, b, 1e-12)
    for a, b in zip(second(inputs.to(torch.float32), lambda given: given.run(keep)), want, strict=True):
        assert_close(a, b, 2e-5)


@KERNELS
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("hidden", [33, 300])
def test_a_row_has_the_same_bits_alone_and_among_others(cell: str, form: str, steps: int, hidden: int) -> None:
    inputs = draw(Case(cell, form, steps, 40, hidden, 7)).to(torch.float32)
    whole, (of_gates, *_) = gradients(inputs, run)
    for rows in (slice(0, 1), slice(7, 9), slice(3, 6), slice(0, 13), slice(39, 40)):
        part = replace(
            inputs,
            gates=inputs.gates[:, rows].detach().requires_grad_(),
            h=inputs.h[rows].detach().requires_grad_(),
            c=None if inputs.c is None else inputs.c[rows].detach().requires_grad_(),
            upstream=[inputs.upstream[0][:, rows], *(part[rows] for part in inputs.upstream[1:])],
        )
        alone, (of_gates_alone, *_) = gradients(part, run)
        assert torch.equal(alone[0], whole[0][:, rows])
        assert all(torch.equal(a, b[rows]) for a, b in zip(alone[1:], whole[1:], strict=True))
        assert torch.equal(of_gates_alone, of_gates[:, rows])


@KERNELS
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("form", FORMS[1:])
def test_steps_one_by_one_have_the_bits_of_a_sequence(cell: str, form: str) -> None:
    inputs = draw(Case(cell, form, 9, 3, 50, 6)).to(torch.float32, grad=False)
    whole = inputs.run(keep=False)
    for t in range(9):
        step = replace(inputs, gates=inputs.gates[t : t + 1]).run(keep=False)
        assert torch.equal(step[0][0], whole[0][t])
        inputs.h, inputs.c = step[1], step[2] if cell == "lstm" else None
    assert all(torch.equal(a, b) for a, b in zip(step[1:], whole[1:], strict=True))


@KERNELS
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("form", FORMS)
def test_threads_leave_the_bits(cell: str, form: str) -> None:
    inputs = draw(Case(cell, form, 8, 64, 64, 48)).to(torch.float32)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            results, (of_gates, *_) = gradients(inputs, run)
        finally:
            torch.set_num_threads(1)
        found.append((*results, of_gates))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@KERNELS
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("form", FORMS)
def test_tensors_may_lie_anywhere(cell: str, form: str) -> None:
    inputs = draw(Case(cell, form, 4, 3, 20, 5)).to(torch.float32, grad=False)
    want = inputs.run()

    def elsewhere(tensor: Tensor) -> Tensor:
        """The same numbers with an offset, every second of a larger tensor."""
        larger = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1)
        return larger[..., 1::2].copy_(tensor)

    batch_first = inputs.gates.transpose(0, 1).contiguous().transpose(0, 1)
    for gates in (batch_first, elsewhere(inputs.gates), inputs.gates.repeat(2, 1, 2)[4:, :, : inputs.gates.shape[2]]):
        got = replace(
            inputs,
            gates=gates,
            hidden=[elsewhere(part) if part.is_floating_point() else part for part in inputs.hidden],
            h=elsewhere(inputs.h),
            c=None if inputs.c is None else inputs.c.t().contiguous().t(),
            bias_n=None if inputs.bias_n is None else elsewhere(inputs.bias_n),
        ).run()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("steps", "batch"), [(0, 2), (3, 0), (0, 0)])
def test_nothing_to_do(cell: str, form: str, steps: int, batch: int) -> None:
    inputs = draw(Case(cell, form, steps, batch)).to(torch.float32)
    results, found = gradients(inputs, run)
    assert results[0].shape == (steps, batch, 5)
    assert torch.equal(results[1], inputs.h)
    assert [gradient.shape for gradient in found] == [tensor.shape for tensor in inputs.tensors]
    assert all(not gradient.any() for gradient in found[1 : 1 + len(inputs.weights)])


@KERNELS
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 1e30, -1e30, -95.0])
def test_numbers_that_are_not_finite_pass_as_in_torch(cell: str, value: float) -> None:
    inputs = draw(Case(cell, "dense", 3, 4, 20)).to(torch.float32, grad=False)
    clean = inputs.run()
    for column in range(0, inputs.gates.shape[2], 7):
        gates = inputs.gates.clone()
        gates[1, 2, column] = value
        given = replace(inputs, gates=gates)
        want = given.to(torch.float64, grad=False).run()  # operations of torch; the oracle multiplies infinity by zero
        for a, b, c in zip(given.run(), want, clean, strict=True):
            torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-6, equal_nan=True)
            others = [0, 1, 3]
            assert torch.equal(a[..., others, :], c[..., others, :])


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("result", [0, 1])
@pytest.mark.parametrize("keep", [True, False])
def test_gradients_of_one_result_alone(cell: str, result: int, keep: bool) -> None:
    inputs = draw(Case(cell, "split", 3, 2, 20))
    double, single = inputs.to(torch.float64), inputs.to(torch.float32)
    got = torch.autograd.grad(single.run(keep)[result].square().sum(), single.tensors)
    want = torch.autograd.grad(oracle(double)[result].square().sum(), double.tensors)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


def test_without_keep_there_is_nothing_to_keep() -> None:
    inputs = draw(Case("lstm")).to(torch.float32, grad=False)
    *results, active, cells = torch.ops.kronecell.lstm(*inputs.arguments(False))
    kept, other = torch.ops.kronecell.lstm(*inputs.arguments(True)), torch.ops.kronecell.gru
    assert all(torch.equal(a, b) for a, b in zip(results, kept[:3], strict=True))
    assert active.shape == cells.shape == (0,)
    assert kept[3].shape == (3, 2, 20)
    assert other(*draw(Case("gru")).arguments(False))[2].shape == (0,)


WRONG: list[tuple[str, str, Callable[[Inputs], Any], str]] = [
    ("lstm", "gates", lambda i: i.gates[..., :-1], "columns"),
    ("lstm", "gates", lambda i: i.gates[0], "dimensions"),
    ("lstm", "gates", lambda i: i.gates[:, :1], "gates of shape"),
    ("lstm", "h", lambda i: i.h[:, :-1], "h of shape"),
    ("lstm", "c", lambda i: i.c[:-1], "c of shape"),
    ("lstm", "hidden", lambda i: [], "U"),
    ("lstm", "hidden", lambda i: [i.hidden[0][1:]], "U of shape"),
    ("lstm", "hidden", lambda i: [i.hidden[0][:3], i.hidden[0].t()[:2].contiguous()], "In of shape"),
    ("lstm", "hidden", lambda i: [i.hidden[0][:8], torch.zeros(3, 2, 5)], "Out of shape"),
    ("lstm", "project", lambda i: torch.zeros(2, 5), "project of shape"),
    ("gru", "bias_n", lambda i: torch.zeros(4), "bias_n of shape"),
    ("gru", "hidden", lambda i: [i.hidden[0].flatten()], "U of shape"),
    ("gru", "gates", lambda i: torch.cat([i.gates] * 2, -1), "columns"),
]


@KERNELS
@pytest.mark.parametrize(("cell", "name", "wrong", "text"), WRONG)
def test_what_does_not_fit_is_an_error(cell: str, name: str, wrong: Callable[[Inputs], Any], text: str) -> None:
    inputs = draw(Case(cell)).to(torch.float32, grad=False)
    with pytest.raises(RuntimeError, match=text):
        replace(inputs, **{name: wrong(inputs)}).run()


@KERNELS
@pytest.mark.parametrize("sizes", [[3, 2], [3, 2, 2], [2, 3, 1], [3, 3, 0], [2, 2, 2], [3, 2, -1, 2]])
def test_batch_sizes_that_do_not_fit_are_an_error(sizes: list[int]) -> None:
    inputs = draw(Case("gru", lengths=(3, 2, 1))).to(torch.float32, grad=False)
    with pytest.raises(RuntimeError, match="batch_sizes"):
        replace(inputs, batch_sizes=torch.tensor(sizes)).run()
    with pytest.raises(RuntimeError, match="int64"):
        replace(inputs, batch_sizes=torch.tensor([3.0, 2.0, 1.0])).run()


@pytest.mark.parametrize("case", [SMALL[0], SMALL[2], SMALL[7], SMALL[13], SMALL[9]], ids=str)
def test_opcheck(case: Case) -> None:
    inputs = draw(case).to(torch.float32)
    operator, back = getattr(torch.ops.kronecell, case.cell), getattr(torch.ops.kronecell, case.cell + "_backward")
    for keep in (True, False):
        torch.library.opcheck(operator, inputs.arguments(keep))
    inputs = inputs.to(torch.float32, grad=False)
    output, *rest = operator(*inputs.arguments(True))
    kept = rest[2:] if case.cell == "lstm" else rest[1:]
    given = [*inputs.upstream, *([None] * len(kept))]
    torch.library.opcheck(back, (*given, *inputs.arguments()[1:-1], output, *kept, True))
    torch.library.opcheck(back, (*given, *inputs.arguments()[1:-1], output, *kept, False))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own rules of forward mode use torch.jit.script
@pytest.mark.parametrize("cell", CELLS)
def test_functorch_and_forward_mode(cell: str) -> None:
    inputs = draw(Case(cell, "split", 3, 2, 5)).to(torch.float64, grad=False)

    def output(gates: Tensor) -> Tensor:
        return replace(inputs, gates=gates).run()[0]

    many = torch.randn(4, *inputs.gates.shape, dtype=torch.float64)
    assert_close(torch.func.vmap(output)(many), torch.stack([output(gates) for gates in many]), 1e-14)
    tangent = torch.randn_like(inputs.gates)
    _, got = torch.func.jvp(output, (inputs.gates,), (tangent,))
    want = (output(inputs.gates + 1e-6 * tangent) - output(inputs.gates - 1e-6 * tangent)) / 2e-6
    assert_close(got, want, 1e-8)


@pytest.mark.parametrize("width", [8, 4])
def test_every_register_width(width: int) -> None:
    if register_width() <= width:
        pytest.skip("no narrower registers than the ones that are tested already")
    names = "values and (33 or 300 or 70 or 131) or bits or finite"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", __file__, "-k", names],
        env={**os.environ, "KRONECELL_WIDTH": str(width)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
