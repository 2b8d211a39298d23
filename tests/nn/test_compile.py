"""torch.compile, export and jit.trace: one graph that holds our operators and gives the module's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

import kronecell as kc
from tests.nn.ecosystem_cases import NAMES, QUICK, build, given, oracle, results, tensors_of

# torch's tracers use parts of torch that torch itself declares deprecated, and look at .grad of tensors in between.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]

EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
MADE_DENSE = ("lstm-doped",)  # W is made dense of its factors, and S added: the cheapest way for one as small
# A loop of steps in Python is unrolled: its program is for one length, see below.
ANY_LENGTH = [name for name in EVERY if name != pytest.param("lstm-loop", marks=pytest.mark.slow)]


def ours_in(graph: GraphModule) -> set[str]:
    """The operators of this package that a graph calls."""
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    return {target.name() for target in targets if getattr(target, "namespace", "") == "kronecell"}


def recording(found: list[set[str]]) -> Callable[..., Any]:
    """A backend that runs graphs as they are and notes which of our operators they call, forward and backward."""

    def compiler(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.append(ours_in(graph))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("training", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize("name", EVERY)
def test_one_graph_with_our_operators_has_the_values_and_gradients_of_the_dense_module(
    name: str, training: bool
) -> None:
    module = build(name).train(training)
    found: list[set[str]] = []
    compiled = torch.compile(module, fullgraph=True, backend=recording(found))
    x = given()
    with torch.set_grad_enabled(training):
        got = results(compiled, x)
        wanted = results(oracle(module), x.double())
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-6)
        if training:
            parameters = [*module.parameters()]
            ours = torch.autograd.grad(sum(t.square().sum() for t in got), parameters)
            eager = torch.autograd.grad(sum(t.square().sum() for t in results(module, x)), parameters)
            for a, b in zip(ours, eager, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert len(found) == (2 if training else 1)  # one graph forward, one back
    compressed = any(isinstance(part, kc.TensorLinear) for part in module.modules())
    if compressed:
        product = "kronecell::hoist" if name in MADE_DENSE else "kronecell::contract"
        assert product in found[0]
        assert not training or f"{product}_backward" in found[1]
    if isinstance(module, (kc.LSTM, kc.GRU)) and module.recurrence == "auto":
        cell = type(module).__name__.lower()
        assert f"kronecell::{cell}" in found[0]
        assert not training or f"kronecell::{cell}_backward" in found[1]


@pytest.mark.parametrize("name", ["linear-kcp", "lstm-kcp", "gru-tt"])
def test_a_graph_serves_every_batch_and_length(name: str) -> None:
    module = build(name).eval()
    found: list[set[str]] = []
    compiled = torch.compile(module, fullgraph=True, backend=recording(found), dynamic=True)
    with torch.no_grad():
        for shape in ((3, 2), (5, 4), (7, 3)):
            x = torch.randn(*shape, 12)
            for a, b in zip(results(compiled, x), results(module, x), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert len(found) == 1


def test_compiled_modules_follow_their_parameters() -> None:
    module = build("lstm-kcp").eval()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        before = results(compiled, given())[0]
        for p in module.parameters():
            p.mul_(1.5)
        after = results(compiled, given())[0]
        assert not torch.allclose(before, after)
        torch.testing.assert_close(after.double(), results(oracle(module), given().double())[0], rtol=0, atol=1e-6)


def test_bytes_and_a_given_state_compile() -> None:
    rnn = build("lstm-kcp").eval()
    compiled = torch.compile(rnn, fullgraph=True, backend="aot_eager")
    x = torch.randint(0, 256, (3, 2, 12), dtype=torch.uint8)
    state = (torch.randn(1, 2, 8), torch.randn(1, 2, 8))
    with torch.no_grad():
        for a, b in zip(tensors_of(compiled(x, state)), tensors_of(rnn(x, state)), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["linear-kcp", "lstm-tt", "gru-kcp"])
def test_a_frozen_module_compiles_into_one_graph(name: str) -> None:
    frozen = kc.freeze(build(name))
    found: list[set[str]] = []
    compiled = torch.compile(frozen, fullgraph=True, backend=recording(found))
    with torch.no_grad():
        for a, b in zip(results(compiled, given()), results(frozen, given()), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert len(found) == 1 and "kronecell::hoist" not in found[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_inductor_gives_the_same(name: str) -> None:
    module = build(name)
    compiled = torch.compile(module, fullgraph=True)
    parameters = [*module.parameters()]
    got, expected = results(compiled, given()), results(module, given())
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    ours, theirs = (torch.autograd.grad(sum(t.square().sum() for t in r), parameters) for r in (got, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# Export --------------------------------------------------------------------------------------------------------------


def exported(module: nn.Module, example: Tensor, axes: dict[int, Any]) -> Any:
    dims = {axis: torch.export.Dim(name) for axis, name in axes.items()}
    return torch.export.export(module, (example,), dynamic_shapes=(dims,))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ANY_LENGTH)
def test_an_exported_program_serves_every_batch_and_length(name: str, frozen: bool) -> None:
    module = build(name).eval()
    module = kc.freeze(module) if frozen else module
    program = exported(module, torch.randn(4, 3, 12), {0: "first", 1: "second"})
    assert module.__class__.__name__ == type(build(name)).__name__
    called = ours_in(program.graph_module)
    if not frozen and name not in MADE_DENSE and any(isinstance(part, kc.TensorLinear) for part in module.modules()):
        assert "kronecell::contract" in called  # a frozen one as small as these runs dense
    for shape in ((7, 2, 12), (2, 5, 12), (9, 1, 12), (1, 4, 12)):
        x = torch.randn(shape)
        with torch.no_grad():
            for a, b in zip(tensors_of(program.module()(x)), results(module, x), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_an_exported_loop_serves_its_one_length() -> None:
    module, x = build("lstm-loop").eval(), torch.randn(4, 3, 12)
    program = torch.export.export(module, (x,)).module()
    other = torch.randn_like(x)
    with torch.no_grad():
        for a, b in zip(tensors_of(program(other)), results(module, other), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_an_exported_program_is_saved_and_loaded(tmp_path: Any) -> None:
    module = build("gru-kcp").eval()
    torch.export.save(exported(module, torch.randn(4, 3, 12), {0: "time", 1: "batch"}), tmp_path / "gru.pt2")
    again = torch.export.load(tmp_path / "gru.pt2").module()
    x = torch.randn(6, 5, 12)
    with torch.no_grad():
        for a, b in zip(tensors_of(again(x)), results(module, x), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_a_model_with_our_layers_inside_is_exported() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kc.LSTM(12, 8, batch_first=True, input_format="kcp:K=2,CA=2,CB=2")
            self.head = kc.TensorLinear("tt:m=2x4,n=1x3,r=2")

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    model = Classifier().eval()
    program = exported(model, torch.randn(4, 3, 12), {0: "batch", 1: "time"})
    x = torch.randn(2, 7, 12)
    torch.testing.assert_close(program.module()(x), model(x), rtol=0, atol=1e-6)


# jit.trace -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", NAMES)
def test_jit_trace_gives_the_module_s_numbers(name: str) -> None:
    module = build(name).eval()
    with torch.no_grad():
        traced = torch.jit.trace(module, (given(),))
        x = 2 * given()
        for a, b in zip(tensors_of(traced(x)), results(module, x), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        assert_same_as_copy(module, x)


def assert_same_as_copy(module: nn.Module, x: Tensor) -> None:
    """Tracing leaves no mark on the module."""
    for a, b in zip(results(module, x), results(copy.deepcopy(module), x), strict=True):
        assert torch.equal(a, b)
