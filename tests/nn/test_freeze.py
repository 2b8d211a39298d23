"""kc.freeze: the same function with products of weights held as buffers, for inference alone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronecell as kc
from tests.nn.ecosystem_cases import NAMES, build, given, oracle, results, tensors_of
from tests.nn.recurrent_cases import largest_difference

FORMATS = [
    "dense:m=12,n=8",
    "lowrank:m=12,n=8,r=3",
    "kt:m=3x4,n=2x4,K=3",
    "cp:m=3x4,n=2x4,r=3",
    "tucker:m=3x4,n=2x4,r=2",
    "tt:m=3x4,n=2x4,r=2",
    "tr:m=3x4,n=2x4,r=2",
    "bt:m=3x4,n=2x4,r=2,P=2",
    "ht:m=3x4,n=2x4,r=2",
    "kcp:m=3x4,n=2x4,K=2,CA=2,CB=2",
    "kcp:m=3x2x2,n=2x2x2,K=2,CA=2,CB=2,tie=all",
    "doped:0.1+kt:m=3x4,n=2x4,K=1",
    "doped:0.1,block=4+tt:m=3x4,n=2x4,r=2",
]


@pytest.fixture(params=NAMES)
def module(request: pytest.FixtureRequest) -> nn.Module:
    return build(request.param)


class Model(nn.Module):
    """Our layers inside one of torch's, two of them the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.rnn = kc.LSTM(12, 8, 2, dropout=0.5, input_format="kcp:K=2,CA=2,CB=2", hidden_format="lowrank:r=2")
        self.heads = nn.ModuleList([kc.TensorLinear("tt:m=2x4,n=2x3,r=2")] * 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rnn(self.norm(x))[0]
        return sum(head(y) for head in self.heads)  # type: ignore[return-value]


def model() -> Model:
    torch.manual_seed(0)
    return Model()


# The same function ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("text", FORMATS)
def test_a_frozen_layer_is_the_dense_product_for_any_number_of_rows(text: str, shared: bool) -> None:
    for gates in (1, 3):
        layer = kc.TensorLinear(text, gates=gates, shared=shared, dtype=torch.float64)
        dense = layer.to_dense()
        for rows in ((1,), (4, 64), (1, 16, 128, 1024)):
            frozen = kc.freeze(layer, rows=rows)
            for shape in ((12,), (1, 12), (0, 12), (3, 12), (5, 40, 12), (2, 1, 3, 12)):
                x = torch.randn(shape, dtype=torch.float64)
                torch.testing.assert_close(frozen(x), dense(x), rtol=1e-11, atol=1e-12)
            x = torch.randint(0, 256, (7, 12), dtype=torch.uint8)
            torch.testing.assert_close(frozen(x), dense(x.double() / 255), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("grad", [True, False])
def test_frozen_modules_give_the_dense_module_s_results(module: nn.Module, grad: bool) -> None:
    frozen = kc.freeze(module)
    wanted = results(oracle(module), given(torch.float64))
    with torch.set_grad_enabled(grad):
        assert largest_difference([t.double() for t in results(frozen, given())], wanted) < 1e-6
        double = kc.freeze(copy.deepcopy(module).double())
        assert largest_difference(results(double, given(torch.float64)), wanted) < 1e-12
        moved = copy.deepcopy(frozen).double()  # buffers follow .to()
        assert largest_difference(results(moved, given(torch.float64)), wanted) < 1e-6


def test_a_whole_model_is_frozen_in_one_call() -> None:
    plain = model().eval()
    frozen = kc.freeze(model().train())
    assert not frozen.training and all(not part.training for part in frozen.modules())
    torch.testing.assert_close(frozen(given()), plain(given()), rtol=0, atol=1e-6)
    assert all(not p.requires_grad for p in frozen.parameters())
    assert [*frozen.buffers()] and not [*plain.buffers()]


@pytest.mark.parametrize("cell", [kc.LSTM, kc.GRU])
def test_a_stream_of_single_rows_is_the_whole_sequence(cell: type) -> None:
    rnn = cell(12, 8, 2, input_format="kcp:K=2,CA=2,CB=2", hidden_format="lowrank:r=2")
    frozen, x = kc.freeze(rnn), torch.randn(6, 1, 12)
    expected = tensors_of(rnn(x))
    state, outputs = None, []
    for step in x:
        output, state = frozen(step.unsqueeze(0), state)
        outputs.append(output)
    got = [torch.cat(outputs), *(state if isinstance(state, tuple) else (state,))]
    assert largest_difference(got, expected) < 1e-6


def test_the_module_itself_is_not_touched(module: nn.Module) -> None:
    before = {name: p.clone() for name, p in module.named_parameters()}
    buffers = [name for name, _ in module.named_buffers()]
    module.train()
    kc.freeze(module)
    assert module.training and [name for name, _ in module.named_buffers()] == buffers
    for name, p in module.named_parameters():
        assert p.requires_grad and torch.equal(p, before[name])
    results(module, given())[0].sum().backward()


# Gradients and training ----------------------------------------------------------------------------------------------


def test_gradients_flow_to_x_and_to_nothing_else(module: nn.Module) -> None:
    frozen, x = kc.freeze(module), given().requires_grad_()
    results(frozen, x)[0].square().sum().backward()
    exact = given(torch.float64).requires_grad_()
    results(oracle(module), exact)[0].square().sum().backward()
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]
    assert all(p.grad is None for p in frozen.parameters())


def test_gradients_of_gradients_of_x_exist(module: nn.Module) -> None:
    frozen = kc.freeze(copy.deepcopy(module).double())
    found = []
    for each in (frozen, oracle(module)):
        x = given(torch.float64).requires_grad_()
        (first,) = torch.autograd.grad(results(each, x)[0].sin().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, materialize_grads=True)
        found.append([first.detach(), second])
    assert largest_difference(*found) < 1e-10


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_vmap_and_forward_mode_of_x(module: nn.Module) -> None:
    module = module.double()
    frozen, x = kc.freeze(module), given(torch.float64)
    many = torch.stack([x, 2 * x])
    got = torch.vmap(lambda x: results(frozen, x)[0])(many)
    assert largest_difference([*got], [results(frozen, each)[0] for each in many]) < 1e-12
    _, tangent = torch.func.jvp(lambda x: results(frozen, x)[0], (x,), (x.cos(),))
    _, wanted = torch.func.jvp(lambda x: results(module, x)[0], (x,), (x.cos(),))
    assert largest_difference([tangent], [wanted]) < 1e-11


def test_a_frozen_module_refuses_to_train(module: nn.Module) -> None:
    frozen = kc.freeze(module)
    with pytest.raises(kc.PlanError, match="does not train"):
        frozen.train()
    assert frozen.eval() is frozen and frozen.train(False) is frozen
    with pytest.raises(kc.PlanError, match="does not train"):
        kc.freeze(model()).train()


def test_autocast_gives_the_same_dtypes_as_the_module(module: nn.Module) -> None:
    frozen = kc.freeze(module)
    for x in (given(), given()[:1, :1], given(torch.bfloat16)):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            got, wanted = results(frozen, x), results(module.eval(), x)
        assert [t.dtype for t in got] == [t.dtype for t in wanted]
        assert largest_difference([t.double() for t in got], [t.double() for t in wanted]) < 0.05


def test_what_does_not_fit_is_refused_as_by_the_module(module: nn.Module) -> None:
    frozen = kc.freeze(module)
    for x in (given(torch.float64), given()[..., :-1], given(torch.float64)[:1, :1]):
        with pytest.raises(kc.ShapeError):
            frozen(x)


# State dicts, files, copies ------------------------------------------------------------------------------------------


def test_the_state_dict_is_that_of_the_module(module: nn.Module) -> None:
    frozen, state = kc.freeze(module), module.state_dict()
    assert frozen.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in frozen.state_dict().items())
    copy.deepcopy(module).load_state_dict(frozen.state_dict(), strict=True)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_state_dict_computes_the_products_anew(module: nn.Module, assign: bool) -> None:
    frozen, other = kc.freeze(module), copy.deepcopy(module)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    for each in (frozen, copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        each.load_state_dict(other.state_dict(), assign=assign)
        assert largest_difference(results(each, given()), results(other.eval(), given())) < 1e-6
        assert not each.training and all(not p.requires_grad for p in each.parameters())


def test_loading_reaches_a_frozen_module_inside_another_and_a_part_of_a_frozen_one() -> None:
    other = model()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    outer = nn.Sequential(kc.freeze(model()))
    outer.load_state_dict({f"0.{name}": tensor for name, tensor in other.state_dict().items()})
    torch.testing.assert_close(outer(given()), other.eval()(given()), rtol=0, atol=1e-6)
    frozen = kc.freeze(model())
    for name in ("norm", "rnn", "heads"):
        frozen.get_submodule(name).load_state_dict(other.get_submodule(name).state_dict())
    torch.testing.assert_close(frozen(given()), other(given()), rtol=0, atol=1e-6)


def test_copies_and_pickles_are_frozen_too(module: nn.Module) -> None:
    frozen = kc.freeze(module)
    for twin in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen)), kc.freeze(frozen)):
        assert all(torch.equal(a, b) for a, b in zip(results(twin, given()), results(frozen, given()), strict=True))
        with pytest.raises(kc.PlanError, match="does not train"):
            twin.train()


def test_a_frozen_module_is_saved_and_loaded_as_the_module(tmp_path: Any) -> None:
    for name in NAMES:
        frozen = kc.freeze(build(name))
        kc.save(frozen, tmp_path / name)
        again = kc.load(tmp_path / name)
        assert largest_difference(results(again.eval(), given()), results(frozen, given())) < 1e-6
        again.train()


def test_mistakes_are_named() -> None:
    layer = kc.TensorLinear(FORMATS[5])
    for rows in ((), (0,), (1.5,), (True,), (-3,)):
        with pytest.raises(kc.ShapeError, match="rows"):
            kc.freeze(layer, rows=rows)  # type: ignore[arg-type]
    with pytest.raises(kc.ShapeError, match="torch module"):
        kc.freeze("layer")  # type: ignore[type-var]
    plain = kc.freeze(nn.Linear(3, 3))
    assert not plain.training and plain(torch.zeros(2, 3)).shape == (2, 3)
