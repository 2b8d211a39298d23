"""LSTMCell and GRUCell compute what torch.nn's compute, one step at a time, in every format."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronecell as kc
from kronecell.nn.linear import TensorLinear
from tests.nn.recurrent_cases import RECIPES, largest_difference

INPUT, HIDDEN, BATCH = 12, 6, 3
TOLERANCE = 1e-10
CELLS = ("LSTMCell", "GRUCell")
FLAGS = (False, True)


def make(cell: str, bias: bool = True, **options: Any) -> kc.LSTMCell | kc.GRUCell:
    torch.manual_seed(1)
    dtype = options.pop("dtype", torch.float64)
    made: kc.LSTMCell | kc.GRUCell = getattr(kc, cell)(INPUT, HIDDEN, bias, dtype=dtype, **options)
    return made


def draw(
    cell: str, batched: bool, with_hx: bool, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Any, list[Tensor]]:
    """Input, state, and the leaves whose gradients are compared."""
    generator = torch.Generator().manual_seed(2)
    leading = (BATCH,) if batched else ()

    def leaf(width: int) -> Tensor:
        return torch.randn(*leading, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    x = leaf(INPUT)
    if not with_hx:
        return x, None, [x]
    state = [leaf(HIDDEN) for _ in range(2 if cell == "LSTMCell" else 1)]
    return x, tuple(state) if len(state) == 2 else state[0], [x, *state]


def oracle(module: Any, x: Tensor, hx: Any) -> Any:
    """torch's own cell on dense weights, which are differentiable functions of the factors."""

    def dense(weight: Any) -> Tensor:
        return weight.dense_weight() if isinstance(weight, TensorLinear) else weight

    W, U = dense(module.weight_ih)[:, : x.shape[-1]], dense(module.weight_hh)
    biases = (module.bias_ih, module.bias_hh) if module.bias else (None, None)
    rows = x if x.ndim == 2 else x.unsqueeze(0)
    lstm = isinstance(module, kc.LSTMCell)
    zeros = rows.new_zeros(len(rows), module.hidden_size)
    parts = (zeros,) * (2 if lstm else 1) if hx is None else hx if lstm else (hx,)
    state = tuple(part if part.ndim == 2 else part.unsqueeze(0) for part in parts)
    found = torch.lstm_cell(rows, state, W, U, *biases) if lstm else (torch.gru_cell(rows, state[0], W, U, *biases),)
    found = tuple(part if x.ndim == 2 else part.squeeze(0) for part in found)
    return found if lstm else found[0]


def tensors(result: Any) -> list[Tensor]:
    return [*result] if isinstance(result, tuple) else [result]


def derivatives(result: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Values, gradients of a fixed random combination of them, and gradients of a combination of these."""
    generator = torch.Generator().manual_seed(3)

    def combined(parts: Sequence[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=parts[0].dtype)
        for part in parts:
            total = total + (torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part) * part).sum()
        return total

    values = tensors(result)
    first = torch.autograd.grad(combined(values), inputs, create_graph=True, materialize_grads=True)
    second = torch.autograd.grad(combined(first), inputs, materialize_grads=True)
    return [*values, *first, *second]


def check(module: Any, x: Tensor, hx: Any, leaves: list[Tensor], tolerance: float = TOLERANCE) -> None:
    inputs = [*leaves, *module.parameters()]
    got, expected = derivatives(module(x, hx), inputs), derivatives(oracle(module, x, hx), inputs)
    assert largest_difference(got, expected) < tolerance


# Parity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cell", "bias", "batched", "with_hx"), [*product(CELLS, FLAGS, FLAGS, FLAGS)])
def test_dense_cells_equal_torch(cell: str, bias: bool, batched: bool, with_hx: bool) -> None:
    ours = make(cell, bias)
    torch.manual_seed(1)
    theirs = getattr(nn, cell)(INPUT, HIDDEN, bias, dtype=torch.float64)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)  # the same seed gives the same weights
    x, hx, leaves = draw(cell, batched, with_hx)
    got = derivatives(ours(x, hx), [*leaves, *ours.parameters()])
    assert largest_difference(got, derivatives(theirs(x, hx), [*leaves, *theirs.parameters()])) < TOLERANCE


@pytest.mark.parametrize(("cell", "bias", "batched", "with_hx"), [*product(CELLS, FLAGS, FLAGS, FLAGS)])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_format_equals_the_dense_cell(recipe: str, cell: str, bias: bool, batched: bool, with_hx: bool) -> None:
    module = make(cell, bias, input_format=recipe, hidden_format=recipe)
    check(module, *draw(cell, batched, with_hx))


@pytest.mark.parametrize("shared", [True, "first"], ids=["paper", "strict"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_shared_weights_equal_the_dense_cell(recipe: str, shared: bool | str) -> None:
    first = next(iter(make("LSTMCell", input_format=recipe).weight_ih.factors()))
    for cell in CELLS:
        sharing = (first,) if shared == "first" else True
        x, hx, leaves = draw(cell, True, True)
        check(make(cell, input_format=recipe, hidden_format=recipe, shared=sharing), x, hx, leaves)
        check(make(cell, input_format=recipe, hidden_format=recipe, hidden_shared=sharing), x, hx, leaves)


@pytest.mark.parametrize("cell", CELLS)
def test_orders_equal_the_dense_cell(cell: str) -> None:
    for order in ("separable", "algorithm1", "algorithm2", "optimal"):
        check(make(cell, input_format=RECIPES["kcp"], order=order), *draw(cell, True, True))


@pytest.mark.parametrize("cell", CELLS)
def test_a_padded_input_equals_the_dense_cell(cell: str) -> None:
    with pytest.raises(kc.ShapeError, match=r"pad_input=True"):
        getattr(kc, cell)(59, 16, input_format="tt:r=2")
    module = getattr(kc, cell)(59, 16, input_format="tt:r=2", pad_input=True, dtype=torch.float64)
    assert module.weight_ih.in_features > 59
    x = torch.randn(3, 59, dtype=torch.float64, requires_grad=True)
    check(module, x, None, [x])


@pytest.mark.parametrize("size", [16, 100, 256])
@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("recipe", [None, "lowrank:r=4", "kcp:K=2,CA=2,CB=2", "tt:r=2"])
@pytest.mark.parametrize("cell", CELLS)
def test_kernels_equal_float64(cell: str, recipe: str | None, rows: int, size: int) -> None:
    torch.manual_seed(0)
    module = getattr(kc, cell)(size, size, input_format=recipe, hidden_format=recipe)
    x = torch.randn(rows, size, requires_grad=True)
    state = [torch.randn(rows, size).tanh().requires_grad_() for _ in range(2 if cell == "LSTMCell" else 1)]
    exact = copy.deepcopy(module).double()
    leaves = [leaf.detach().double().requires_grad_() for leaf in (x, *state)]

    def gradients(result: Any, inputs: list[Tensor]) -> list[Tensor]:
        values = tensors(result)
        return [*values, *torch.autograd.grad(sum((part * part).sum() for part in values), inputs)]

    hx, wide = ((tuple(part) if len(part) > 1 else part[0]) for part in (state, leaves[1:]))
    got = gradients(module(x, hx), [x, *state, *module.parameters()])
    expected = gradients(oracle(exact, leaves[0], wide), [*leaves, *exact.parameters()])
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(
            mine.double(), other, rtol=0, atol=1e-5 * max(1.0, other.detach().abs().max().item())
        )
    with torch.no_grad():
        for mine, other in zip(tensors(kc.freeze(module)(x, hx)), expected, strict=False):
            torch.testing.assert_close(mine.double(), other, rtol=0, atol=1e-5)


# Beside layers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"input_format": "tt:r=2", "hidden_format": "kt:K=2"}], ids=["dense", "formats"]
)
@pytest.mark.parametrize("cell", CELLS)
def test_steps_by_hand_are_the_layer(cell: str, options: dict[str, Any]) -> None:
    layer = getattr(kc, cell.removesuffix("Cell"))(INPUT, HIDDEN, dtype=torch.float64, **options)
    module = make(cell, **options)
    module.load_state_dict({name.replace("_l0", ""): tensor for name, tensor in layer.state_dict().items()})
    x = torch.randn(7, BATCH, INPUT, dtype=torch.float64)
    state, outputs = None, []
    for row in x:
        state = module(row, state)
        outputs.append(tensors(state)[0])
    output, last = layer(x)
    assert (
        largest_difference([torch.stack(outputs), *tensors(state)], [output, *(p[0] for p in tensors(last))])
        < TOLERANCE
    )


@pytest.mark.parametrize("cell", CELLS)
def test_forget_bias_is_that_of_the_layer(cell: str) -> None:
    with pytest.raises(kc.ShapeError, match="bias=True"):
        make(cell, False, forget_bias=1.0)
    ours = make(cell, forget_bias=1.5)
    keep = slice(HIDDEN, 2 * HIDDEN)
    assert (ours.bias_ih[keep] == 1.5).all() and (ours.bias_hh[keep] == 0).all()
    assert not (ours.bias_ih[:HIDDEN] == 1.5).any()


# Forms of input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
def test_bytes_count_from_zero_to_one(cell: str) -> None:
    for recipe in (None, "tt:r=2"):
        module = make(cell, input_format=recipe)
        x = torch.randint(0, 256, (BATCH, INPUT), dtype=torch.uint8)
        assert largest_difference(tensors(module(x)), tensors(module(x.double() / 255))) < TOLERANCE


@pytest.mark.parametrize("cell", CELLS)
def test_a_batch_without_rows_is_as_torchs(cell: str) -> None:
    module, theirs = make(cell, dtype=torch.float32), getattr(nn, cell)(INPUT, HIDDEN)
    assert tensors(module(torch.zeros(0, INPUT)))[0].shape == tensors(theirs(torch.zeros(0, INPUT)))[0].shape


@pytest.mark.parametrize("of_state", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cell", CELLS)
def test_results_under_autocast_have_torchs_dtypes(cell: str, of_x: torch.dtype, of_state: torch.dtype | None) -> None:
    module = make(cell, input_format="tt:r=2", dtype=torch.float32)
    x, hx, _ = draw(cell, True, of_state is not None, of_state or torch.float32)
    with torch.autocast("cpu"):
        got, expected = (tensors(each(x.to(of_x), hx)) for each in (module, module.to_dense()))
    assert [part.dtype for part in got] == [part.dtype for part in expected]
    torch.testing.assert_close(got, expected, rtol=0, atol=0.03)


ERRORS = [
    (lambda cell: make(cell)(torch.zeros(2, 3, INPUT)), "1-D or 2-D"),
    (lambda cell: make(cell)([1.0]), "1-D or 2-D tensor, got list"),
    (lambda cell: make(cell)(torch.zeros(2, 11)), r"expected \(\.\.\., 12\), got \(2, 11\)"),
    (lambda cell: make(cell)(torch.zeros(2, INPUT)), "dtype torch.float32, the parameters torch.float64"),
    (lambda cell: make(cell)(*_state(cell, 1, 2)), r"h has the wrong shape: expected \(2, 6\), got \(1, 6\)"),
    (lambda cell: make(cell)(*_state(cell, 2, None)), r"h has the wrong shape: expected \(6,\), got \(2, 6\)"),
    (lambda cell: make(cell)(*_state(cell, 2, 2, torch.float32)), "h has dtype torch.float32"),
    (lambda cell: make(cell)(*_state("GRUCell" if cell == "LSTMCell" else "LSTMCell", 2, 2)), "hx must be"),
    (lambda cell: make(cell, input_format="tt:m=3x4,n=2x2,r=2"), "input_format of layer 0 does not fit"),
    (lambda cell: make(cell, input_format="tt:r=2", order="sideways"), "no order"),
    (lambda cell: getattr(kc, cell).from_dense(nn.Linear(2, 2)), r"takes a torch\.nn\.(LSTM|GRU)Cell, got Linear"),
    (lambda cell: getattr(kc, cell)(4, 0), "hidden_size must be an integer of at least 1"),
]


def _state(cell: str, rows: int, rows_of_x: int | None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Any]:
    h = torch.zeros(rows, HIDDEN, dtype=dtype)
    x = torch.zeros(*(() if rows_of_x is None else (rows_of_x,)), INPUT, dtype=torch.float64)
    return x, (h, h) if cell == "LSTMCell" else h


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("mistake,message", ERRORS, ids=[message for _, message in ERRORS])
def test_mistakes_are_named(mistake: Any, message: str, cell: str) -> None:
    with pytest.raises(kc.KronecellError, match=message):
        mistake(cell)


# Frozen, dense, counted, saved, exported ------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["dense", *RECIPES])
@pytest.mark.parametrize("cell", CELLS)
def test_frozen_cells_compute_the_same(cell: str, recipe: str | None) -> None:
    module = make(cell, input_format=recipe, hidden_format=recipe)
    frozen = kc.freeze(module)
    x, hx, _ = draw(cell, True, True)
    assert largest_difference(tensors(frozen(x, hx)), tensors(module(x, hx))) < TOLERANCE
    assert frozen.state_dict().keys() == module.state_dict().keys()
    with pytest.raises(kc.PlanError, match="does not train"):
        frozen.train()
    other = make(cell, input_format=recipe, hidden_format=recipe)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    frozen.load_state_dict(other.state_dict())
    assert largest_difference(tensors(frozen(x, hx)), tensors(other(x, hx))) < TOLERANCE


@pytest.mark.parametrize("cell", CELLS)
def test_to_dense_and_from_dense(cell: str) -> None:
    x, hx, _ = draw(cell, True, True)
    module = make(cell, input_format="tt:r=2", hidden_format="lowrank:r=2")
    dense = module.eval().to_dense()
    assert type(dense) is getattr(nn, cell) and not dense.training
    assert largest_difference(tensors(dense(x, hx)), tensors(module(x, hx))) < TOLERANCE
    again = type(module).from_dense(dense, input_format="tt:r=2", hidden_format="lowrank:r=2")
    assert again.weight_ih.fit_error < 1e-5 and again.weight_hh.fit_error < 1e-5 and not again.training
    assert largest_difference(tensors(again(x, hx)), tensors(module(x, hx))) < 1e-4
    copied = type(module).from_dense(dense)
    assert largest_difference(tensors(copied(x, hx)), tensors(dense(x, hx))) < TOLERANCE


@pytest.mark.parametrize("cell", CELLS)
def test_cells_count_as_their_layers(cell: str) -> None:
    for recipe in (None, "tt:r=2", "lowrank:r=1"):
        module = make(cell, input_format=recipe, hidden_format=recipe)
        layer = getattr(kc, cell.removesuffix("Cell"))(
            INPUT, HIDDEN, dtype=torch.float64, input_format=recipe, hidden_format=recipe
        )  # fmt: skip
        assert kc.count(module) == kc.count(layer)
    assert kc.count(make(cell)) == kc.count(getattr(nn, cell)(INPUT, HIDDEN))


@pytest.mark.parametrize("cell", CELLS)
def test_cells_are_saved_with_their_arguments(cell: str, tmp_path: Path) -> None:
    module = getattr(kc, cell)(
        59, 16, False, input_format="tt:r=2", hidden_format="kcp:K=2,CA=2,CB=2", shared=("G1",), hidden_shared=True,
        pad_input=True, order="forward",
    )  # fmt: skip
    again = kc.load(kc.save(module, tmp_path / "cell"))
    x = torch.randn(2, 59)
    assert repr(again) == repr(module)
    for mine, other in zip(tensors(again(x)), tensors(module(x)), strict=True):
        assert torch.equal(mine, other)
    model = nn.ModuleDict({"cell": module, "head": nn.Linear(16, 2)})
    kc.save(model, tmp_path / "model")
    kc.load(tmp_path / "model", into=copy.deepcopy(model))


@pytest.mark.parametrize("cell", CELLS)
def test_the_text_of_a_cell_says_what_runs(cell: str) -> None:
    module = make(cell, input_format="tt:r=2", hidden_format="lowrank:r=1")
    for part in ("12, 6", "W tt:m=4x3", "U lowrank", "two narrow products", "x fewer than dense"):
        assert part in repr(module)
    text = module.explain(4)
    assert "weight_ih" in text and "chosen by the cost model" in text and "columns between" in text


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_compiled_and_per_sample(cell: str) -> None:
    module = make(cell, input_format="tt:r=2", hidden_format="lowrank:r=1", dtype=torch.float32)
    x, hx, _ = draw(cell, True, True, torch.float32)
    expected = tensors(module(x, hx))
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    assert largest_difference(tensors(compiled(x, hx)), expected) < 1e-6

    def loss(parameters: dict[str, Tensor], row: Tensor, state: Any) -> Tensor:
        return tensors(torch.func.functional_call(module, parameters, (row, state)))[0].sum()

    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x.detach(), hx)
    total = torch.autograd.grad(expected[0].sum(), [*module.parameters()])
    for mine, other in zip((each[name].sum(0) for name in parameters), total, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_cells_in_onnx(cell: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    module = make(cell, input_format="tt:r=2", hidden_format="lowrank:r=1", dtype=torch.float32)
    x, hx, _ = draw(cell, True, True, torch.float32)
    detached = tuple(part.detach() for part in hx) if isinstance(hx, tuple) else hx.detach()
    assert kc.export_onnx(module, tmp_path / "cell.onnx", (x.detach(), detached)).difference < 1e-5
    with pytest.raises(kc.CheckpointError, match="streaming=True takes"):
        kc.export_onnx(module, tmp_path / "cell.onnx", x.detach(), streaming=True)
