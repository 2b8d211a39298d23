"""LSTM and GRU compute what torch.nn's compute: outputs, last states and all gradients, over the whole grid."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kronecell as kc
from kronecell.nn.linear import TensorLinear
from tests.nn.recurrent_cases import HIDDEN, INPUT, RECIPES, Case, corners, flat, grid, largest_difference, run

TOLERANCE = 1e-10
SINGLE = 3e-6  # of float32, in which the compiled operators run


def dense_twin(case: Case, module: nn.Module) -> nn.Module:
    twin = getattr(nn, case.cell)(INPUT, HIDDEN, **case.arguments, dtype=torch.float64)
    twin.load_state_dict(module.state_dict(), strict=True)
    return twin


@pytest.mark.parametrize("recurrence", ["auto", "native", "loop"])
@pytest.mark.parametrize("case", grid(), ids=str)
def test_dense_layers_equal_torch(case: Case, recurrence: str) -> None:
    torch.manual_seed(1)
    ours = case.ours(recurrence=recurrence)
    theirs = dense_twin(case, ours)
    x, state, leaves = case.inputs(torch.Generator().manual_seed(2))
    weights: list[torch.Tensor] = []
    assert largest_difference(run(ours, x, state, leaves, weights), run(theirs, x, state, leaves, weights)) < TOLERANCE


@pytest.mark.parametrize("case", grid(), ids=str)
def test_dense_layers_in_float32_are_near_torch_in_float64(case: Case) -> None:
    torch.manual_seed(1)
    ours = case.ours()
    theirs = dense_twin(case, ours)
    ours = ours.float()
    x, state, leaves = case.inputs(torch.Generator().manual_seed(2))
    weights: list[torch.Tensor] = []
    expected = run(theirs, x, state, leaves, weights)
    near, near_state, near_leaves = case.inputs(torch.Generator().manual_seed(2), torch.float32)
    got = run(ours, near, near_state, near_leaves, [weight.float() for weight in weights])
    assert all(tensor.dtype == torch.float32 for tensor in got)
    assert largest_difference([tensor.double() for tensor in got], expected) < SINGLE


def factor_gradients(module: nn.Module, dense: nn.Module, dense_gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the gradients of a dense module are for the factors it was made of: the chain rule through dense_weight."""
    by_name = dict(zip((name for name, _ in dense.named_parameters()), dense_gradients, strict=True))
    result = []
    for name, _ in module.named_parameters():
        owner, _, factor = name.rpartition(".")
        weight = module.get_submodule(owner) if owner else None
        if not isinstance(weight, TensorLinear):
            result.append(by_name[name])
            continue
        W = weight.dense_weight()[:, : by_name[owner].shape[1]]
        result.append(torch.autograd.grad(W, getattr(weight, factor), by_name[owner])[0])
    return result


def check_against_dense(case: Case, **options: object) -> None:
    torch.manual_seed(1)
    ours = case.ours(**options)
    theirs = ours.to_dense()
    assert type(theirs) is getattr(nn, case.cell)
    x, state, leaves = case.inputs(torch.Generator().manual_seed(2))
    weights: list[torch.Tensor] = []
    got = run(ours, x, state, leaves, weights)
    expected = run(theirs, x, state, leaves, weights)
    count = len(flat(ours(x, state))) + len(leaves)
    assert largest_difference(got[:count], expected[:count]) < TOLERANCE
    assert largest_difference(got[count:], factor_gradients(ours, theirs, expected[count:])) < TOLERANCE


@pytest.mark.parametrize("recurrence", ["auto", "native", "loop"])
@pytest.mark.parametrize("case", corners(), ids=str)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_format_equals_its_dense_twin_in_the_corners(recipe: str, case: Case, recurrence: str) -> None:
    check_against_dense(case, input_format=recipe, hidden_format=recipe, recurrence=recurrence)


@pytest.mark.parametrize("shared", [True, "first"], ids=["paper", "strict"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_shared_weights_equal_the_dense_twin(recipe: str, shared: bool | str) -> None:
    case = Case("LSTM", 1, True, True, 0, True, "packed", True)
    names = next(iter(case.ours(input_format=recipe).weight_ih_l0.factors()))
    sharing = (names,) if shared == "first" else True
    check_against_dense(case, input_format=recipe, shared=sharing)
    check_against_dense(case, input_format=recipe, hidden_format=recipe, shared=sharing)


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_named_orders_equal_the_dense_twin(cell: str) -> None:
    for order in ("separable", "algorithm1", "algorithm2", "optimal"):
        check_against_dense(Case(cell), input_format=RECIPES["kcp"], order=order)


def test_padded_input_equals_the_dense_twin() -> None:
    with pytest.raises(kc.ShapeError, match=r"pad_input=True"):
        kc.LSTM(59, 16, input_format="tt:r=2")
    rnn = kc.LSTM(59, 16, input_format="tt:r=2", pad_input=True, dtype=torch.float64)
    assert rnn.weight_ih_l0.in_features > 59
    x = torch.randn(3, 2, 59, dtype=torch.float64)
    assert largest_difference(flat(rnn(x)), flat(rnn.to_dense()(x))) < TOLERANCE
