"""compress: rules, budgets and errors do what they say, the report's numbers are true, wrong input fails loudly."""

from __future__ import annotations

import copy
import json
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typer import Typer
from typer.testing import CliRunner

import kronecell as kc
from kronecell.cli.compress import compress, inspect


class Model(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU] = nn.LSTM) -> None:
        super().__init__()
        self.rnn = kind(16, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.rnn(x)[0]).mean(1))


def model(kind: type[nn.LSTM] | type[nn.GRU] = nn.LSTM) -> Model:
    torch.manual_seed(0)
    return Model(kind)


def inputs(count: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 7, 16, generator=generator) * torch.linspace(1, 0.05, 16)


RULES = {"rnn": "tt:r=3", "rnn.weight_hh_l*": "lowrank:r=3", "head": "lowrank:r=2"}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_the_report_is_true(kind: type[nn.LSTM] | type[nn.GRU]) -> None:
    original = model(kind)
    kept = copy.deepcopy(original.state_dict())
    x = inputs()
    small, report = kc.compress(original, RULES, calibration=x, rows=96)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in original.state_dict().items())
    assert small(x).shape == (6, 8)
    assert [layer.name for layer in report.layers] == [
        "rnn.weight_ih_l0", "rnn.weight_hh_l0", "rnn.weight_ih_l1", "rnn.weight_hh_l1", "head.weight",
    ]  # fmt: skip
    dense = small.rnn.to_dense().requires_grad_(False)
    original.requires_grad_(False)
    for layer in report.layers[:4]:
        names = [layer.name.removeprefix("rnn.") + end for end in ("", "_reverse")]
        old = torch.cat([getattr(original.rnn, name) for name in names]).double()
        new = torch.cat([getattr(dense, name) for name in names]).double()
        assert layer.error == pytest.approx(float((old - new).norm() / old.norm()), rel=1e-4)
        assert layer.params_before == old.numel() == prod(layer.shape)
        stored = [p for name in names for p in getattr(small.rnn, name).parameters()]
        assert layer.params_after == sum(p.numel() for p in stored)
        assert layer.latency_ms_after > 0
    with torch.no_grad():
        assert sum(layer.macs_after for layer in report.layers[:4]) == kc.count(small.rnn).macs
    first = report.layers[0]
    X = x.reshape(-1, 16)
    old, new = (
        torch.cat([getattr(net, f"weight_ih_l0{end}") for end in ("", "_reverse")]) for net in (original.rnn, dense)
    )
    seen = float((X @ (old - new).T).norm() / (X @ old.T).norm())
    assert first.calibration_error == pytest.approx(seen, rel=1e-4)
    assert report.model_params_before == sum(p.numel() for p in original.parameters())
    assert report.model_params_after == sum(p.numel() for p in small.parameters())
    assert report.model_params_before - report.model_params_after == report.params_before - report.params_after
    record = json.loads(report.to_json())
    assert record["totals"]["model_ratio"] == pytest.approx(report.model_ratio)
    assert "whole model" in str(report) and "rnn.weight_hh_l1" in str(report)


def test_calibration_lowers_the_error_that_the_data_sees() -> None:
    original, x = model(), inputs(20)
    plain, _ = kc.compress(original, RULES)
    _, aware = kc.compress(original, RULES, calibration=x)
    dense = plain.rnn.to_dense().requires_grad_(False)
    original.requires_grad_(False)
    X = x.reshape(-1, 16)
    ends = ("", "_reverse")
    old, new = (torch.cat([getattr(net, f"weight_ih_l0{end}") for end in ends]) for net in (original.rnn, dense))
    plain_error = float((X @ (old - new).T).norm() / (X @ old.T).norm())
    assert aware.layers[0].calibration_error is not None
    assert aware.layers[0].calibration_error < plain_error


def test_a_matrix_of_the_given_rank_keeps_its_function_and_a_useless_rank_is_refused() -> None:
    torch.manual_seed(0)
    low = nn.Linear(24, 24, bias=False).double()
    with torch.no_grad():
        low.weight.copy_(torch.randn(24, 3, dtype=torch.float64) @ torch.randn(3, 24, dtype=torch.float64))
    net = nn.Sequential(low)
    small, report = kc.compress(net, {"0": "lowrank:r=3"})
    assert report.layers[0].error < 1e-12
    probe = torch.randn(5, 24, dtype=torch.float64)
    torch.testing.assert_close(small(probe), net(probe))
    with pytest.raises(kc.KronecellError, match="not fewer than the dense"):
        kc.compress(net, {"0": "lowrank:r=12"})


@pytest.mark.parametrize("budget", [0.3, 1500])
def test_a_budget_is_kept_and_distributed(budget: float) -> None:
    original = model()
    small, report = kc.compress(original, {"*": "lowrank|tt", "rnn.weight_hh_l*": "lowrank"}, budget=budget)
    allowed = budget if isinstance(budget, int) else int(budget * report.params_before)
    assert 0.5 * allowed < report.params_after <= allowed
    assert len({layer.format for layer in report.layers}) > 1
    assert small(inputs()).shape == (6, 8)


def test_a_larger_budget_has_a_smaller_error() -> None:
    totals = []
    for budget in (0.2, 0.4, 0.7):
        _, report = kc.compress(model(), {"*": "lowrank", "rnn.weight_hh_l*": "lowrank"}, budget=budget)
        totals.append(sum(layer.error**2 for layer in report.layers))
    assert totals[0] > totals[1] > totals[2]


def test_an_error_is_kept_by_every_matrix() -> None:
    _, report = kc.compress(model(), {"rnn": "lowrank|tt", "head": "lowrank"}, error=0.7)
    assert all(layer.error <= 0.7 for layer in report.layers)
    assert report.params_after < report.params_before


def test_our_own_layers_are_compressed_again_and_single_layers_too() -> None:
    once, _ = kc.compress(model(), {"rnn": "tt:r=6"})
    twice, report = kc.compress(once, {"rnn": "tt:r=2"})
    assert report.layers[0].params_before == 2 * 4 * 16 * 12
    assert sum(p.numel() for p in twice.parameters()) < sum(p.numel() for p in once.parameters())
    alone, _ = kc.compress(nn.Linear(24, 24), {"": "lowrank:r=2"})
    assert isinstance(alone, kc.TensorLinear)


def test_a_module_used_twice_is_replaced_in_both_places() -> None:
    net = nn.ModuleDict({"a": nn.Linear(24, 24)})
    net["b"] = net["a"]
    small, _ = kc.compress(net, {"a": "lowrank:r=2"})
    assert isinstance(small["a"], kc.TensorLinear) and small["a"] is small["b"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(30, 12), nn.Linear(12, 30)
        self.head.weight = self.table.weight


@pytest.mark.parametrize(
    ("net", "rules", "options", "message"),
    [
        (model(), {"encoder": "tt:r=2"}, {}, "matches nothing; there are head"),
        (model(), {"norm": "tt:r=2"}, {}, "LayerNorm, which cannot be compressed"),
        (model(), {"rnn": "tt"}, {}, "has no ranks"),
        (model(), {"rnn": "tx|tt"}, {"budget": 0.5}, "unknown format tx"),
        (model(), None, {}, "needs rules"),
        (model(), RULES, {"budget": 0.5, "error": 0.1}, "not both"),
        (model(), RULES, {"error": 1.5}, "between 0 and 1"),
        (model(), {"rnn": "lowrank"}, {"budget": 20}, "budget"),
        (Tied(), {"head": "lowrank:r=2"}, {}, "shares its weight with table"),
        (model(), {"head": "lowrank:r=2"}, {"calibration": {"rnn": torch.zeros(2, 3, 16)}}, "which no rule matches"),
    ],
)
def test_what_cannot_be_done_fails_loudly(
    net: nn.Module, rules: dict[str, str] | None, options: dict[str, object], message: str
) -> None:
    with pytest.raises(kc.KronecellError, match=message):
        kc.compress(net, rules, **options)  # type: ignore[arg-type]


# The command line -----------------------------------------------------------------------------------------------


def cli() -> Typer:
    app = Typer()
    app.command("compress")(compress)
    app.command("inspect")(inspect)
    return app


def test_a_state_dict_is_inspected_and_compressed_from_the_shell(tmp_path: Path) -> None:
    original = model()
    source, out = tmp_path / "model.safetensors", tmp_path / "small"
    save_file(original.state_dict(), source)
    np.save(tmp_path / "x.npy", inputs().numpy())
    listed = json.loads(CliRunner().invoke(cli(), ["inspect", str(source), "--json"]).stdout)
    assert listed["params"] == sum(p.numel() for p in original.parameters())
    assert [entry["name"] for entry in listed["matrices"]][:2] == ["rnn.weight_ih_l0", "rnn.weight_hh_l0"]
    assert "tt:" in CliRunner().invoke(cli(), ["inspect", str(source), "--ratio", "3"]).stdout
    rules = [part for name, recipe in RULES.items() for part in ("--rule", f"{name}={recipe}")]
    done = CliRunner().invoke(
        cli(), ["compress", str(source), str(out), *rules, "--calibration", str(tmp_path / "x.npy"), "--json"]
    )
    assert done.exit_code == 0, done.output
    record = json.loads((out / "compression.json").read_text())
    assert record["totals"]["model_params_before"] == listed["params"]
    assert all(layer["calibration_error"] is not None for layer in record["layers"] if "rnn" in layer["name"])
    expected, _ = kc.compress(original, RULES)
    again = kc.load(out, into=expected)
    assert again(inputs()).shape == (6, 8)
    second = CliRunner().invoke(cli(), ["compress", str(out), str(tmp_path / "b"), "--rule", "head=lowrank:r=1"])
    assert second.exit_code == 0, second.output


def test_a_pickle_is_read_only_when_allowed_and_never_runs_code(tmp_path: Path) -> None:
    source, out = tmp_path / "model.pt", tmp_path / "small"
    torch.save({"state_dict": model().state_dict()}, source)
    arguments = ["compress", str(source), str(out), "--rule", "head=lowrank:r=2"]
    refused = CliRunner().invoke(cli(), arguments)
    assert isinstance(refused.exception, kc.CheckpointError) and "--allow-pickle" in str(refused.exception)
    assert CliRunner().invoke(cli(), [*arguments, "--allow-pickle"]).exit_code == 0
    evil = tmp_path / "evil.pt"
    torch.save(model(), evil)  # a whole module: needs code to be loaded
    broken = CliRunner().invoke(cli(), ["inspect", str(evil), "--allow-pickle"])
    assert isinstance(broken.exception, kc.CheckpointError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "rnn"], "expected NAME=RECIPE"),
        (["--rule", "rnnn=tt:r=2"], "matches nothing"),
        (["--rule", "rnn=tt:r=2", "--calibration", "wide.npy"], "has width 5"),
        (["--rule", "rnn=tt:r=2", "--calibration", "missing.npy"], "cannot read calibration data"),
        ([], "needs rules"),
    ],
)
def test_wrong_usage_is_an_error_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(model().state_dict(), "model.safetensors")
    np.save("wide.npy", np.zeros((3, 5)))
    done = CliRunner().invoke(cli(), ["compress", "model.safetensors", "out", *arguments])
    assert isinstance(done.exception, kc.KronecellError) and message in str(done.exception)
    assert not Path("out").exists()


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"not a tensor in sight")
    for path in (bad, tmp_path / "absent.safetensors"):
        done = CliRunner().invoke(cli(), ["inspect", str(path)])
        assert isinstance(done.exception, kc.CheckpointError)
    state = model().state_dict()
    state["rnn.weight_ih_l1"] = state["rnn.weight_ih_l1"][:, :5].clone()
    save_file(state, tmp_path / "odd.safetensors")
    done = CliRunner().invoke(cli(), ["inspect", str(tmp_path / "odd.safetensors")])
    assert isinstance(done.exception, kc.CheckpointError) and "weight_ih_l1: expected" in str(done.exception)
