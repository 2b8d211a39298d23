"""Tables of rows among the matrices that are compressed: by rule, budget, size and error, and in the shell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import kronecell as kc
from kronecell.compress.matrices import matrices_of
from kronecell.nn.quantize import bytes_of
from tests.compress.shell import run


class Speller(nn.Module):
    def __init__(self, padding: int | None = 0) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 24, padding_idx=padding)
        self.rnn = nn.GRU(24, 24, batch_first=True)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.table(x))[0])


def speller(**options: Any) -> Speller:
    torch.manual_seed(0)
    return Speller(**options).eval()


def words() -> Tensor:
    return torch.randint(300, (8, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rule", ["lowrank:r=4", "tt:r=3", "tt:m=20x15,n=6x4,r=4", "kcp:K=2,CA=2,CB=2"])
def test_a_rule_makes_a_table_of_its_format(rule: str) -> None:
    net, x = speller(), words()
    small, report = kc.compress(net, {"table": rule}, calibration=x)
    (layer,) = report.layers
    assert isinstance(small.table, kc.TensorEmbedding) and isinstance(net.table, nn.Embedding)
    assert layer.name == "table.weight" and layer.params_after == small.table.num_params
    lost = float((small.table.dense_weight() - net.table.weight).detach().norm() / net.table.weight.norm().detach())
    assert layer.error == pytest.approx(lost, rel=1e-5)
    assert torch.equal(small.table(torch.tensor([0])), torch.zeros(1, 24))
    assert small(x).shape == net(x).shape


def test_a_recipe_reaches_tables_of_sizes_that_have_no_balanced_factors() -> None:
    net = nn.Sequential(nn.Embedding(1009, 16), nn.Linear(16, 4))
    small, _ = kc.compress(net, {"0": "tt:r=3"})
    assert small[0].format.M >= small[0].num_embeddings == 1009
    with pytest.raises(IndexError):
        small(torch.tensor([1009]))


@pytest.mark.parametrize("options", [{"budget": 0.3}, {"size": 0.12}, {"error": 0.7}, {"size": 0.12, "bits": ()}])
def test_tables_are_part_of_every_search(options: dict[str, Any]) -> None:
    net = speller()
    with torch.no_grad():
        net.table.weight[1:] = torch.randn(299, 3) @ torch.randn(3, 24)
    small, report = kc.compress(net, calibration=words(), **options)
    assert isinstance(small.table, kc.TensorEmbedding)
    table = next(layer for layer in report.layers if layer.name == "table.weight")
    assert "lowrank" in table.format and table.params_after < 0.3 * table.params_before
    if "size" in options:
        assert bytes_of(small) <= 0.12 * bytes_of(net)


def test_a_search_leaves_alone_what_no_format_can_hold() -> None:
    net = speller()
    with torch.no_grad():
        net.table.weight[0] = 1
    small, _ = kc.compress(net, budget=0.8)
    assert isinstance(small.table, nn.Embedding)
    with pytest.raises(kc.ShapeError, match="is not zero"):
        kc.compress(net, {"table": "lowrank:r=2"})


def test_a_compressed_table_is_trained_rounded_and_compressed_again(tmp_path: Path) -> None:
    net, x = speller(), words()
    small, _ = kc.compress(net, {"table": "lowrank:r=6"})
    trained, report = kc.finetune(small, net, [x], steps=20, lr=1e-2, bits=6)
    assert report.history[-1]["training"] < 0.5
    assert {part.bits for part in trained.table.quantized.values()} == {6}
    kc.save(trained, tmp_path / "small")
    torch.testing.assert_close(kc.load(tmp_path / "small", into=net)(x), trained(x))
    again, _ = kc.compress(small, {"table": "lowrank:r=3"})
    assert again.table.format.r == 3
    (matrix, *_) = matrices_of(small)
    assert matrix.is_compressed and matrix.stored_params == small.table.num_params


def test_in_a_state_dict_a_table_is_named(tmp_path: Path) -> None:
    net, x = speller(), words()
    file, out = str(tmp_path / "net.safetensors"), str(tmp_path / "small")
    save_file(net.state_dict(), file)
    run("compress", file, out, "--embedding", "table", "--rule", "table=tt:r=4")
    small = kc.load(out, into=net)
    assert isinstance(small.table, kc.TensorEmbedding) and small(x).shape == net(x).shape
    listed = json.loads(run("inspect", file, "--embedding", "table.weight", "--json").stdout)
    (table,) = [entry for entry in listed["matrices"] if entry["name"] == "table.weight"]
    assert table["kind"] == "Embedding" and 0 < table["error_of_low_rank"]["2x"] < table["error_of_low_rank"]["8x"] < 1
    assert "compressed" in run("inspect", out).stdout
    with pytest.raises(kc.CheckpointError, match="no table of rows"):
        run("inspect", file, "--embedding", "tabel")
