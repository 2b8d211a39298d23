"""Rates and first weights by structure: relative to a dense layer, for every format, sharing and kind of module."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import kronecell as kc
from kronecell.nn.rates import largest_singular_value, rate_scales, spectral_start, widths

FORMATS = (
    "kcp:m=6x5x4,n=2x4x2,K=3,CA=2,CB=2", "kcp:m=6x5x4,n=2x4x2,K=2,CA=2,CB=2,tie=all", "tt:m=6x5x4,n=2x4x2,r=3",
    "tr:m=6x5x4,n=2x4x2,r=2", "bt:m=6x5x4,n=2x4x2,r=2,P=2", "ht:m=6x5x4,n=2x4x2,r=2", "cp:m=6x5x4,n=2x4x2,r=3",
    "tucker:m=6x5x4,n=2x4x2,r=2", "lowrank:m=120,n=16,r=3", "kt:m=6x5x4,n=2x4x2,K=2", "dense:m=120,n=16",
)  # fmt: skip


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("shared", [False, True])
def test_rms_and_largest_singular_value_are_those_of_the_dense_matrix(text: str, shared: bool) -> None:
    torch.manual_seed(0)
    layer = kc.TensorLinear(text, gates=4, shared=shared, bias=False, dtype=torch.float64)
    W = layer.dense_weight().detach()
    assert layer.format.rms(layer.factors(), gates=4, shared=shared) == pytest.approx(float(W.square().mean().sqrt()))
    largest = float(torch.linalg.matrix_norm(W, 2))
    assert largest_singular_value(layer, 300) == pytest.approx(largest, rel=1e-3)


@pytest.mark.parametrize("text", FORMATS)
def test_every_parameter_is_in_one_group_and_decays_alike(text: str) -> None:
    model = nn.Sequential(nn.Linear(4, 120), kc.LSTM(120, 16, input_format=text, hidden_format="lowrank:r=2"))
    model[0].bias.requires_grad_(False)
    groups = kc.param_groups(model, 1e-2, weight_decay=0.1)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert all(group["lr"] == pytest.approx(1e-2 * group["scale"]) for group in groups)
    assert all(group["lr"] * group["weight_decay"] == pytest.approx(1e-3) for group in groups)
    torch.optim.AdamW(groups)


def test_a_dense_matrix_keeps_the_rate_of_its_place() -> None:
    assert rate_scales(kc.TensorLinear("dense:m=12,n=5", gates=3)) == {"W": pytest.approx(1.0)}
    (group,) = kc.param_groups(nn.Linear(4, 3), 0.1)
    assert group["scale"] == 1.0 and len(group["params"]) == 2


@pytest.mark.parametrize(
    ("layer", "wanted"),
    [
        (nn.LSTM(64, 16), {0.25: 1, 1.0: 3}),
        (kc.LSTM(64, 16), {0.25: 1, 1.0: 3}),
        (kc.LSTM(64, 16, input_format="dense"), {0.25: 1, 1.0: 3}),
        (nn.GRU(64, 16, num_layers=2, bidirectional=True), {0.25: 2, 0.5: 2, 1.0: 12}),
        (kc.GRU(64, 16, num_layers=2, bidirectional=True), {0.25: 2, 0.5: 2, 1.0: 12}),
        (kc.LSTM(64, 16, proj_size=8, bias=False), {0.125: 1, 1.0: 2}),
        (nn.LSTMCell(32, 16), {0.5: 1, 1.0: 3}),
        (kc.LSTMCell(32, 16), {0.5: 1, 1.0: 3}),
    ],
)
def test_input_weights_have_the_rate_of_u_times_hidden_over_inputs(layer: nn.Module, wanted: dict[float, int]) -> None:
    found = {round(group["scale"], 6): len(group["params"]) for group in kc.param_groups(layer, 0.1)}
    assert found == wanted


def test_a_compressed_w_has_the_scale_of_its_place_times_those_of_its_factors() -> None:
    torch.manual_seed(0)
    layer = kc.LSTM(120, 16, input_format="tt:m=6x5x4,n=2x4x2,r=3")
    groups = kc.param_groups(layer, 1.0)
    found = {id(p): group["scale"] for group in groups for p in group["params"]}
    for name, scale in rate_scales(layer.weight_ih_l0).items():
        assert found[id(layer.weight_ih_l0.get_parameter(name))] == pytest.approx(scale * 16 / 120)


def test_a_chain_that_starts_as_linear_layers_has_the_published_rule() -> None:
    layer = kc.TensorLinear("lowrank:m=64,n=64,r=64", bias=False, dtype=torch.float64)
    torch.manual_seed(0)
    with torch.no_grad():
        for factor in layer.factors().values():
            factor.copy_(torch.randn(factor.shape, dtype=torch.float64) / 8)
    # rate * M / (a L), a = M = 64, L = 2
    assert [*rate_scales(layer).values()] == pytest.approx([0.5, 0.5], rel=0.05)


@pytest.mark.parametrize("text", [text for text in FORMATS if not text.startswith(("dense", "kt"))])
def test_a_step_of_signs_changes_the_matrix_as_much_as_a_dense_step(text: str) -> None:
    """The worst step of each factor, all of them together, against the worst step of a dense matrix: same order."""
    torch.manual_seed(0)
    layer = kc.TensorLinear(text, bias=False, dtype=torch.float64)
    W = layer.dense_weight().detach()
    rms, rate = float(W.square().mean().sqrt()), 1e-5
    worst = rate * math.sqrt(W.numel()) / (rms * (math.sqrt(120) + math.sqrt(16)))  # of a dense matrix of this rms
    u, _, v = torch.linalg.svd(W)
    (layer.dense_weight() * torch.outer(u[:, 0], v[0])).sum().backward()
    with torch.no_grad():
        for name, scale in rate_scales(layer).items():
            factor = layer.get_parameter(name)
            factor += rate * scale * factor.grad.sign()  # type: ignore[union-attr]
    change = layer.dense_weight().detach() - W
    relative = float(torch.linalg.matrix_norm(change, 2) / torch.linalg.matrix_norm(W, 2))
    assert 0.1 * worst < relative < 2 * worst


def test_widths_count_what_is_summed_and_what_is_given() -> None:
    fmt = kc.parse("tt:m=6x5x4,n=2x4x2,r=3")
    order, tree = next(iter(fmt.orders().items()))
    network = fmt.plan(order).network
    assert [widths(network, tree, name) for name in ("G1", "G2", "G3")] == [(6, 6), (15, 12), (12, 2)]
    cp = kc.parse("cp:m=6x5x4,n=2x4x2,r=3")
    order, tree = next(iter(cp.orders().items()))
    assert widths(cp.plan(order).network, tree, "F2") == (5, 4)  # the CP index runs through


def test_a_spectral_start_bounds_the_norm_and_spares_what_is_below() -> None:
    torch.manual_seed(0)
    rnn = kc.LSTM(120, 16, input_format="lowrank:r=1", dtype=torch.float64)
    before = rnn.weight_ih_l0.dense_weight().detach()
    spectral_start(rnn)
    after = rnn.weight_ih_l0.dense_weight().detach()
    bound = float(before.square().mean().sqrt()) * (math.sqrt(120) + math.sqrt(64))
    assert float(torch.linalg.matrix_norm(after, 2)) == pytest.approx(bound, rel=1e-3)
    assert torch.allclose(after / after.norm(), before / before.norm())
    with torch.device("meta"):
        spectral_start(kc.LSTM(120, 16, input_format="lowrank:r=1"))  # nothing to scale yet
    plain = kc.TensorLinear("dense:m=120,n=16", dtype=torch.float64)
    W = plain.dense_weight().detach()
    spectral_start(plain)  # within what the random start of a dense matrix has
    assert torch.allclose(plain.dense_weight(), W, rtol=0.1)


@pytest.mark.parametrize("lr", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_that_is_none_is_refused(lr: float) -> None:
    with pytest.raises(kc.ShapeError, match="lr must be a number above 0"):
        kc.param_groups(nn.Linear(2, 2), lr)
