"""Saved modules: bit for bit, checked when read, and never half written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import kronecell as kc
from kronecell.deploy.atomic import remove_temporaries
from kronecell.deploy.modules import CONFIG, TENSORS
from tests.nn.ecosystem_cases import grown


def modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "linear": kc.TensorLinear("kcp:m=3x4x2,n=2x4x2,K=2,CA=2x1,CB=1x2", gates=2, shared=("A1", "B2"), bias=False),
        "tree": kc.TensorLinear("tt:m=3x4,n=2x4,r=2", order=(("x", "G2"), "G1"), dtype=torch.float64),
        "lstm": kc.LSTM(
            24, 16, 2, batch_first=True, bidirectional=True, proj_size=4, dropout=0.25, shared=True, forget_bias=1.0,
            input_format=["kcp:K=2,CA=2,CB=2,tie=all", None], hidden_format="tt:r=2", hidden_shared=False,
        ),
        "gru": kc.GRU(23, 16, bias=False, input_format="tt:r=2", pad_input=True, recurrence="loop").bfloat16(),
        "doped": grown(kc.LSTM(24, 16, input_format="doped:0.05+kcp:K=2,CA=2,CB=2", hidden_format="doped:0.02+kt:K=1")),
        "dense": kc.LSTM(6, 5),
    }  # fmt: skip


@pytest.mark.parametrize("name", [*modules()])
def test_a_saved_module_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    module = modules()[name]
    kc.save(module, tmp_path / "model")
    loaded = kc.load(tmp_path / "model")
    assert type(loaded) is type(module) and repr(loaded) == repr(module)
    ours, theirs = loaded.state_dict(), module.state_dict()
    assert [*ours] == [*theirs]
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype and torch.equal(tensor, theirs[key])
    width = module.in_features if isinstance(module, kc.TensorLinear) else module.input_size
    x = torch.randn(2, 3, width, dtype=next(module.parameters()).dtype)
    a, b = (m.eval()(x) for m in (module, loaded))
    assert torch.equal(a, b) if isinstance(a, torch.Tensor) else torch.equal(a[0], b[0])


def test_the_config_says_everything_in_words(tmp_path: Path) -> None:
    kc.save(modules()["lstm"], tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    arguments = config["modules"][""]["arguments"]
    assert arguments["input_format"] == ["kcp:m=6x4,n=4x4,K=2,CA=2,CB=2,tie=all", None]
    assert arguments["shared"] is True and arguments["order"] == "auto" and arguments["proj_size"] == 4
    assert config["init"] == 1 and config["kronecell_file"] == 1
    assert config["tensors"]["weight_ih_l0.A1"] == {"shape": [4, 2, 6, 2], "dtype": "float32"}
    assert {file.name for file in tmp_path.iterdir()} == {CONFIG, TENSORS}


class Classifier(nn.Module):
    def __init__(self, recipe: str = "tt:r=2") -> None:
        super().__init__()
        self.rnn = kc.GRU(24, 16, input_format=recipe)
        self.head = nn.Linear(16, 3)


def test_a_model_with_our_layers_inside_is_filled(tmp_path: Path) -> None:
    model, other = Classifier(), Classifier()
    kc.save(model, tmp_path)
    assert kc.load(tmp_path, into=other) is other
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(kc.CheckpointError, match="into=module"):
        kc.load(tmp_path)
    with pytest.raises(kc.CheckpointError, match="'rnn' differs"):
        kc.load(tmp_path, into=Classifier("tt:r=3"))
    with pytest.raises(kc.CheckpointError, match=r"head\.bias"):
        broken = Classifier()
        broken.head = nn.Linear(16, 3, bias=False)
        kc.load(tmp_path, into=broken)


def test_tied_parameters_are_saved_and_come_back_tied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = (nn.ModuleList([kc.TensorLinear("tt:m=3x4,n=2x4,r=2")] * 2) for _ in range(2))
    assert not torch.equal(model[0].G1, other[0].G1)
    kc.save(model, tmp_path)
    kc.load(tmp_path, into=other)
    assert other[0].G1 is other[1].G1
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return kc.save(kc.GRU(12, 8, input_format="tt:r=2"), tmp_path / "gru")


def rewrite(folder: Path, change: Any) -> None:
    """Change the tensors but keep the digest of the config."""
    from safetensors import safe_open

    with safe_open(folder / TENSORS, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS, metadata)


def edit_config(folder: Path, change: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    change(config)
    (folder / CONFIG).write_text(json.dumps(config))


def sign(folder: Path) -> None:
    """Make the tensors those of the config as it is now: what somebody does who means harm."""
    digest = hashlib.sha256((folder / CONFIG).read_bytes()).hexdigest()
    save_file(load_file(folder / TENSORS), folder / TENSORS, {"config_sha256": digest})


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / TENSORS).read_bytes())
    content[-3] ^= 4
    (folder / TENSORS).write_bytes(content)


def truncate(folder: Path) -> None:
    file = folder / TENSORS
    file.write_bytes(file.read_bytes()[:-100])


DAMAGE = {
    "non-finite": (lambda f: rewrite(f, lambda t: t["bias_hh_l0"].fill_(float("nan"))), "bias_hh_l0 has values"),
    "missing": (lambda f: rewrite(f, lambda t: t.pop("weight_ih_l0.G1")), r"missing tensors weight_ih_l0\.G1"),
    "extra": (lambda f: rewrite(f, lambda t: t.update(more=torch.zeros(1))), "do not belong: more"),
    "wrong shape": (
        lambda f: rewrite(f, lambda t: t.update(bias_hh_l0=torch.zeros(23))),
        r"bias_hh_l0: expected \(24,\) float32, got \(23,\) float32",
    ),
    "wrong dtype": (lambda f: rewrite(f, lambda t: t.update(bias_hh_l0=torch.zeros(24).half())), "got .* float16"),
    "truncated": (truncate, "damaged or truncated"),
    "one bit": (flip_a_bit, "do not match their digest"),
    "header": (lambda f: (f / TENSORS).write_bytes(b"\xff" * 64), "damaged or truncated"),
    "no tensors": (lambda f: (f / TENSORS).unlink(), "model.safetensors is missing"),
    "no config": (lambda f: (f / CONFIG).unlink(), "config.json is missing"),
    "config not json": (lambda f: (f / CONFIG).write_text("{"), "not JSON"),
    "config of somebody else": (lambda f: (f / CONFIG).write_text("{}"), "not written by kronecell"),
    "newer": (lambda f: edit_config(f, lambda c: c.update(kronecell_file=99)), "install a newer"),
    "edited": (lambda f: edit_config(f, lambda c: c["modules"][""]["arguments"].update(order="optimal")), "edited"),
    "config without tensors": (lambda f: edit_config(f, lambda c: c.pop("tensors")), "is missing"),
}


@pytest.mark.parametrize("name", [*DAMAGE])
def test_damage_is_named(name: str, folder: Path) -> None:
    kc.load(folder)
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises(kc.CheckpointError, match=message):
        kc.load(folder)


def test_a_config_that_contradicts_the_tensors_is_refused(folder: Path) -> None:
    """Even one with the right digest: the tensors must be those of the module the config builds."""
    edit_config(folder, lambda c: c["modules"][""]["arguments"].update(hidden_size=4, input_format=[None]))
    sign(folder)
    with pytest.raises(kc.CheckpointError, match="missing tensors weight_ih_l0"):
        kc.load(folder)


def test_a_module_that_has_diverged_is_not_saved_over_a_good_one(folder: Path) -> None:
    rnn = kc.load(folder)
    with torch.no_grad():
        rnn.weight_ih_l0.G1[0] = float("inf")
    with pytest.raises(kc.CheckpointError, match=r"weight_ih_l0\.G1"):
        kc.save(rnn, folder)
    kc.load(folder)


def test_a_failed_write_leaves_the_old_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(kc.KronecellError, match="No space left"):
        kc.save(kc.GRU(12, 8), folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_path_that_cannot_be_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(kc.CheckpointError, match="cannot save into"):
        kc.save(kc.GRU(12, 8), tmp_path / "file")
    with pytest.raises(kc.CheckpointError, match="is missing"):
        kc.load(tmp_path / "nowhere")


def test_temporaries_of_killed_writers_go_whoever_named_them(tmp_path: Path) -> None:
    for name in (".tmp-123-checkpoint.safetensors", ".tmpMHi2Ox", "checkpoint-1.safetensors", ".hidden"):
        (tmp_path / name).touch()  # the second is how safetensors names what it has not finished
    remove_temporaries(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "checkpoint-1.safetensors"]
