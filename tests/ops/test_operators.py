"""Laws of every product operator, over one table: the dense product in float64 is the oracle."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kronecell.ops.kernels import bmm_out, grouped_backward, register_width
from tests.ops.case import Arguments, Case
from tests.ops.product_cases import fold_cases, grouped_cases, matrix_cases, narrow_cases
from tests.ops.weight_cases import hoisted_cases, sparse_cases

CASES = [*narrow_cases(), *matrix_cases(), *fold_cases(), *grouped_cases(), *hoisted_cases(), *sparse_cases()]

KERNELS = pytest.mark.skipif(not register_width(), reason="no kernels are built")
SMALL = [case for case in CASES if case.small]
ONE_OF_EACH = [*{case.name.split("-")[0] + ("bytes" in case.name) * "-bytes": case for case in SMALL}.values()]
FEW = [*{case.name.split("-")[0] + ("bytes" in case.name) * "-bytes": case for case in CASES}.values(), *ONE_OF_EACH]
EACH = 8 * torch.finfo(torch.float32).eps  # of the sum of the sizes of what is added up


def drawn(case: Case, seed: int = 0) -> Arguments:
    return case.draw(torch.Generator().manual_seed(seed))


def flat(value: Any) -> list[Tensor]:
    """All tensors of arguments or results."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in flat(item)] if isinstance(value, (list, tuple)) else []


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Arguments with every floating point tensor changed."""
    if isinstance(value, Tensor):
        return function(value) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, function) for item in value)
    return value


def exact(case: Case, args: Arguments, function: Callable[[Tensor], Tensor] = Tensor.double) -> list[Tensor]:
    """The oracle for arguments in float64, bytes as well."""
    wide = mapped(args, function)
    wide = tuple(arg.double() if isinstance(arg, Tensor) and arg.dtype == torch.uint8 else arg for arg in wide)
    return flat(case.exact(*wide))


def assert_right(got: Sequence[Tensor], want: Sequence[Tensor], sizes: Sequence[Tensor]) -> None:
    """Every number to a few roundings of what is added up for it; a result of (0,) is one that was not asked for."""
    for found, right, size in zip(got, want, sizes, strict=False):
        if found.shape == (0,) and right.numel():
            continue
        assert found.shape == right.shape
        assert torch.all((found.double() - right).abs() <= EACH * size)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case: Case) -> None:
    args = drawn(case)
    got = flat(case.operator(*args))
    assert all(tensor.dtype == torch.float32 for tensor in got)
    assert_right(got, exact(case, args), exact(case, args, lambda tensor: tensor.double().abs()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case) -> None:
    args = drawn(case)

    def gradients(run: Callable[..., Any], convert: Callable[[Tensor], Tensor]) -> list[Tensor]:
        given = mapped(args, lambda tensor: convert(tensor).detach().clone().requires_grad_())
        outputs = flat(run(*given))[: case.outputs]
        leaves = [leaf for leaf in flat(given) if leaf.is_floating_point()]
        upstream = [convert(torch.cos(torch.arange(out.numel()).float()).view(out.shape)) for out in outputs]
        found = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True, materialize_grads=True)
        return [*found]

    def oracle(*given: Any) -> Any:
        wide = (arg.double() if isinstance(arg, Tensor) and arg.dtype == torch.uint8 else arg for arg in given)
        return case.exact(*wide)

    got = gradients(case.operator, lambda tensor: tensor)
    want = gradients(oracle, Tensor.double)
    sizes = gradients(oracle, lambda tensor: tensor.double().abs())
    # Two roundings meet where the gradient is made of what the forward computed.
    assert_right(got, want, [2 * size for size in sizes])


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_float64_and_gradients_of_gradients(case: Case) -> None:
    args = mapped(drawn(case), Tensor.double)
    leaves = [tensor for tensor in flat(args) if tensor.is_floating_point()]

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        rest = iter(given)
        found = flat(case.operator(*mapped(args, lambda _: next(rest))))
        return tuple(found[: case.outputs])

    for got, want in zip(run(*leaves), exact(case, args), strict=False):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    given = [leaf.detach().requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(run, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, given, fast_mode=True)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_opcheck(case: Case) -> None:
    args = mapped(drawn(case), lambda tensor: tensor.requires_grad_("backward" not in case.name))
    torch.library.opcheck(case.operator.kernel, args)


@KERNELS
@pytest.mark.parametrize("case", [case for case in CASES if case.threads], ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(case: Case) -> None:
    args = drawn(case)
    one = flat(case.operator(*args))
    torch.set_num_threads(2)
    try:
        two = flat(case.operator(*args))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_sums_of_two_threads() -> None:
    torch.set_num_threads(2)
    try:
        for case in CASES:
            if not case.threads:
                test_values(case)
    finally:
        torch.set_num_threads(1)


@KERNELS
@pytest.mark.parametrize("case", [case for case in CASES if case.by_rows is not None], ids=str)
def test_rows_have_the_same_bits_alone_and_among_others(case: Case) -> None:
    args = [*drawn(case)]
    place = case.by_rows
    assert place is not None
    x = args[place]
    doubled = case.operator(*args[:place], torch.cat([x[: len(x) // 3], x]), *args[place + 1 :])
    for alone, among in zip(flat(case.operator(*args))[:1], flat(doubled)[:1], strict=True):
        first = len(among) - len(alone)
        assert torch.equal(among[first:], alone)
        assert torch.equal(among[:first], alone[:first])


def scattered(tensor: Tensor) -> Tensor:
    """The same numbers, every other one of memory that begins somewhere else."""
    memory = torch.full((3 + 2 * tensor.numel(),), 17, dtype=tensor.dtype)
    place = memory[3::2].view(tensor.shape) if tensor.numel() else memory[:0].view(tensor.shape)
    return place.copy_(tensor)


def transposed(tensor: Tensor) -> Tensor:
    """The same numbers in the order of the last index."""
    return tensor.movedim(-1, 0).contiguous().movedim(0, -1) if tensor.ndim > 1 else tensor


@pytest.mark.parametrize("layout", [scattered, transposed, lambda tensor: torch.cat([tensor[:1], tensor])[1:]])
@pytest.mark.parametrize("case", FEW, ids=str)
def test_inputs_lie_anywhere(case: Case, layout: Callable[[Tensor], Tensor]) -> None:
    args = drawn(case)
    moved = tuple(layout(arg) if isinstance(arg, Tensor) and arg.dtype == torch.uint8 else arg for arg in args)
    got = flat(case.operator(*mapped(moved, layout)))
    sizes = exact(case, args, lambda tensor: tensor.double().abs())
    assert_right(got, exact(case, args), sizes)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", [case for case in CASES if "bytes" not in case.name], ids=str)
def test_what_is_not_finite_stays_so(case: Case, number: float) -> None:
    args = drawn(case)
    first = flat(args)[0]
    first[torch.unravel_index(torch.tensor(first.numel() // 2), first.shape)] = number
    want = exact(case, args)
    for found, right in zip(flat(case.operator(*args)), want, strict=False):
        if found.shape == right.shape:
            assert torch.equal(found.isfinite(), right.isfinite())


def empty_cases() -> Iterator[tuple[Case, Arguments]]:
    for case in FEW:
        args = drawn(case)
        if case.name.startswith(("few_columns", "fold-")):
            yield case, (args[0][:0], *args[1:])
        elif case.name.startswith("column_sums"):
            yield case, (args[0][:0], args[1][:0])
        elif case.name.startswith("fold_backward"):
            yield case, (args[0][:0], args[1][:0], args[2][:0], *args[3:])
        elif case.name.startswith("grouped-"):
            yield case, (args[0][:, :0], *args[1:])
            yield case, (args[0][:, :, :0], args[1][:, :0], args[2])
        elif case.name.startswith("grouped_backward"):
            yield case, (args[0][:0], args[1][:, :0], *args[2:])
        elif case.name.startswith("bmm"):
            yield case, (args[0][..., :0], args[1][..., :0, :])
            yield case, (args[0][..., :0, :], args[1])


@pytest.mark.parametrize(
    ("case", "args"), [*empty_cases()], ids=lambda value: str(value) if type(value) is Case else ""
)
def test_nothing_to_add_up(case: Case, args: Arguments) -> None:
    for got, want in zip(flat(case.operator(*args)), flat(case.operator.reference(*args)), strict=True):
        assert torch.equal(got, want)


@KERNELS
@pytest.mark.parametrize(
    ("case", "what"), [(case, what[0]) for case in ONE_OF_EACH for what in case.bad], ids=lambda value: str(value)
)
def test_what_does_not_fit_is_an_error(case: Case, what: str) -> None:
    ((_, change, words),) = [bad for bad in case.bad if bad[0] == what]
    with pytest.raises(RuntimeError, match=words):
        case.operator(*change(drawn(case)))


@KERNELS
@pytest.mark.parametrize("case", [case for case in CASES if case.name.startswith("small_products-")], ids=str)
def test_any_wrong_description_is_an_error_or_another_product(case: Case) -> None:
    inputs, description, shapes = drawn(case)
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for _ in range(300):
        wrong = description.clone()
        place = int(torch.randint(0, len(wrong), (), generator=generator))
        wrong[place] = [-2, 5, 10**6, 2**62, -(2**63)][int(torch.randint(0, 5, (), generator=generator))]
        try:
            case.operator(inputs, wrong, shapes)
        except RuntimeError:
            refused += 1
    assert refused > 150


# torch's own rules for tangents are still compiled with torch.jit.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("case", [case for case in ONE_OF_EACH if "bytes" not in case.name], ids=str)
def test_transforms(case: Case) -> None:
    """vmap over, and the tangent of, the first floating point tensor."""
    args = mapped(drawn(case), Tensor.double)
    first = next(tensor for tensor in flat(args) if tensor.is_floating_point())

    def run(tensor: Tensor) -> tuple[Tensor, ...]:
        seen = iter([tensor])
        return tuple(flat(case.operator(*mapped(args, lambda other: next(seen, other))))[: case.outputs])

    batch = torch.stack([first, 2 * first, -first])
    apart = [run(part) for part in batch]
    for together, each in zip(torch.func.vmap(run)(batch), zip(*apart, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(each))
    tangent = torch.sin(torch.arange(first.numel()).double()).view(first.shape)
    values, tangents = torch.func.jvp(run, (first,), (tangent,))
    for value, found, moved in zip(values, tangents, run(first + tangent), strict=True):
        torch.testing.assert_close(found, moved - value)  # every operator is affine in each argument


@pytest.mark.parametrize("shape", [(3, 4, 5), (40, 50, 60), (2, 3, 4, 5), (4, 40, 50, 60)])
def test_products_into_memory_that_is_there(shape: tuple[int, ...]) -> None:
    *batch, rows, depth, columns = shape
    a, b = torch.randn(*batch, rows, depth), torch.randn(*batch, depth, columns)
    wide = torch.full((*batch, rows, columns + 3), 7.0)
    bmm_out(wide[..., :columns], a, b)
    torch.testing.assert_close(wide[..., :columns].double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    assert torch.all(wide[..., columns:] == 7)


def test_unwanted_gradients_of_groups_are_not_computed() -> None:
    found = grouped_backward(torch.randn(3, 10), torch.randn(2, 3, 4), torch.randn(2, 4, 5), [False, True, False])
    assert [tuple(tensor.shape) for tensor in found] == [(0,), (2, 4, 5), (0,)]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


WIDTH = "from kronecell.ops.kernels import register_width; print(register_width())"


@KERNELS
@pytest.mark.parametrize("wish", ["5", "32", "wide"])
def test_a_width_that_the_processor_does_not_have_is_an_error(wish: str) -> None:
    done = python(WIDTH, KRONECELL_WIDTH=wish)
    assert done.returncode
    assert f'KRONECELL_WIDTH is "{wish}"; this processor can do 4' in done.stderr


@KERNELS
@pytest.mark.skipif("KRONECELL_WIDTH" in os.environ, reason="runs the suite for the other widths itself")
@pytest.mark.parametrize("width", [width for width in (8, 4) if width < register_width()])
def test_every_narrower_width_obeys_the_same_laws(width: int) -> None:
    laws = "values or bits or layouts or anywhere or finite or add_up or error"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", __file__, "-k", laws],
        env={**os.environ, "KRONECELL_WIDTH": str(width)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_torchs_own_choice_of_instructions_does_not_matter() -> None:
    """ATEN_CPU_CAPABILITY lowers torch's registers, not ours: no width is taken from there."""
    code = """
import torch, kronecell as kc
torch.manual_seed(0)
rnn = kc.LSTM(4096, 24, input_format="kcp:K=4,CA=4,CB=2").eval()
x = torch.randn(8, 3, 4096)
with torch.no_grad():
    print((rnn(x)[0] - rnn.to_dense()(x)[0]).abs().max().item() < 1e-4)
"""
    done = python(code, ATEN_CPU_CAPABILITY="avx2")
    assert done.stdout.strip() == "True", done.stderr
