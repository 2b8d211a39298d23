"""TensorEmbedding: the rows of the dense table are the oracle, for every format."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import kronecell as kc
from tests.cases import STRUCTURES, formats

SOME = ("tt:m=5x4x3,n=2x3x2,r=4", "lowrank:m=60,n=12,r=3", "kcp:m=6x10,n=3x4,K=2,CA=2,CB=2", "tr:m=6x10,n=3x4,r=2")


def table_of(fmt: Any, seed: int = 0, **options: Any) -> kc.TensorEmbedding:
    torch.manual_seed(seed)
    return kc.TensorEmbedding(fmt, dtype=torch.float64, **options)


def gradients(loss: Tensor, table: nn.Module) -> list[Tensor]:
    return [*torch.autograd.grad(loss, [*table.parameters()])]


@given(st.sampled_from(STRUCTURES).flatmap(formats), st.data())
def test_rows_and_gradients_are_those_of_the_dense_table(fmt: kc.Format, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, fmt.M), label="rows")
    padding = data.draw(st.none() | st.integers(0, rows - 1), label="padding_idx")
    shape = data.draw(st.sampled_from([(), (0,), (1,), (3, 2), (40, 7), (2, 0, 3)]), label="shape")
    table = table_of(fmt, num_embeddings=rows, padding_idx=padding)
    index = torch.randint(rows, shape, generator=torch.Generator().manual_seed(1))
    index = index.int() if data.draw(st.booleans(), label="int32") else index
    got, wanted = table(index), F.embedding(index, table.dense_weight())
    torch.testing.assert_close(got, wanted)
    above = torch.randn(got.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for ours, theirs in zip(
        gradients((got * above).sum(), table), gradients((wanted * above).sum(), table), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("fmt", SOME)
def test_few_rows_and_many_are_the_same_rows(fmt: str) -> None:
    """Where whole tables are cheaper than their rows, another way is taken."""
    table = table_of(fmt)
    many = torch.arange(60).repeat(20)
    torch.testing.assert_close(table(many)[:60], torch.cat([table(i[None]) for i in torch.arange(60)]))


@pytest.mark.parametrize("fmt", SOME)
@pytest.mark.parametrize("many", [False, True])
def test_a_number_out_of_range_is_torchs_error(fmt: str, many: bool) -> None:
    table = table_of(fmt, num_embeddings=57)
    for module in (table, kc.freeze(table)):
        for bad in (57, 59, 60, -1, 2**40):
            index = torch.tensor([3, bad] * (500 if many else 1))
            with pytest.raises(IndexError, match="out of range"):
                module(index)


@pytest.mark.parametrize("index", [torch.tensor([1.0]), torch.tensor([True]), [1, 2]])
def test_what_is_no_number_of_a_row_is_refused(index: Any) -> None:
    with pytest.raises(kc.ShapeError, match="indices must be"):
        table_of(SOME[0])(index)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_embeddings": 61}, "1 to 60"),
        ({"num_embeddings": 0}, "1 to 60"),
        ({"num_embeddings": True}, "1 to 60"),
        ({"padding_idx": 60}, "within the 60 rows"),
        ({"format": kc.Doped(kc.LowRank(60, 12, 3), 0.1)}, "without a sparse part"),
        ({"format": 3}, "format must be"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(kc.ShapeError, match=message):
        kc.TensorEmbedding(**{"format": SOME[0], **options})


def test_a_table_of_the_rank_is_met_and_comes_back() -> None:
    torch.manual_seed(0)
    dense = nn.Embedding(57, 12, padding_idx=5, dtype=torch.float64)
    with torch.no_grad():
        dense.weight.copy_(torch.randn(57, 3) @ torch.randn(3, 12))
        dense.weight[5] = 0
    table = kc.TensorEmbedding.from_dense(dense, kc.LowRank(57, 12, 3))
    assert table.fit_error < 1e-6 and table.num_params == 3 * (57 + 12)
    back, index = table.to_dense(), torch.randint(57, (4, 9))
    assert isinstance(back, nn.Embedding) and back.padding_idx == 5
    torch.testing.assert_close(back(index), dense(index), rtol=1e-6, atol=1e-6)
    padded = kc.TensorEmbedding.from_dense(dense, "tt:m=5x4x3,n=2x3x2,r=4")
    assert padded(index).shape == (4, 9, 12) and padded.fit_error < 1
    torch.testing.assert_close(padded(torch.tensor(5)), torch.zeros(12, dtype=torch.float64))


def test_a_table_that_means_more_than_its_rows_is_refused() -> None:
    with torch.no_grad():
        filled = nn.Embedding(60, 12, padding_idx=5)
        filled.weight[5] = 1
    for dense, message in ((filled, "is not zero"), (nn.Embedding(60, 12, max_norm=1.0), "max_norm")):
        with pytest.raises(kc.ShapeError, match=message):
            kc.TensorEmbedding.from_dense(dense, SOME[0])


@pytest.mark.parametrize("fmt", SOME)
def test_frozen_quantized_copied_and_saved_it_gives_the_same_rows(fmt: str, tmp_path: Path) -> None:
    net = nn.Sequential(table_of(fmt, num_embeddings=57, padding_idx=2).float(), nn.Linear(12, 8)).eval()
    index = torch.tensor([[2, 56, 0], [7, 31, 2]])
    dense = nn.Sequential(nn.Embedding(57, 12, padding_idx=2), nn.Linear(12, 8)).eval()
    with torch.no_grad():
        for same in (kc.freeze(net), copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            torch.testing.assert_close(same(index), net(index))
        for module in (net, kc.quantize(net, bits=8)):
            kc.save(module, tmp_path / "net")
            torch.testing.assert_close(kc.load(tmp_path / "net", into=dense)(index), module(index))
        torch.testing.assert_close(kc.quantize(net, bits=8)(index), net(index), rtol=0.05, atol=0.05)
        torch.testing.assert_close(kc.dequantize(kc.quantize(net))(index), kc.quantize(net)(index))
    kc.save(net[0], tmp_path / "alone")
    torch.testing.assert_close(kc.load(tmp_path / "alone")(index), net[0](index), rtol=0, atol=0)
    with pytest.raises(kc.PlanError, match="does not train"):
        kc.freeze(net)[0].train()
    assert "57, 12" in str(net[0]) and fmt.split(":")[0] in str(net[0])


def test_a_large_frozen_table_is_not_held_dense() -> None:
    table = kc.freeze(kc.TensorEmbedding("tt:m=100x100,n=16x16,r=2"))
    assert sum(buffer.numel() for buffer in table.buffers()) == 0
    assert table(torch.tensor([9999, 0])).shape == (2, 256)


def test_a_lookup_is_counted_as_it_is_executed() -> None:
    table = kc.TensorEmbedding("lowrank:m=60,n=12,r=3")
    cost = kc.count(table)
    assert (cost.params, cost.dense_params, cost.macs, cost.dense_macs) == (3 * 72, 720, 3 * 12, 0)
    chain = kc.count(kc.TensorEmbedding("tt:m=5x4x3,n=2x3x2,r=4"))
    assert chain.macs == 2 * 4 * 3 * 4 + 6 * 4 * 2  # (2 x 4)(4 x 12), then (6 x 4)(4 x 2)


def test_it_compiles_as_one_graph_and_serves_functional_transforms() -> None:
    table, index = table_of(SOME[0]), torch.tensor([[1, 59], [0, 30]])
    torch.testing.assert_close(torch.compile(table, fullgraph=True, backend="aot_eager")(index), table(index))
    parameters = dict(table.named_parameters())

    def total(values: dict[str, Tensor], numbers: Tensor) -> Tensor:
        return torch.func.functional_call(table, values, (numbers,)).square().sum()

    each = torch.func.vmap(torch.func.grad(total), (None, 0))(parameters, index)
    whole = torch.func.grad(total)(parameters, index)
    for name, gradient in whole.items():
        torch.testing.assert_close(each[name].sum(0), gradient)


def test_a_graph_holds_slices_of_the_factors(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    net = nn.Sequential(kc.TensorEmbedding("tt:m=20x20,n=8x8,r=4", num_embeddings=390), nn.Linear(64, 4)).eval()
    index = torch.tensor([[3, 389, 17]])
    written = kc.export_onnx(net, tmp_path / "net.onnx", index, dynamic=[{0: "batch", 1: "time"}])
    assert written.difference < 1e-5 and written.size < 400 * 64
    dense = kc.export_onnx(net, tmp_path / "dense.onnx", index, densify=True)
    assert dense.size > 4 * 390 * 64
