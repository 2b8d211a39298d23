"""Laws of kronecell::quantized_linear, quantized_lstm and quantized_gru: the integers in float64 are the oracle."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from kronecell.errors import KronecellError
from kronecell.ops.kernels import register_width
from kronecell.ops.quantized import BITS, pack, quantized_gru, quantized_linear, quantized_lstm, unpack
from tests.ops import recurrence_cases
from tests.ops.quantized_cases import Case, Matrix, cases, draw

KERNELS = pytest.mark.skipif(not register_width(), reason="no kernels are built")
EACH = 8 * torch.finfo(torch.float32).eps  # of the sum of the sizes of what is added up
ROWS = (0, 1, 2, 5, 13, 99)
SOME = [Case(33, 70, bits, group) for bits in BITS for group in (0, 16, 7)]


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_right(got: Tensor, x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> None:
    plus = torch.zeros(len(matrix.weights)) if bias is None else bias
    want = x.double() @ matrix.weights.T + plus.double()
    size = x.double().abs() @ matrix.weights.abs().T + plus.double().abs()
    assert got.dtype == torch.float32 and got.shape == want.shape
    assert torch.all((got.double() - want).abs() <= EACH * size)


def test_integers_are_packed_and_unpacked_whatever_the_columns() -> None:
    for bits in BITS:
        for columns in range(100):
            half = 2 ** (bits - 1)
            numbers = torch.randint(-half, half, (3, columns), dtype=torch.int8)
            stored = pack(numbers, bits)
            assert stored.shape[1] == (columns if bits == 8 else -(-columns // 8) * bits)
            assert torch.equal(unpack(stored, bits, columns), numbers)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_values(case: Case) -> None:
    matrix, bias = draw(case), normal(case.rows)
    for rows in ROWS:
        x = normal(rows, case.columns)
        for plus in (None, bias):
            assert_right(
                quantized_linear(x, matrix.stored, matrix.scales, plus, case.bits, case.group), x, matrix, plus
            )


@pytest.mark.parametrize("case", SOME, ids=str)
def test_numbers_of_any_size_are_multiplied_as_floats_are(case: Case) -> None:
    """Also one that is much larger than the others, where it meets a zero: the others must not vanish beside it."""
    matrix = draw(case)
    for size in (1e-40, 1e-30, 1e-3, 1e5, 1e30):
        x = size * normal(3, case.columns)
        got = quantized_linear(x, matrix.stored, matrix.scales, None, case.bits, case.group)
        want = x.double() @ matrix.weights.T
        assert (got.double() - want).abs().max() <= 1e-6 * want.abs().max() + 1e-43
    numbers = unpack(matrix.stored, case.bits, case.columns).clone()
    numbers[:, 3] = 0
    weights = matrix.weights.clone()
    weights[:, 3] = 0
    for outlier in (1e4, 1e8, 1e30):
        x = 1 + normal(2, case.columns).abs()
        x[:, 3] = outlier
        got = quantized_linear(x, pack(numbers, case.bits), matrix.scales, None, case.bits, case.group)
        assert_right(got, x, Matrix(matrix.stored, matrix.scales, weights))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("case", SOME, ids=str)
def test_what_is_not_finite_stays_so_in_its_row_alone(case: Case, number: float) -> None:
    matrix = draw(case)
    x = normal(5, case.columns)
    right = quantized_linear(x, matrix.stored, matrix.scales, None, case.bits, case.group)
    for place in (0, case.columns // 2, case.columns - 1):
        wrong = x.clone()
        wrong[2, place] = number
        got = quantized_linear(wrong, matrix.stored, matrix.scales, None, case.bits, case.group)
        assert not got[2].isfinite().any()
        keep = [0, 1, 3, 4]
        assert torch.equal(got[keep], right[keep])


@KERNELS
@pytest.mark.parametrize("case", [*SOME, *(Case(40, 128, bits, 0) for bits in BITS)], ids=str)
def test_a_row_has_the_same_bits_alone_among_others_and_on_any_number_of_threads(case: Case) -> None:
    matrix, x = draw(case), normal(100, case.columns)
    x[::7] *= 1e-20
    x[::11, 5] = 1e9

    def run(part: Tensor) -> Tensor:
        return quantized_linear(part, matrix.stored, matrix.scales, None, case.bits, case.group)

    whole = run(x)
    for rows in (slice(0, 1), slice(7, 9), slice(22, 23), slice(3, 100)):
        assert torch.equal(run(x[rows]), whole[rows])
    torch.set_num_threads(2)
    try:
        assert torch.equal(run(x.repeat(40, 1)), whole.repeat(40, 1))
    finally:
        torch.set_num_threads(1)


def test_inputs_lie_anywhere() -> None:
    for case in SOME:
        matrix, x = draw(case), normal(6, case.columns)
        want = quantized_linear(x, matrix.stored, matrix.scales, None, case.bits, case.group)
        apart = torch.full((6, 2 * case.columns + 3), 7.0)[:, 3::2]
        apart.copy_(x)
        stored = matrix.stored.T.contiguous().T
        scales = matrix.scales.T.contiguous().T
        assert torch.equal(quantized_linear(apart, stored, scales, None, case.bits, case.group), want)
        deep = x.reshape(2, 3, case.columns)
        assert torch.equal(quantized_linear(deep, stored, scales, None, case.bits, case.group).flatten(0, 1), want)
        assert torch.equal(quantized_linear(x[0], stored, scales, None, case.bits, case.group), want[0])


@pytest.mark.parametrize("bits", BITS)
def test_empty_ones(bits: int) -> None:
    for rows, columns in ((0, 8), (8, 0), (0, 0)):
        matrix = draw(Case(rows, columns, bits, 0))
        got = quantized_linear(normal(3, columns), matrix.stored, matrix.scales, None, bits, 0)
        assert torch.equal(got, torch.zeros(3, rows))


BAD: dict[str, dict[str, Any]] = {
    "two bits": {"bits": 2},
    "nine bits": {"bits": 9},
    "no bits": {"bits": -1},
    "bits beyond": {"bits": 2**40},
    "a negative group": {"group": -1},
    "the least group": {"group": -(2**63)},
    "more groups than scales": {"group": 8},
    "short rows": {"weight": torch.zeros(6, 29, dtype=torch.uint8)},
    "long rows": {"weight": torch.zeros(6, 31, dtype=torch.uint8)},
    "fewer rows": {"weight": torch.zeros(5, 30, dtype=torch.uint8)},
    "one dimension": {"weight": torch.zeros(180, dtype=torch.uint8)},
    "integers of 64 bits": {"weight": torch.zeros(6, 30, dtype=torch.int64)},
    "floats": {"weight": torch.zeros(6, 30)},
    "other scales": {"scales": torch.ones(7, 1)},
    "flat scales": {"scales": torch.ones(6)},
    "no scales": {"scales": torch.ones(6, 0)},
    "a wide input": {"x": torch.ones(2, 50)},
    "a scalar": {"x": torch.ones(())},
    "a short bias": {"bias": torch.ones(5)},
}


@pytest.mark.parametrize("name", [*BAD])
def test_what_does_not_fit_is_an_error(name: str) -> None:
    good = {"x": torch.ones(2, 48), "weight": torch.zeros(6, 30, dtype=torch.uint8), "scales": torch.ones(6, 1)}
    good |= {"bias": torch.ones(6), "bits": 5, "group": 0}  # type: ignore[dict-item]
    quantized_linear(*good.values())
    with pytest.raises((RuntimeError, KronecellError, IndexError)):
        quantized_linear(*(good | BAD[name]).values())


def recurrences() -> list[recurrence_cases.Case]:
    plain = recurrence_cases.LAYOUTS
    found = []
    for place, layout in enumerate(plain):
        for cell in ("lstm", "gru"):
            fields = {**vars(layout), "cell": cell, "reverse": bool(place % 2)}
            found.append(recurrence_cases.Case(**fields))
        found.append(recurrence_cases.Case(**{**vars(layout), "projection": max(1, layout.hidden // 3)}))
    return found


def integers_of(inputs: recurrence_cases.Inputs, bits: int, group: int) -> Matrix:
    """U as integers, in place of the drawn one."""
    rows, columns = inputs.hidden[0].shape
    matrix = draw(Case(rows, columns, bits, group), scale=2.0**-bits)
    inputs.hidden = [matrix.weights]
    return matrix


def recurred(inputs: recurrence_cases.Inputs, matrix: Matrix, bits: int, group: int) -> tuple[Tensor, ...]:
    U, last = (matrix.stored, matrix.scales, bits, group), (inputs.batch_sizes, inputs.case.reverse)
    if inputs.case.cell == "lstm":
        return quantized_lstm(inputs.gates, *U, inputs.h, inputs.c, inputs.project, *last)
    return quantized_gru(inputs.gates, *U, inputs.bias_n, inputs.h, *last)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("case", recurrences(), ids=str)
def test_recurrences_are_those_of_torch_over_the_same_numbers(case: recurrence_cases.Case, bits: int) -> None:
    for group in (0, 16):
        inputs = recurrence_cases.draw(case)
        matrix = integers_of(inputs, bits, group)
        want = recurrence_cases.oracle(inputs.to(torch.float64, grad=False))
        for got, right in zip(recurred(inputs, matrix, bits, group), want, strict=True):
            assert got.shape == right.shape
            assert (got.double() - right).abs().max() <= 4e-6 * max(right.abs().max().item(), 0.1)


@KERNELS
@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("bits", BITS)
def test_recurrences_refuse_what_does_not_fit(cell: str, bits: int) -> None:
    inputs = recurrence_cases.draw(recurrence_cases.Case(cell, steps=3, batch=4, hidden=40))
    matrix = integers_of(inputs, bits, 0)
    recurred(inputs, matrix, bits, 0)
    wrong = [
        (Matrix(matrix.stored[1:], matrix.scales[1:], matrix.weights), bits, 0),
        (Matrix(matrix.stored[:, 1:], matrix.scales, matrix.weights), bits, 0),
        (matrix, bits, 16),
        (matrix, bits - 1 if bits > 3 else 4, 0),
        (matrix, 9, 0),
        (matrix, bits, -1),
    ]
    for other, number, group in wrong:
        with pytest.raises((RuntimeError, KronecellError)):
            recurred(inputs, other, number, group)


@pytest.mark.parametrize("bits", [3, 8])
def test_opcheck(bits: int) -> None:
    matrix = draw(Case(12, 40, bits, 0))
    x = normal(3, 40).requires_grad_()
    torch.library.opcheck(quantized_linear.kernel, (x, matrix.stored, matrix.scales, normal(12), bits, 0))


@KERNELS
@pytest.mark.skipif("KRONECELL_WIDTH" in os.environ, reason="runs the suite for the other widths itself")
@pytest.mark.parametrize("width", [width for width in (8, 4) if width < register_width()])
def test_every_narrower_width_obeys_the_same_laws(width: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", __file__, "-k", "not opcheck"],
        env={**os.environ, "KRONECELL_WIDTH": str(width)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
