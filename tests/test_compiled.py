"""The compiled kernels: what they compute, in which memory, where they are used, and life without them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import kronecell as kc
from kronecell.ops import compiled, narrow

F64 = torch.float64
EPS = torch.finfo(torch.float32).eps
PAPER = kc.KCP((8, 20, 20, 18), (4, 4, 4, 4), 4, 4, 2)
ROWS = 20  # of the paper's layer: enough for the kernels to be used

KERNELS = ("few_columns", "column_sums", "few_columns_folded", "folded_gradients")

built = pytest.mark.skipif(compiled.library is None, reason="the compiled kernels are not built: no C compiler")
used = pytest.mark.skipif(narrow.LANES == 4, reason="the compiled kernels are not used on this kind of processor")


def operand(rows: int, depth: int, bytes_: bool, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if bytes_:
        return torch.randint(0, 256, (rows, depth), dtype=torch.uint8, generator=generator)
    return torch.randn(rows, depth, generator=generator)


def assert_rounded(result: Tensor, left: Tensor, right: Tensor) -> None:
    """result = left @ right, up to what sums of this length can lose."""
    exact, most = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    allowed = left.shape[1] * EPS * most
    assert bool(((result.double() - exact).abs() <= allowed).all())


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.skipif(os.environ.get("KRONECELL_COMPILED") == "0", reason="KRONECELL_COMPILED=0")
def test_where_there_is_a_compiler_the_kernels_are_built_from_the_source_at_hand() -> None:
    assert compiled.library is not None, "the installation goes on without kernels that do not compile: run make test"
    sources = [*(Path(__file__).parents[1] / "native").iterdir()]
    newest = max(sources, key=lambda path: path.stat().st_mtime)
    assert compiled.LIBRARY.stat().st_mtime >= newest.stat().st_mtime, f"older than {newest.name}: run make test"


SIZES = {"rows": st.integers(1, 70), "columns": st.integers(1, 40), "bytes_": st.booleans()}


@built
@settings(max_examples=150)
@given(depth=st.one_of(st.integers(1, 60), st.integers(100, 1100)), **SIZES)
def test_few_columns_is_a_product(rows: int, depth: int, columns: int, bytes_: bool) -> None:
    x, weight = operand(rows, depth, bytes_), operand(columns, depth, False, 1)
    assert_rounded(compiled.few_columns(x, weight), x, weight.t())


@built
@settings(max_examples=150)
@given(depth=st.integers(0, 300), **SIZES)
def test_column_sums_is_a_product_with_the_transposed(rows: int, depth: int, columns: int, bytes_: bool) -> None:
    x, gradient = operand(rows, compiled.LEAST_DEPTH + depth, bytes_), operand(rows, columns, False, 1)
    assert_rounded(compiled.column_sums(x, gradient), gradient.t(), x)
    total = torch.ones(columns, x.shape[1])
    assert compiled.column_sums(x, gradient, total) is total
    more = torch.cat([gradient, torch.ones(1, columns)]), torch.cat([x.float(), torch.ones(1, x.shape[1])])
    assert_rounded(total, more[0].t(), more[1])


@built
def test_results_are_float32_whatever_torch_makes_by_default() -> None:
    x, weight, gradient = operand(30, 100, True), operand(5, 100, False, 1), operand(30, 5, False, 2)
    try:
        torch.set_default_dtype(F64)
        with torch.device("meta"):
            product, sums = compiled.few_columns(x, weight), compiled.column_sums(x, gradient)
    finally:
        torch.set_default_dtype(torch.float32)
    assert product.dtype == sums.dtype == torch.float32
    assert_rounded(product, x, weight.t())
    assert_rounded(sums, gradient.t(), x)


@built
@pytest.mark.parametrize("bytes_", [False, True])
@pytest.mark.parametrize(
    "depth", [360, 361, 256, 512, 1024, 1280]
)  # multiples of 256 are copied before they are multiplied
@pytest.mark.parametrize("columns", [1, 4, 7, 16, 33])
def test_a_row_of_the_product_has_the_same_bits_alone_and_among_others(columns: int, depth: int, bytes_: bool) -> None:
    x, weight = operand(53, depth, bytes_), operand(columns, depth, False, 1)
    whole = compiled.few_columns(x, weight)
    assert_rounded(whole, x, weight.t())
    for i in range(len(x)):
        assert torch.equal(compiled.few_columns(x[i : i + 1], weight)[0], whole[i])


@built
@pytest.mark.parametrize("columns", [3, 8, 16, 21])
@pytest.mark.parametrize("depth", [18, 361, 362, 363])
def test_a_row_that_is_not_finite_spoils_no_other(columns: int, depth: int) -> None:
    x, weight = operand(31, depth, False), operand(columns, depth, False, 1)
    expected = compiled.few_columns(x, weight)
    x[7::8] = torch.inf
    product = compiled.few_columns(x, weight)
    finite = torch.ones(31, dtype=torch.bool)
    finite[7::8] = False
    assert torch.equal(product[finite], expected[finite]) and not product[~finite].isfinite().any()


@built
@pytest.mark.parametrize("columns", [4, 16])
def test_threads_divide_the_rows(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(compiled, "WORTH_A_THREAD", 1)
    x, weight, gradient = operand(61, 100, False), operand(columns, 100, False, 1), operand(61, columns, False, 2)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append((compiled.few_columns(x, weight), compiled.column_sums(x, gradient)))
            assert torch.equal(results[-1][1], compiled.column_sums(x, gradient))
    finally:
        torch.set_num_threads(threads)
    for product, sums in results:
        assert torch.equal(product, results[0][0])
        assert_rounded(sums, gradient.t(), x)


@built
@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(1, 24, 1), (13, 100, 3), (25, 361, 16), (70, 600, 21), (30, 768, 9)]
)
def test_nothing_is_read_or_written_beside_the_operands(rows: int, depth: int, columns: int) -> None:
    def within(tensor: Tensor) -> tuple[Tensor, Tensor]:
        """The tensor between walls of NaN."""
        memory = torch.full((tensor.numel() + 256,), torch.nan)
        inside = memory[128:-128].view(tensor.shape)
        return memory, inside.copy_(tensor)

    depth = max(depth, compiled.LEAST_DEPTH)
    _, x = within(operand(rows, depth, False))
    _, weight = within(operand(columns, depth, False, 1))
    _, gradient = within(operand(rows, columns, False, 2))
    for shape, call in (
        ((rows, columns), lambda to: compiled.few_columns(x, weight, to)),
        ((columns, depth), lambda to: compiled.column_sums(x, gradient, to)),
    ):
        memory, to = within(torch.zeros(shape))
        assert call(to) is to
        assert bool(to.isfinite().all())
        assert bool(memory[:128].isnan().all()) and bool(memory[-128:].isnan().all())


def test_no_memory_for_buffers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(**dict.fromkeys(KERNELS, lambda *arguments: 1))
    monkeypatch.setattr(compiled, "library", full)
    with pytest.raises(MemoryError, match="few columns"):
        compiled.few_columns(torch.ones(2, 3), torch.ones(1, 3))
    with pytest.raises(MemoryError, match="few columns"):
        compiled.column_sums(torch.ones(2, 3), torch.ones(2, 1))
    one, sizes = torch.ones(1, 1), (1, 1, 1, 1, 1)
    with pytest.raises(MemoryError, match="few columns"):
        compiled.few_columns_folded(one, one, one, None, one, None, sizes)
    with pytest.raises(MemoryError, match="few columns"):
        compiled.folded_gradients(one, one, one, one, one, sizes)


# Where they are used -------------------------------------------------------------------------------------------------


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, names: Sequence[str] = KERNELS) -> Iterator[list[str]]:
    """Those of the named kernels that are called, in order; the ones for products unless told."""
    calls: list[str] = []
    real = compiled.library

    def follow(name: str) -> object:
        def call(*arguments: object) -> object:
            calls.append(name)
            return getattr(real, name)(*arguments)

        return call

    with monkeypatch.context() as patch:
        functions = {name: follow(name) if name in names else getattr(real, name) for name in compiled.SIGNATURES}
        patch.setattr(compiled, "library", SimpleNamespace(**functions))
        yield calls


@built
@used
@pytest.mark.parametrize("bytes_", [False, True])
def test_a_layer_of_the_papers_size_uses_them_and_agrees_with_double_precision(
    monkeypatch: pytest.MonkeyPatch, bytes_: bool
) -> None:
    layer = kc.TensorLinear(PAPER, gates=4)
    x = operand(ROWS, PAPER.M, bytes_)
    with counted(monkeypatch) as calls:
        y = layer(x)
        gradients = torch.autograd.grad(y.square().sum(), [*layer.parameters()])
    assert calls == (["few_columns", "column_sums"] if bytes_ else ["few_columns_folded", "folded_gradients"])
    exact = kc.TensorLinear(PAPER, gates=4).double()
    exact.load_state_dict(layer.state_dict())
    expected = exact(x if bytes_ else x.double())
    wanted = torch.autograd.grad(expected.square().sum(), [*exact.parameters()])
    for got, want in zip((y, *gradients), (expected, *wanted), strict=True):
        assert (got - want).norm() <= 3e-6 * want.norm()
    with counted(monkeypatch) as calls, torch.no_grad():
        got = layer(x)
    assert calls == ["few_columns_folded"]
    assert (got - expected).norm() <= 3e-6 * expected.norm()


@built
@used
def test_second_derivatives_and_counters_of_operations_see_plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = kc.TensorLinear(PAPER, gates=4, order="separable")
    x = operand(ROWS, PAPER.M, False)
    with counted(monkeypatch) as calls, FlopCounterMode(display=False) as counter:
        layer(x)
    assert calls == []
    plan = PAPER.plan("separable", ROWS, gates=4)
    assert counter.get_total_flops() == 2 * (ROWS * 4 * 234_240 + plan.hoisted_macs)
    with counted(monkeypatch) as calls:
        first = torch.autograd.grad(layer(x).square().sum(), [*layer.parameters()], create_graph=True)
    assert calls == ["few_columns"]  # "separable" has gates of its own in every product, and nothing to fold
    assert all(gradient.requires_grad for gradient in first)


class Marked(Tensor):
    """A subclass, of which torch follows every operation."""


@built
@pytest.mark.parametrize(
    "strange",
    [lambda t: t.as_subclass(Marked), torch._neg_view, lambda t: torch._efficientzerotensor(*t.shape)],
    ids=["subclass", "negative", "zero"],
)
def test_tensors_whose_numbers_are_not_simply_in_memory_go_to_torch(strange: Callable[[Tensor], Tensor]) -> None:
    x, weight, gradient = operand(4000, 300, False), operand(8, 300, False, 1), operand(4000, 8, False, 2)
    for left, right in ((strange(x), weight), (x, strange(weight))):
        y = narrow.narrow(left, right)
        assert isinstance(y, Marked) == (Marked in (type(left), type(right)))
        assert_rounded(y.as_subclass(Tensor), left.as_subclass(Tensor) * 1, right.as_subclass(Tensor).t() * 1)
    turned = strange(gradient)
    sums = narrow.narrow_gradient(x, turned)
    assert_rounded(sums.as_subclass(Tensor), turned.as_subclass(Tensor).t() * 1, x)


@built
def test_operands_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        narrow.narrow(operand(4000, 300, False), operand(8, 200, False))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        narrow.narrow_gradient(operand(4000, 300, False), operand(3999, 8, False))


@built
@pytest.mark.parametrize("bytes_", [False, True])
def test_gradients_in_batches_are_those_one_by_one(bytes_: bool) -> None:
    layer, x = kc.TensorLinear(PAPER, gates=4), operand(ROWS, PAPER.M, bytes_)
    y, parameters = layer(x), [*layer.parameters()]
    upstream = torch.randn(2, *y.shape, generator=torch.Generator().manual_seed(0))
    both = torch.autograd.grad(y, parameters, upstream, is_grads_batched=True, retain_graph=True)
    for i in range(2):
        single = torch.autograd.grad(y, parameters, upstream[i], retain_graph=True)
        for got, want in zip(both, single, strict=True):
            assert (got[i] - want).norm() <= 1e-5 * want.norm()


def test_a_library_that_cannot_be_used_is_left_aside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for content in (b"not a library", None):
        path = tmp_path / "library.so"
        if content is not None:
            path.write_bytes(content)
        else:
            path = Path(torch._C.__file__)  # a library without these kernels
        monkeypatch.setattr(compiled, "LIBRARY", path)
        assert compiled._load() is None


@pytest.mark.parametrize(
    ("lanes", "elements", "depth", "columns", "expected"),
    [
        (8, 2**20, 360, 16, True),
        (8, 2**20, 360, 256, True),
        (8, 2**20, 360, 257, False),
        (8, 2**20, 256, 17, True),
        (8, 2**20, 255, 17, False),
        (16, 2**20, 360, 32, True),
        (16, 2**20, 360, 33, False),
        (16, 2**17, 360, 32, True),
        (16, 2**17 - 1, 360, 32, False),
        (16, 2**15, 360, 16, True),
        (16, 2**15 - 1, 360, 16, False),
        (16, 2**18, 63, 16, True),
        (16, 2**18 - 1, 63, 16, False),
        (4, 2**20, 360, 8, False),
        (8, 2**20 - 1, 360, 16, False),
        (8, 2**18, 360, 8, True),
        (8, 2**18 - 1, 360, 8, False),
        (8, 2**20, 360, 2, True),
        (8, 2**20, 360, 1, False),
        (8, 2**20, 8, 8, True),
        (8, 2**20, 7, 8, False),
        (8, 2**20, 4095, 8, True),
        (8, 2**20, 4097, 8, False),
        (8, 2**20, 1024, 8, False),
        (8, 2**20, 1024, 4, True),
        (8, 2**20, 512, 8, True),
    ],
)
def test_they_are_used_for_large_products_of_few_columns(
    monkeypatch: pytest.MonkeyPatch, lanes: int, elements: int, depth: int, columns: int, expected: bool
) -> None:
    monkeypatch.setattr(narrow, "LANES", lanes)
    monkeypatch.setattr(narrow, "COMPILED_COLUMNS", 2 * lanes)
    monkeypatch.setattr(narrow, "ENOUGH", narrow.COMPILED_ELEMENTS.get(lanes, 2**20))
    assert narrow.compiled_faster(elements, depth, columns) is expected


@built
@used
def test_bytes_go_to_them_however_long_their_rows_are(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = operand(40, 40_000, True), operand(16, 40_000, False, 1)
    assert narrow.kernel(x, weight) == "compiled" != narrow.kernel(x.float(), weight)
    assert not narrow.both_compiled(x, weight, 16)  # the gradient would need room for long rows of numbers
    layer = kc.TensorLinear(kc.KT((200, 200), (4, 4), 4), gates=4)
    exact = kc.TensorLinear(layer.format, gates=4).double()
    exact.load_state_dict(layer.state_dict())
    with counted(monkeypatch) as calls:
        y = layer(x)
        gradients = torch.autograd.grad(y.square().sum(), [*layer.parameters()])
    assert calls == ["few_columns"]
    expected = exact(x)
    wanted = torch.autograd.grad(expected.square().sum(), [*exact.parameters()])
    for got, want in zip((y, *gradients), (expected, *wanted), strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


# Without them --------------------------------------------------------------------------------------------------------


def test_without_them_the_products_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, gradient = operand(4000, 300, False), operand(8, 300, False, 1), operand(4000, 8, False, 2)
    monkeypatch.setattr(compiled, "library", None)
    assert narrow.kernel(x, weight) != "compiled"
    assert_rounded(narrow.narrow(x, weight), x, weight.t())
    assert torch.equal(narrow.narrow_gradient(x, gradient), gradient.t() @ x)


def test_a_variable_of_the_environment_leaves_them_aside() -> None:
    code = "from kronecell import compiled; print(compiled.library, compiled.LEAST_DEPTH)"
    environment = {**os.environ, "KRONECELL_COMPILED": "0"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.split() == ["None", "0"]
