"""Counts of formats, layers and models: what is stored and what would be stored without compression."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kronecell as kc

KCP = kc.KCP((8, 20, 20, 18), (4, 4, 4, 4), 4, 4, 2)


def test_a_format_is_counted_without_weights() -> None:
    cost = kc.count(KCP, gates=4, shared=True, order="algorithm2")
    assert cost.params == 1664 and cost.dense_params == cost.dense_macs == 4 * 57600 * 256
    assert cost.flops == 2 * cost.macs and cost.ratio == pytest.approx(35446, rel=1e-4)
    assert "35,446" in str(cost)


def test_a_model_counts_every_parameter_once_and_its_dense_twin() -> None:
    model = nn.Sequential(kc.TensorLinear("tt:m=4x3,n=2x2,r=2"), nn.ReLU(), nn.Linear(4, 3), nn.LayerNorm(3))
    dense = nn.Sequential(nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3), nn.LayerNorm(3))
    cost = kc.count(model)
    assert cost.params == sum(p.numel() for p in model.parameters())
    assert cost.dense_params == sum(p.numel() for p in dense.parameters())
    assert cost.dense_macs == 12 * 4 + 4 * 3


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_a_recurrent_layer_counts_u_and_its_dense_twin(cell: str) -> None:
    with torch.device("meta"):
        ours = getattr(kc, cell)(57600, 256, num_layers=2, bidirectional=True, input_format=[KCP, None])
        dense = getattr(nn, cell)(57600, 256, num_layers=2, bidirectional=True)
    cost, plain = kc.count(ours), kc.count(dense)
    assert cost.params == sum(p.numel() for p in ours.parameters())
    assert cost.dense_params == plain.params == sum(p.numel() for p in dense.parameters())
    assert cost.dense_macs == plain.macs


def test_the_ratio_of_a_whole_model_is_not_that_of_w() -> None:
    with torch.device("meta"):
        rnn = kc.LSTM(57600, 2304, input_format=kc.KCP((15, 16, 16, 15), (8, 6, 6, 8), 6, 2, 2), shared=True)
    assert kc.count(rnn).ratio == pytest.approx(26, abs=0.1)


def test_something_else_is_refused() -> None:
    with pytest.raises(kc.KronecellError, match="takes a Format or a torch module, got int"):
        kc.count(3)
