"""The kernel for products of few columns: where it is used, and that it is a linear map."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kronecell.ops import compiled, narrow

F64 = torch.float64


@pytest.fixture(autouse=True)
def wide_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of one kind of processor, whatever this one is; the compiled kernels have tests of their own."""
    monkeypatch.setattr(compiled, "library", None)
    monkeypatch.setattr(narrow, "LANES", 16)
    monkeypatch.setattr(narrow, "COLUMNS", 64)
    monkeypatch.setattr(narrow, "ELEMENTS", 2**21)


@pytest.mark.parametrize(
    ("lanes", "columns", "depth", "elements", "expected"),
    [
        (16, 64, 128, 2**21, True),
        (16, 65, 128, 2**21, False),
        (16, 1, 128, 2**21, False),
        (16, 16, 127, 2**21, False),
        (16, 16, 128, 2**21 - 1, False),
        (8, 64, 8, 2**20, True),
        (8, 65, 8, 2**20, False),
        (8, 9, 7, 2**20, False),
        (8, 9, 8, 2**20 - 1, False),
        (8, 8, 1024, 2**18, True),
        (8, 8, 1024, 2**18 - 1, False),
        (8, 4, 64, 2**18, True),
        (8, 4, 65, 2**21, False),
        (8, 1, 64, 2**21, False),
        (4, 16, 128, 2**21, False),
    ],
)
def test_the_limits_are_those_that_were_measured(
    monkeypatch: pytest.MonkeyPatch, lanes: int, columns: int, depth: int, elements: int, expected: bool
) -> None:
    monkeypatch.setattr(narrow, "LANES", lanes)
    monkeypatch.setattr(narrow, "COLUMNS", narrow.MOST_COLUMNS.get(lanes, 16))
    monkeypatch.setattr(narrow, "ELEMENTS", narrow.LEAST_ELEMENTS.get(lanes, 2**20))
    assert narrow.onednn_faster(elements, depth, columns) is expected


@pytest.mark.parametrize("columns", [2, 5, 16])
def test_the_narrow_kernel_is_a_linear_map(columns: int) -> None:
    x, weight = torch.randn(1024 * 16, 128), torch.randn(columns, 128)
    assert narrow.kernel(x, weight) == "oneDNN"
    torch.testing.assert_close(narrow.narrow(x, weight).double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)


NOT_NARROW = {
    "x turned": (torch.zeros(128, 2**14).t(), torch.zeros(4, 128)),
    "W turned": (torch.zeros(2**14, 128), torch.zeros(128, 4).t()),
    "one column": (torch.zeros(2**14, 128), torch.zeros(1, 128)),
    "many columns": (torch.zeros(2**14, 128), torch.zeros(65, 128)),
    "short sums": (torch.zeros(2**17, 16), torch.zeros(4, 16)),
    "little x": (torch.zeros(64, 128), torch.zeros(4, 128)),
    "doubles": (torch.zeros(2**14, 128, dtype=F64), torch.zeros(4, 128, dtype=F64)),
    "gradient of x": (torch.zeros(2**14, 128, requires_grad=True), torch.zeros(4, 128)),
    "gradient of W": (torch.zeros(2**14, 128), torch.zeros(4, 128, requires_grad=True)),
    "no data": (torch.zeros(2**14, 128, device="meta"), torch.zeros(4, 128, device="meta")),
}


@pytest.mark.parametrize("case", NOT_NARROW)
def test_everything_else_takes_the_ordinary_kernel(case: str) -> None:
    x, weight = NOT_NARROW[case]
    assert narrow.kernel(x, weight) == "BLAS"
    assert narrow.narrow(x, weight).shape == (len(x), len(weight))


def test_without_onednn_the_ordinary_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(2**14, 128), torch.randn(4, 128)
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        assert narrow.kernel(x, weight) == "BLAS"
    monkeypatch.setattr(narrow, "_kernel", None)
    torch.testing.assert_close(narrow.narrow(x, weight), F.linear(x, weight))
