"""Doped layers: what is particular to a sparse part beside a structure; the rest are rows of the other tables."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import kronecell as kc
from kronecell.deploy.modules import TENSORS
from kronecell.deploy.tensorfile import write_tensors
from kronecell.nn.sparse import SparseMatrix
from kronecell.ops.kernels import register_width
from tests.nn.ecosystem_cases import grown

LARGE = {"input_format": "doped:0.05+kt:K=2", "hidden_format": "doped:0.05,block=4+tt:r=2"}


def large(cell: type = kc.LSTM) -> nn.Module:
    torch.manual_seed(0)
    return grown(cell(64, 64, **LARGE))


def entries_of(module: nn.Module) -> list[SparseMatrix]:
    return [part for part in module.modules() if isinstance(part, SparseMatrix)]


@pytest.mark.parametrize("cell", [kc.LSTM, kc.GRU, kc.LSTMCell, kc.GRUCell])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_values_are_integers_at_the_same_places(cell: type, bits: int, tmp_path: Path) -> None:
    module = large(cell).eval()
    small = kc.quantize(module, bits)
    for before, after in zip(entries_of(module), entries_of(small), strict=True):
        assert torch.equal(before.gaps, after.gaps)
        assert torch.equal(after.quantized["entries"].factor(), after.entries)
        assert (after.entries - before.entries).norm() < 2.0**-bits * 2 * before.entries.norm()
        assert after.quantized["entries"].num_bytes < before.entries.numel() * (bits / 8 + 0.3)
        assert "entries" not in dict(after.named_parameters())
    x = torch.randn(3, 64) if issubclass(cell, kc.LSTMCell | kc.GRUCell) else torch.randn(5, 3, 64)
    kc.save(small, tmp_path / "small")
    loaded, floats = kc.load(tmp_path / "small"), kc.dequantize(small)
    for other, tolerance in ((loaded, 0.0), (floats, 1e-6)):
        for a, b in zip(flat(other(x)), flat(small(x)), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
    assert all(isinstance(part.entries, nn.Parameter) for part in entries_of(floats))


def flat(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for part in result for t in flat(part)]  # type: ignore[attr-defined]


def test_indices_of_a_file_that_lead_out_of_the_matrix_are_refused(tmp_path: Path) -> None:
    kc.save(large(), tmp_path)
    tensors = load_file(tmp_path / TENSORS)
    metadata = {"config_sha256": _digest(tmp_path)}
    tensors["weight_hh_l0.sparse.gaps"].fill_(255)
    write_tensors(tmp_path / TENSORS, tensors, metadata)
    with pytest.raises(kc.CheckpointError, match="the indices of a sparse matrix lead out of it"):
        kc.load(tmp_path)


def _digest(folder: Path) -> str:
    from safetensors import safe_open

    with safe_open(folder / TENSORS, framework="pt") as file:
        return str(file.metadata()["config_sha256"])


@pytest.mark.parametrize("form", ["kt:K=2", "tt:r=2", "lowrank:r=2"])
def test_co_matrix_dropout_drops_one_or_the_other_and_is_right_on_average(form: str) -> None:
    torch.manual_seed(0)
    rnn = grown(kc.LSTM(64, 64, hidden_format=f"doped:0.05+{form}", input_format=f"doped:0.05+{form}"))
    x = torch.randn(1, 2, 64)
    rnn.eval()
    plain = [t.clone() for t in flat(rnn(x))]
    for part in entries_of(rnn):
        part.drop = 1.0
    assert all(torch.equal(a, b) for a, b in zip(flat(rnn(x)), plain, strict=True))  # not in eval mode
    rnn.train()
    layer = rnn.weight_ih_l0
    structure, S, dense = layer.structure_weight(), layer.sparse.dense(), layer.dense_weight()
    rows = torch.randn(40, 64)
    total = torch.zeros(40, 256)
    for _ in range(400):
        y = layer(rows)
        of_structure, of_S = rows @ structure.t() * 2, rows @ S.t() * 2
        which = torch.stack([(y - of_structure).abs().amax(0), (y - of_S).abs().amax(0)])
        assert which.amin(0).max() < 1e-4  # every output is one of the two, twice
        total += y.detach() / 400
    assert (total - rows @ dense.t()).norm() < 0.15 * total.norm()
    assert len({float(flat(rnn(x))[0].detach().sum()) for _ in range(4)}) == 4


def test_a_doped_cell_is_a_layer_of_one_step() -> None:
    rnn = large()
    cell = kc.LSTMCell(64, 64, **LARGE)
    cell.load_state_dict({name.replace("_l0", ""): tensor for name, tensor in rnn.state_dict().items()})
    x = torch.randn(3, 2, 64)
    state = None
    for step in x:
        state = cell(step, state)
    torch.testing.assert_close(state[0], rnn(x)[0][-1], rtol=0, atol=1e-6)


def held(module: nn.Module) -> list[Tensor]:
    """What is prepared of the sparse parts of a frozen module."""
    return [buffer for buffer in module.buffers() if buffer.dtype == torch.int32 and buffer.numel()]


SINGLE = {"input_format": "doped:0.05+kt:K=2", "hidden_format": "doped:0.05+kt:K=1"}
FROZEN: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: kc.LSTM(64, 64, 2, bidirectional=True, **SINGLE),
    "gru": lambda: kc.GRU(64, 48, input_format="doped:0.05+kt:K=2", hidden_format="doped:0.05,block=3+lowrank:r=3"),
    "lstm cell": lambda: kc.LSTMCell(64, 64, **SINGLE),
    "gru cell": lambda: kc.GRUCell(64, 64, **SINGLE),
    "layer": lambda: kc.TensorLinear("doped:0.05+lowrank:m=64,n=80,r=2", gates=3),
    "projected": lambda: kc.LSTM(64, 64, proj_size=16, **SINGLE | {"hidden_format": "doped:0.05+lowrank:r=2"}),
}


def given(name: str, rows: int) -> Tensor:
    return torch.randn(rows, 64) if "cell" in name or name == "layer" else torch.randn(3, rows, 64)


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("rows", [1, 20, 100])
def test_what_is_frozen_of_a_sparse_part_gives_the_same_results(name: str, rows: int) -> None:
    torch.manual_seed(0)
    module = grown(FROZEN[name]()).eval()
    frozen, x = kc.freeze(module), given(name, rows)
    assert bool(held(frozen)) == (register_width() == 16) and not held(module)
    with torch.no_grad():
        for a, b in zip(flat(frozen(x)), flat(module(x)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        for twin in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen)), kc.freeze(frozen)):
            assert len(held(twin)) == len(held(frozen))
            assert all(torch.equal(a, b) for a, b in zip(flat(twin(x)), flat(frozen(x)), strict=True))


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("change", [kc.freeze, kc.quantize])
def test_loading_prepares_a_sparse_part_anew(name: str, change: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    module = grown(FROZEN[name]())
    twice = copy.deepcopy(module)
    for p in twice.parameters():
        p.detach().mul_(2)
    one, other = change(module), change(twice)
    before, x = held(one), given(name, 1)
    one.load_state_dict(other.state_dict())
    assert len(held(one)) == len(before)
    assert not any(torch.equal(a, b) for a, b in zip(held(one), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(flat(one(x)), flat(other(x)), strict=True))


def test_gradients_of_x_pass_what_is_prepared() -> None:
    torch.manual_seed(0)
    rnn = grown(kc.LSTM(64, 64, **SINGLE))
    found = []
    for module in (rnn, kc.freeze(rnn)):
        x = torch.ones(3, 2, 64, requires_grad=True)
        (gradient,) = torch.autograd.grad(module(x)[0].square().sum(), x)
        found.append(gradient)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(register_width() != 16, reason="only the widest registers have something to prepare")
def test_a_frozen_module_runs_on_a_processor_with_other_registers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    frozen, x = kc.freeze(grown(kc.LSTM(64, 64, **SINGLE))), torch.randn(3, 2, 64)
    torch.save((frozen, x, frozen(x)[0]), tmp_path / "frozen.pt")
    code = f"""
import torch, kronecell
frozen, x, y = torch.load({str(tmp_path / "frozen.pt")!r}, weights_only=False)
print((frozen(x)[0] - y).abs().max().item() < 1e-6)
"""
    for environment in ({"KRONECELL_WIDTH": "8"}, {"KRONECELL_WIDTH": "4"}, {"KRONECELL_KERNELS": "0"}):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize("build", [large, lambda: kc.TensorLinear("doped:0.1+kt:m=32,n=32,K=2")])
def test_sparse_parts_are_written_as_c(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    """The file is compared with the module before it is left, if there is a compiler."""
    exported = kc.export_c(build().eval(), tmp_path / "c")
    assert exported.check is None or exported.check.difference < 1e-5
    assert exported.source.is_file()
