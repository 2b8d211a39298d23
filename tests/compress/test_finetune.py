"""kc.finetune: what is lost comes back, integers that were trained are what is returned, runs continue bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kronecell as kc
from kronecell.nn.aware import Rounding


class Counter(nn.Module):
    """Says how many of its inputs were positive so far, in four classes."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 24, batch_first=True)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 8, 6, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, :, 0] > 0).cumsum(1).clamp(max=3)


class Loader:
    """Batches in an order drawn from torch's generator, as a shuffling DataLoader has."""

    def __init__(self, x: Tensor, y: Tensor, size: int = 32) -> None:
        self.x, self.y, self.size = x, y, size

    def __len__(self) -> int:
        return len(self.x) // self.size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in torch.randperm(len(self.x)).split(self.size):
            yield self.x[index], self.y[index]


def task(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    torch.manual_seed(0)
    model, _ = kc.finetune(Counter(), None, Loader(*data(512, 1)), loss=task, epochs=12, lr=1e-2)
    return model


def loss_of(model: nn.Module) -> float:
    x, y = data(256, 2)
    with torch.no_grad():
        return float(task(model(x), y))


def lost(model: nn.Module, trained: nn.Module) -> float:
    return loss_of(model) - loss_of(trained)


RULES = {"rnn": "lowrank:r=1 shared", "rnn.weight_hh_l0": "lowrank:r=2 shared"}
LOADER, VALID = Loader(*data(512, 1)), [data(128, 3)]


def test_training_makes_good_what_was_lost(trained: nn.Module) -> None:
    cut, _ = kc.compress(trained, RULES)
    back, report = kc.compress(trained, RULES, train=LOADER, loss=task, valid=VALID, training={"epochs": 4, "lr": 1e-2})
    assert lost(back, trained) < 0.5 * lost(cut, trained)
    assert isinstance(back.rnn, kc.GRU) and not back.training
    assert report.layers[0].params_after < report.layers[0].params_before


@pytest.mark.parametrize("match", ["kl", "mse", "function"])
def test_a_teacher_is_enough(trained: nn.Module, match: str) -> None:
    cut, _ = kc.compress(trained, RULES)
    how: Any = (lambda ours, theirs: (ours - theirs).abs().mean()) if match == "function" else match
    inputs = [x for x, _ in LOADER]
    back, _ = kc.finetune(cut, trained, inputs, epochs=4, lr=1e-2, match=how, hidden=0.5 if match == "mse" else 0.0)
    assert lost(back, trained) < 0.5 * lost(cut, trained)


def test_training_with_rounded_weights_returns_those_very_integers(trained: nn.Module) -> None:
    rounded = kc.quantize(trained, bits=3)
    small, _ = kc.finetune(trained, trained, LOADER, loss=task, epochs=4, lr=3e-3, bits=3)
    assert {row.bits for row in small.quantization.matrices} == {3}
    assert small.quantization.bytes_after == rounded.quantization.bytes_after
    assert lost(small, trained) < 0.5 * lost(rounded, trained)


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 5, 4, 3, {"rnn.weight_hh_l0": 4}, {"*": 6, "head": 3}])
@pytest.mark.parametrize("group", [None, "row", 16])
def test_what_is_computed_in_training_is_what_the_integers_compute(bits: Any, group: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(40, 24), kc.LSTM(24, 20, input_format="tt:r=3", hidden_format="lowrank:r=9", hidden_shared=True)
    )
    net.add_module("head", Counter())
    net = nn.ModuleDict({"rnn": kc.GRU(24, 20, input_format="lowrank:r=9"), "head": nn.Linear(20, 30),
                         "table": nn.Embedding(40, 24)}) if isinstance(bits, dict) else net[:2]  # fmt: skip
    rounding = Rounding(net, bits, group)
    for name, parameter in rounding.named_parameters():
        parameter.add_(0.03 * torch.randn(parameter.shape), alpha=1.0 if name else 0.0)  # as training does
    weights, small = rounding.weights(net), rounding.quantized(net)
    floats = dict(kc.dequantize(small).named_parameters())
    assert {*weights} <= {*floats}
    for name, weight in weights.items():
        torch.testing.assert_close(floats[name], weight, rtol=1e-6, atol=1e-7)


def test_gradients_pass_through_rounding_where_nothing_is_cut_off() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 16)
    rounding = Rounding(layer, 4, "row")
    weight = rounding.weights(layer)["weight"]
    wanted = torch.randn_like(weight)
    (weight * wanted).sum().backward()
    levels = layer.weight.detach() / rounding.scales("")
    inside = (levels > -8) & (levels < 7)
    assert layer.weight.grad is not None and 0.5 < float(inside.float().mean()) <= 1
    torch.testing.assert_close(layer.weight.grad[inside], wanted[inside])
    assert float(layer.weight.grad[~inside].abs().sum()) == 0.0


class Stop(Exception):
    pass


@pytest.mark.parametrize("bits", [None, 4])
def test_a_run_that_was_killed_continues_bit_for_bit(trained: nn.Module, tmp_path: Path, bits: int | None) -> None:
    cut, _ = kc.compress(trained, {"rnn.weight_hh_l0": "lowrank:r=6 shared"})
    options: dict[str, Any] = {"loss": task, "valid": VALID, "epochs": 2, "eval_every": 7, "bits": bits, "seed": 3}
    whole, report = kc.finetune(cut, trained, LOADER, **options)

    def kill(line: str) -> None:
        if line.startswith("step 21"):
            raise Stop

    with pytest.raises(Stop):
        kc.finetune(cut, trained, LOADER, **options, folder=tmp_path, progress=kill)
    again, resumed = kc.finetune(cut, trained, LOADER, **options, folder=tmp_path)
    assert [row["validation"] for row in resumed.history] == [row["validation"] for row in report.history]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_the_best_state_is_kept_and_training_stops_early(trained: nn.Module) -> None:
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    model, report = kc.finetune(
        trained, None, LOADER, loss=task, valid=VALID, epochs=30, lr=0.3, clip_norm=0.0, patience=2, eval_every=2
    )
    assert len(report.history) < 30 * len(LOADER) // 2
    assert report.best == min(row["validation"] for row in report.history)
    with torch.no_grad():
        assert float(task(model(VALID[0][0]), VALID[0][1])) == pytest.approx(report.best, rel=1e-5)
    assert "kept" in str(report)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained.state_dict().items())


def test_a_ratio_can_be_reached_by_stages(trained: nn.Module, tmp_path: Path) -> None:
    lines: list[str] = []
    training = {"steps": 6, "folder": tmp_path}
    small, report = kc.compress(
        trained, size=0.45, train=LOADER, loss=task, stages=2, training=training, progress=lines.append
    )
    again, _ = kc.compress(trained, size=0.45, train=LOADER, loss=task, stages=2, training=training)  # reads it
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in small.state_dict().items())
    assert report.model_bytes_after <= 0.45 * report.model_bytes_before
    assert [line for line in lines if line.startswith("stage")] == ["stage 1 of 2: training", "stage 2 of 2: training"]
    assert loss_of(small) < 2.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": None, "teacher": None}, "a teacher, a loss, or both"),
        ({"loader": iter([])}, "only once"),
        ({"epochs": 0}, "epochs must be"),
        ({"soft": 2.0}, "soft must be"),
        ({"match": "cosine"}, "match must be"),
        ({"bits": 2}, "bits must be"),
        ({"valid": []}, "validation loader is empty"),
        ({"hidden": 1.0, "teacher": nn.Linear(6, 4)}, "no recurrent layer of the same name"),
    ],
)
def test_wrong_settings_are_refused(trained: nn.Module, options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"teacher": trained, "loader": LOADER, "loss": task} | options
    with pytest.raises(kc.KronecellError, match=message):
        kc.finetune(copy.deepcopy(trained), given.pop("teacher"), given.pop("loader"), **given)
    with pytest.raises(kc.KronecellError, match="integers do not train"):
        kc.finetune(kc.quantize(trained), trained, LOADER, loss=task)
    with pytest.raises(kc.KronecellError, match="stages need a budget"):
        kc.compress(trained, {"head": "lowrank:r=1"}, train=LOADER, loss=task, stages=2)
