"""Weights from any place, and back: archives, graphs, state dicts under a key, folders that one line reads."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import kronecell as kc
from kronecell.compress.statefile import read_model
from tests.compress.shell import run


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(400, 24)
        self.rnn = nn.LSTM(24, 32, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(64, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.words(x))[0])


def tagger(seed: int = 0) -> Tagger:
    torch.manual_seed(seed)
    return Tagger().eval()


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        ["--rule", "rnn=tt:r=3", "--rule", "rnn.weight_hh_l*=lowrank:r=4 shared"],
        ["--size", "0.3"],
        ["--size", "0.3", "--bits", "8,4", "--rule", "rnn=lowrank", "--rule", "rnn.weight_hh_l*=lowrank"],
        ["--rule", "head=lowrank:r=2", "--bits", "5"],
    ],
)
def test_the_folder_is_read_by_one_line_into_the_model_that_was_compressed(tmp_path: Path, options: list[str]) -> None:
    net, x = tagger(), torch.randint(40, (3, 7))
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    run("compress", str(tmp_path / "model.safetensors"), str(tmp_path / "small"), *options)
    small = kc.load(tmp_path / "small", into=net)
    other = kc.load(tmp_path / "small", into=tagger(1))  # any weights will do
    assert torch.equal(small(x), other(x)) and small(x).shape == (3, 7, 12)
    assert not torch.equal(small(x), net(x)) and isinstance(net.rnn, nn.LSTM)
    stored = (tmp_path / "small" / "model.safetensors").stat().st_size
    assert stored < (tmp_path / "model.safetensors").stat().st_size
    mask = os.umask(0)
    os.umask(mask)
    for file in (tmp_path / "small").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~mask, file.name
    listed = json.loads(run("inspect", str(tmp_path / "small"), "--json").stdout)
    assert listed["bytes"] > 0


def test_a_model_that_differs_is_refused(tmp_path: Path) -> None:
    small, _ = kc.compress(tagger(), {"rnn": "lowrank:r=2", "head": "lowrank:r=2"})
    kc.save(small, tmp_path / "small")
    other = tagger()
    other.rnn = nn.LSTM(24, 16, num_layers=2, bidirectional=True, batch_first=True)
    with pytest.raises(kc.CheckpointError, match="'rnn' differs"):
        kc.load(tmp_path / "small", into=other)
    gru = tagger()
    gru.rnn = nn.GRU(24, 32, num_layers=2, bidirectional=True, batch_first=True)  # type: ignore[assignment]
    with pytest.raises(kc.CheckpointError, match="'rnn' differs"):
        kc.load(tmp_path / "small", into=gru)


@pytest.mark.parametrize("key", ["state_dict", "model_state", "weights"])
def test_a_state_dict_may_lie_under_a_key(tmp_path: Path, key: str) -> None:
    net = tagger()
    torch.save({key: net.state_dict(), "optimiser": {"state": {}}, "epoch": 3}, tmp_path / "model.pt")
    model = read_model(tmp_path / "model.pt", allow_pickle=True)
    assert torch.equal(model.rnn.weight_hh_l1_reverse, net.rnn.weight_hh_l1_reverse)


def test_an_archive_of_arrays_is_read_with_long_and_short_names(tmp_path: Path) -> None:
    rnn, head = nn.GRU(12, 10, batch_first=True), nn.Linear(10, 6)
    arrays = {f"enc_{name.replace('weight', 'w').replace('bias', 'b').removesuffix('_l0')}": tensor.detach().numpy()
              for name, tensor in rnn.named_parameters()}  # fmt: skip
    arrays |= {"fc_w": head.weight.detach().numpy(), "fc_b": head.bias.detach().numpy(), "emb": np.ones((3, 4), "f4")}
    np.savez(tmp_path / "model.npz", **arrays)
    model = read_model(tmp_path / "model.npz")
    assert isinstance(model.enc, nn.GRU) and isinstance(model.fc, nn.Linear)
    x = torch.randn(4, 2, 12)
    assert torch.equal(model.fc(model.enc(x)[0]), head(rnn(x)[0]))
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 not an archive")
    with pytest.raises(kc.CheckpointError, match=r"bad\.npz"):
        read_model(tmp_path / "bad.npz")


@torch.no_grad()
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_an_onnx_graph_is_read_with_gates_in_torchs_order(tmp_path: Path, kind: str) -> None:
    onnx = pytest.importorskip("onnx")
    from onnx import helper, numpy_helper

    torch.manual_seed(0)
    rnn = getattr(nn, kind)(6, 5, bidirectional=True, batch_first=True)
    order = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2)}[kind]  # torch's gates in ONNX's order

    def stacked(name: str) -> np.ndarray:
        found = [getattr(rnn, name + end).detach().chunk(len(order)) for end in ("", "_reverse")]
        return np.stack([torch.cat([parts[i] for i in order]).numpy() for parts in found])

    values = {"W": stacked("weight_ih_l0"), "R": stacked("weight_hh_l0"),
              "B": np.concatenate([stacked("bias_ih_l0"), stacked("bias_hh_l0")], 1),
              "M": np.random.default_rng(0).normal(size=(5, 3)).astype("f4")}  # fmt: skip
    nodes = [helper.make_node(kind, ["x", "W", "R", "B"], ["y", "h"], name="/enc/rnn"),
             helper.make_node("MatMul", ["h", "M"], ["z"], name="/out/MatMul")]  # fmt: skip
    graph = helper.make_graph(nodes, "g", [], [], [numpy_helper.from_array(v, k) for k, v in values.items()])
    onnx.save(helper.make_model(graph), str(tmp_path / "model.onnx"))
    model = read_model(tmp_path / "model.onnx")
    x = torch.randn(4, 2, 6)
    torch.testing.assert_close(model.enc.rnn(x)[0], rnn(x)[0])
    torch.testing.assert_close(model.out.MatMul(torch.eye(5)).numpy(), values["M"])
    (tmp_path / "bad.onnx").write_bytes(b"\xff\xff nothing")
    with pytest.raises(kc.CheckpointError, match=r"bad\.onnx"):
        read_model(tmp_path / "bad.onnx")


@torch.no_grad()
def test_a_keras_file_is_read_where_h5py_is_installed(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="the package h5py is not installed")
    torch.manual_seed(0)
    rnn = nn.GRU(6, 5, batch_first=True)
    turn = lambda tensor: torch.cat([tensor.chunk(3)[i] for i in (1, 0, 2)]).detach().numpy()  # noqa: E731
    with h5py.File(tmp_path / "model.h5", "w") as file:
        group = file.create_group("model_weights/gru/gru/gru_cell")
        group["kernel:0"], group["recurrent_kernel:0"] = turn(rnn.weight_ih_l0).T, turn(rnn.weight_hh_l0).T
        group["bias:0"] = np.stack([turn(rnn.bias_ih_l0), turn(rnn.bias_hh_l0)])
    model = read_model(tmp_path / "model.h5")
    x = torch.randn(4, 2, 6)
    torch.testing.assert_close(next(m for m in model.modules() if isinstance(m, nn.GRU))(x)[0], rnn(x)[0])


def test_inspect_shows_spectra_bytes_and_what_less_would_cost(tmp_path: Path) -> None:
    net = tagger()
    with torch.no_grad():  # of rank 3 for all gates together
        net.rnn.weight_ih_l0.copy_(torch.randn(128, 3) @ torch.randn(3, 24))
        net.rnn.weight_ih_l0_reverse.copy_(torch.randn(128, 3) @ torch.randn(3, 24))
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    found = json.loads(run("inspect", str(tmp_path / "model.safetensors"), "--json").stdout)
    first = found["matrices"][0]
    assert first["name"] == "rnn.weight_ih_l0" and first["rank_99"] <= 3
    assert first["error_of_low_rank"]["4x"] < 1e-5
    assert 0 < sum(entry["part_of_bytes"] for entry in found["matrices"]) < 1
    text = run("inspect", str(tmp_path / "model.safetensors")).stdout
    assert "rank 90%" in text and "8 bits" in text and "skipped: words" in text
