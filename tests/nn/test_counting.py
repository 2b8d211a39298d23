"""Counts of formats, layers and models: what is stored and what would be stored without compression."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

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


# What is counted is what runs ----------------------------------------------------------------------------------------

TIME, BATCH = 6, 16  # the rows that counts are for: choices of plans depend on them
MATRICES = [
    "dense:m=24,n=16",
    "lowrank:m=24,n=16,r=3",
    "kt:m=4x6,n=4x4,K=3",
    "cp:m=4x6,n=4x4,r=5",
    "tucker:m=4x6,n=4x4,r=3",
    "tt:m=4x6,n=4x4,r=3",
    "tr:m=4x6,n=4x4,r=2",
    "bt:m=4x6,n=4x4,r=2,P=2",
    "ht:m=4x3x2,n=4x2x2,r=2",
    "kcp:m=4x3x2x2,n=2x2x2x2,K=2,CA=2,CB=2",
    "kcp:m=8x20x20x18,n=4x4x4x4,K=4,CA=4,CB=2",
    "tt:m=8x20x20x18,n=4x4x4x4,r=4",
    "ht:m=8x20x20x18,n=4x4x4x4,r=4",
    "doped:0.02+kcp:m=8x20x20x18,n=4x4x4x4,K=4,CA=4,CB=2",
    "doped:0.05,block=4+lowrank:m=96,n=64,r=2",
    "doped:0.5+lowrank:m=96,n=64,r=2",
]


def executed(module: nn.Module, x: torch.Tensor) -> float:
    """Multiply-adds of one forward as torch's counter sees them."""
    with FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("text", MATRICES)
def test_a_linear_layer_executes_what_is_counted(text: str, grad: bool) -> None:
    for gates, shared in ((1, False), (4, False), (4, True)):
        layer = kc.TensorLinear(text, gates=gates, shared=shared)
        x = torch.randn(BATCH, TIME, layer.in_features)
        with torch.set_grad_enabled(grad):
            cost = kc.count(layer)
            assert executed(layer, x) == BATCH * TIME * cost.macs + cost.hoisted_macs
            frozen = kc.freeze(layer, rows=(BATCH * TIME,))
            assert executed(frozen, x) == BATCH * TIME * kc.count(frozen).macs


@pytest.mark.parametrize("order", ["separable", "algorithm1", "algorithm2", "optimal"])
def test_a_layer_with_an_order_of_its_own_is_counted_by_it(order: str) -> None:
    layer = kc.TensorLinear("kcp:m=4x3x2x2,n=2x2x2x2,K=2,CA=2,CB=2", order=order)
    cost = kc.count(layer)
    assert cost.macs == layer.plan(BATCH * TIME).macs
    assert executed(layer, torch.randn(BATCH, TIME, 48)) == BATCH * TIME * cost.macs + cost.hoisted_macs


HIDDEN = {
    "dense U": None,
    "U as two narrow products": "lowrank:r=2",
    "U as two narrow products of each gate": "kcp:K=1,CA=2,CB=2",
    "U made dense": "tt:r=2",
    "U made dense of many ranks": "lowrank:r=15",
    "U and a few entries": "doped:0.02+lowrank:r=2",
    "U and many entries": "doped:0.3+lowrank:r=2",
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("recipe", [None, "kcp:K=2,CA=2,CB=2", "tt:r=2"])
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("cell", [kc.LSTM, kc.GRU])
def test_a_recurrent_layer_executes_what_is_counted(cell: type, hidden: str, recipe: str | None, grad: bool) -> None:
    for options in ({}, {"num_layers": 2, "bidirectional": True}, {"hidden_shared": True}):
        rnn = cell(24, 16, input_format=recipe, hidden_format=HIDDEN[hidden], **options)
        with torch.set_grad_enabled(grad):
            cost = kc.count(rnn)
            assert executed(rnn, torch.randn(TIME, BATCH, 24)) == BATCH * TIME * cost.macs + cost.hoisted_macs
    projected = kc.LSTM(24, 16, proj_size=4, input_format=recipe)
    with torch.set_grad_enabled(grad):
        cost = kc.count(projected)
        assert executed(projected, torch.randn(TIME, BATCH, 24)) == BATCH * TIME * cost.macs + cost.hoisted_macs


@pytest.mark.parametrize("text", MATRICES[:10])
def test_a_training_step_is_counted_as_its_products(text: str) -> None:
    """A product and the gradient of its weight cost the same, and that of x a third time, where it is wanted.

    Products of weights are made again for their gradients, so they count four times.
    """
    layer = kc.TensorLinear(text, order="optimal", gates=4)
    x = torch.randn(BATCH * TIME, layer.in_features)
    plan = layer.plan(len(x))
    first = next(step for step in plan.steps if not step.hoisted).macs
    for of_x in (False, True):
        with FlopCounterMode(display=False) as counter:
            layer(x.requires_grad_(of_x)).sum().backward()
        macs = 3 * plan.macs - (0 if of_x else first)
        assert counter.get_total_flops() == 2 * (len(x) * macs + 4 * plan.hoisted_macs)


@pytest.mark.parametrize("cell", [kc.LSTM, kc.GRU])
def test_a_training_step_of_a_recurrent_layer_counts_back_and_the_gradient_of_u(cell: type) -> None:
    rnn = cell(24, 16)
    with FlopCounterMode(display=False) as counter:
        rnn(torch.randn(TIME, BATCH, 24))[0].sum().backward()
    W, U = rnn.weight_ih_l0.numel(), rnn.weight_hh_l0.numel()
    assert counter.get_total_flops() == 2 * BATCH * TIME * (2 * W + 3 * U)  # x takes no gradient
