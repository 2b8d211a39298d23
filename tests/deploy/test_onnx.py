"""ONNX files give what the module gives, in a real ONNX Runtime, or are not left behind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kronecell as kc
from kronecell.deploy import onnx as export_module
from tests.nn.ecosystem_cases import grown

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

# torch's exporter warns about itself where it runs code of its own that it declares deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

KCP, TT = "kcp:K=2,CA=2,CB=2", "tt:r=2"


def run(path: Path, *inputs: torch.Tensor) -> list[torch.Tensor]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    return [
        torch.from_numpy(array)
        for array in session.run(None, dict(zip(names, (i.numpy() for i in inputs), strict=True)))
    ]


def operators(path: Path) -> set[str]:
    """Every operator, those inside Scan bodies too."""

    def walk(graph: Any) -> set[str]:
        found = set()
        for node in graph.node:
            found.add(node.op_type)
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    found |= walk(attribute.g)
        return found

    return walk(onnx.load(str(path)).graph)


def states(rnn: kc.LSTM | kc.GRU, batch: int) -> Any:
    count = rnn.num_layers * rnn.directions
    parts = tuple(torch.randn(count, batch, size) for size in rnn.state_sizes)
    return parts if len(parts) > 1 else parts[0]


def flat(result: Any) -> list[torch.Tensor]:
    return [*export_module.flat_tensors(result)]


CASES = {
    "lstm": (lambda: kc.LSTM(12, 8, batch_first=True, input_format=KCP, hidden_format=TT), "LSTM"),
    "layers": (lambda: kc.LSTM(12, 8, 2, bidirectional=True, input_format=KCP, hidden_format=TT), "LSTM"),
    "gru": (lambda: kc.GRU(12, 8, input_format=KCP, shared=True), "GRU"),
    "scan": (lambda: kc.LSTM(12, 8, input_format=TT, bias=False), "Scan"),
    "doped": (
        lambda: grown(kc.LSTM(12, 8, input_format=f"doped:0.05+{KCP}", hidden_format="doped:0.02+kt:K=1")),
        "Scan",
    ),
    "doped-gru": (
        lambda: grown(kc.GRU(12, 8, input_format=f"doped:0.05,block=4+{KCP}", hidden_format="doped:0.1+tt:r=2")),
        "Scan",
    ),
    "projection": (lambda: kc.LSTM(12, 8, proj_size=4, batch_first=True, input_format=KCP), "Scan"),
}


QUICK = {("lstm", False), ("gru", True), ("scan", False), ("doped", False)}  # the others run with the slow tests
GRID = [
    pytest.param(name, densify, marks=() if (name, densify) in QUICK else pytest.mark.slow)
    for name in CASES
    for densify in (False, True)
]


@pytest.mark.parametrize("name,densify", GRID)
def test_the_file_gives_the_module_s_outputs_at_other_lengths(name: str, densify: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    build, node = CASES[name]
    rnn = build().eval()
    path = tmp_path / "rnn.onnx"
    report = kc.export_onnx(rnn, path, (torch.randn(3, 3, 12), states(rnn, 3)), densify=densify)
    assert report.difference <= 1e-5 and len({*report.checked}) >= 3 and report.size == path.stat().st_size
    for batch, time in ((1, 1), (2, 11), (6, 4)):
        x = torch.randn(*((batch, time) if rnn.batch_first else (time, batch)), 12)
        state = states(rnn, batch)
        with torch.no_grad():
            expected = flat(rnn(x, state))
        got = run(path, x, *(state if isinstance(state, tuple) else (state,)))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    found = operators(path)
    assert "Einsum" not in found
    dense = "GRU" if isinstance(rnn, kc.GRU) else "LSTM"
    assert (dense if node == "Scan" and name != "projection" and densify else node) in found


@pytest.mark.slow
def test_a_state_that_is_not_given_starts_at_zero(tmp_path: Path) -> None:
    rnn = kc.GRU(12, 8, batch_first=True, input_format=KCP).eval()
    kc.export_onnx(rnn, tmp_path / "rnn.onnx", torch.randn(1, 1, 12))
    x = torch.randn(4, 6, 12)
    torch.testing.assert_close(run(tmp_path / "rnn.onnx", x)[0], rnn(x)[0].detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("densify", [False, True], ids=["factored", "dense"])
def test_a_linear_layer_has_every_leading_axis_dynamic(densify: bool, tmp_path: Path) -> None:
    layer = kc.TensorLinear("kcp:m=3x4,n=2x4,K=2,CA=2,CB=2").eval()
    kc.export_onnx(layer, tmp_path / "layer.onnx", torch.randn(2, 5, 12), densify=densify)
    x = torch.randn(7, 3, 12)
    torch.testing.assert_close(run(tmp_path / "layer.onnx", x)[0], layer(x).detach(), rtol=0, atol=1e-5)
    assert not {"Einsum"} & operators(tmp_path / "layer.onnx")


class Classifier(nn.Module):
    """Ours and torch's recurrent layers in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.first = kc.LSTM(12, 8, batch_first=True, input_format=KCP)
        self.second = nn.GRU(8, 8, batch_first=True)
        self.head = kc.TensorLinear("tt:m=2x4,n=1x3,r=2")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)[0])[0][:, -1])


@pytest.mark.parametrize("densify", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["factored", "dense"])
def test_a_model_with_our_layers_inside_is_exported(densify: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Classifier()
    kc.export_onnx(model, tmp_path / "model.onnx", torch.randn(2, 4, 12), densify=densify)
    assert model.training and isinstance(model.second, nn.GRU)  # the model itself is not touched
    x = torch.randn(3, 9, 12)
    torch.testing.assert_close(run(tmp_path / "model.onnx", x)[0], model(x).detach(), rtol=0, atol=1e-5)


STREAMS = [
    (kc.LSTM, KCP),
    pytest.param(kc.LSTM, TT, marks=pytest.mark.slow),
    pytest.param(kc.GRU, KCP, marks=pytest.mark.slow),
    (kc.GRU, TT),
]


@pytest.mark.parametrize("cell,recipe", STREAMS)
def test_streaming_step_by_step_equals_the_whole_sequence(cell: type, recipe: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rnn = cell(12, 8, 2, batch_first=True, input_format=recipe).eval()
    path = tmp_path / "step.onnx"
    kc.export_onnx(rnn, path, torch.randn(1, 12), streaming=True)
    x = torch.randn(3, 5, 12)
    state = [torch.zeros(2, 3, 8) for _ in rnn.state_sizes]
    outputs = []
    for t in range(5):
        output, *state = run(path, x[:, t].contiguous(), *state)
        outputs.append(output)
    with torch.no_grad():
        expected = flat(rnn(x))
    for a, b in zip([torch.stack(outputs, 1), *state], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_the_factored_file_is_small_and_knows_nothing_of_this_machine(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rnn = kc.LSTM(4096, 256, input_format="kcp:K=2,CA=2,CB=2", hidden_format="tt:r=2").eval()
    report = kc.export_onnx(rnn, tmp_path / "rnn.onnx", torch.randn(2, 2, 4096))
    assert report.size < 4 * 4 * 256 * 256  # the dense U alone; W would be sixteen times that
    content = (tmp_path / "rnn.onnx").read_bytes()
    assert str(Path(kc.__file__).parent).encode() not in content and sys.prefix.encode() not in content


def test_a_file_that_differs_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exported graph is right, so the law is tested by a tolerance that nothing can meet."""
    monkeypatch.setattr(export_module, "TOLERANCE", -1.0)
    monkeypatch.setattr("kronecell.deploy.comparison.ROUNDING", -1.0)
    target = tmp_path / "rnn.onnx"
    target.write_text("old")
    with pytest.raises(kc.CheckpointError, match="differs from the module"):
        kc.export_onnx(kc.GRU(12, 8, input_format=KCP), target, torch.randn(2, 3, 12))
    assert target.read_text() == "old" and [*tmp_path.iterdir()] == [target]


@pytest.mark.slow
def test_a_layer_of_the_paper_s_size_passes_the_comparison(tmp_path: Path) -> None:
    """Its gates are large for white inputs, and float32 rounds accordingly."""
    torch.manual_seed(0)
    fmt = kc.KCP((8, 20, 20, 18), (4, 4, 4, 4), K=4, CA=4, CB=2)
    rnn = kc.LSTM(fmt.M, fmt.N, batch_first=True, input_format=fmt, hidden_format="tt:r=4")
    report = kc.export_onnx(rnn, tmp_path / "rnn.onnx", torch.randn(2, 3, fmt.M))
    assert report.size < 200_000 and report.difference < 1e-4


def test_a_small_mistake_in_the_graph_is_not_taken_for_rounding() -> None:
    rnn = export_module.Flat(kc.GRU(12, 8, input_format=KCP).eval(), (None,))
    x = torch.randn(3, 2, 12)
    with torch.no_grad():
        expected = rnn(x)
    assert export_module.is_rounding_of(rnn, [x], expected, expected)
    assert not export_module.is_rounding_of(rnn, [x], [tensor + 1e-4 for tensor in expected], expected)
    assert not export_module.is_rounding_of(rnn, [x], [tensor * float("nan") for tensor in expected], expected)


def test_a_graph_that_fixed_its_length_is_not_left_behind(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight if x.shape[1] > 2 else x  # a tracer keeps one branch

    with pytest.raises(kc.CheckpointError):
        kc.export_onnx(Branching(), tmp_path / "branching.onnx", torch.randn(3, 5, 4))
    assert not [*tmp_path.iterdir()]


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.onnx"
    with pytest.raises(kc.CheckpointError, match=r"\.float\(\)"):
        kc.export_onnx(kc.GRU(12, 8).double(), target, torch.randn(2, 3, 12).double())
    with pytest.raises(kc.CheckpointError, match="bidirectional"):
        kc.export_onnx(kc.GRU(12, 8, bidirectional=True), target, torch.randn(2, 12), streaming=True)
    with pytest.raises(kc.CheckpointError, match="LSTM or GRU"):
        kc.export_onnx(nn.Linear(2, 2), target, torch.randn(2, 2), streaming=True)
    with pytest.raises(kc.ShapeError, match="one time step"):
        kc.export_onnx(kc.GRU(12, 8), target, torch.randn(2, 3, 12), streaming=True)
    with pytest.raises(kc.ShapeError, match="one entry per input"):
        kc.export_onnx(kc.GRU(12, 8), target, torch.randn(2, 3, 12), dynamic=[])
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(kc.CheckpointError, match=r"pip install 'kronecell\[export\]'"):
        kc.export_onnx(kc.GRU(12, 8), target, torch.randn(2, 3, 12))


def test_a_narrow_u_is_two_products_where_that_is_faster(tmp_path: Path) -> None:
    """Few units: one node with a dense U. Many: a Scan, whose two matrices are all that the file holds of U."""
    torch.manual_seed(0)
    for size, node in ((32, "LSTM"), (384, "Scan")):
        rnn = kc.LSTM(12, size, hidden_format="lowrank:r=4", shared=True).eval()
        report = kc.export_onnx(rnn, tmp_path / "rnn.onnx", torch.randn(2, 2, 12))
        assert report.operators[node] == 1 and not {"Einsum", "LSTM", "Scan"} - {node} & {*report.operators}


@pytest.mark.parametrize("bits", [3, 8])
@pytest.mark.parametrize("group", ["row", 7, None])
def test_integers_stay_integers(bits: int, group: object, tmp_path: Path) -> None:
    """A byte for every weight, scales, and nodes that make floats of them; the answers are the quantized module's."""
    import onnx

    torch.manual_seed(0)
    model = torch.nn.Sequential(kc.TensorLinear("tt:m=8x12,n=8x8,r=6"), torch.nn.Linear(64, 40)).eval()
    small = kc.quantize(model, bits=bits, group=group)
    report = kc.export_onnx(small, tmp_path / "small.onnx", torch.randn(3, 96))
    integers = [part for part in small.modules() if hasattr(part, "integers")]
    file = onnx.load(tmp_path / "small.onnx")
    stored = [t for t in file.graph.initializer if t.data_type == onnx.TensorProto.INT8]
    assert report.operators["DequantizeLinear"] == len(stored) == len(integers) >= 2
    weights = sum(part.num_weights for part in integers)
    assert weights <= sum(onnx.numpy_helper.to_array(t).size for t in stored) <= 1.2 * weights
    floats = [t for t in file.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    assert sum(onnx.numpy_helper.to_array(t).size for t in floats) < weights  # biases, small factors and scales
    assert report.difference < 1e-5


def test_a_quantized_recurrence_keeps_its_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rnn = torch.nn.LSTM(24, 32).eval()
    sizes = [
        kc.export_onnx(module, tmp_path / "rnn.onnx", torch.randn(4, 2, 24)).size
        for module in (kc.LSTM.from_dense(rnn), kc.quantize(rnn, bits=8))
    ]
    assert sizes[1] < sizes[0] / 2
