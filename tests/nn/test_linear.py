"""TensorLinear: the product, its gradients, conversions, and its life as a torch module."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import kronecell as kc

SMALL = [
    "dense:m=2x3,n=2x2",
    "lowrank:m=2x3,n=2x2,r=2",
    "cp:m=2x3,n=2x2,r=2",
    "tucker:m=2x3,n=2x2,r=2",
    "tt:m=2x3,n=2x2,r=2",
    "tr:m=2x3,n=2x2,r=2",
    "bt:m=2x3,n=2x2,r=2,P=2",
    "ht:m=2x3,n=2x2,r=2",
    "kt:m=2x3,n=2x2,K=2",
    "kcp:m=2x3x2,n=2x2x1,K=2,CA=2,CB=2",
    "kcp:m=2x3,n=2x2,K=2,CA=2x1,CB=1x2",
    "kcp:m=2x3x2,n=2x2x1,K=2,CA=2,CB=1,tie=all",
    "doped:0.3+kt:m=2x3,n=2x2,K=1",
    "doped:0.3,block=2+tt:m=2x3,n=2x2,r=2",
]


@pytest.mark.parametrize("text", SMALL)
def test_the_layer_equals_its_dense_twin(text: str) -> None:
    torch.manual_seed(0)
    layer = kc.TensorLinear(text, dtype=torch.float64)
    x = torch.randn(2, 3, layer.in_features, dtype=torch.float64)
    twin = layer.to_dense()
    assert isinstance(twin, nn.Linear)
    torch.testing.assert_close(layer(x), twin(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer(x[0, 0]), twin(x[0, 0]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", SMALL)
@pytest.mark.parametrize("training", [False, True])
def test_numbers_are_not_made_of_an_input_that_has_none(text: str, training: bool) -> None:
    """Memory of the CPU was read in place of the meta device: it is refused, or the result has no numbers, too."""
    layer = kc.TensorLinear(text)
    try:
        with torch.set_grad_enabled(training):
            y = layer(torch.zeros(2, layer.in_features, device="meta"))
    except kc.ShapeError as error:
        assert "input is on meta, the factors on cpu" in str(error)
    else:
        assert y.is_meta


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("text", SMALL)
def test_first_and_second_derivatives_are_right(text: str, shared: bool) -> None:
    torch.manual_seed(0)
    layer = kc.TensorLinear(text, dtype=torch.float64, gates=2, shared=shared)
    x = torch.randn(2, layer.in_features, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]

    def function(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    inputs = (x, *(p.detach().clone().requires_grad_() for p in layer.parameters()))
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("text", SMALL)
def test_per_sample_gradients_by_vmap_equal_those_of_a_loop(text: str) -> None:
    torch.manual_seed(0)
    layer = kc.TensorLinear(text, dtype=torch.float64)
    x = torch.randn(4, layer.in_features, dtype=torch.float64)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return functional_call(layer, parameters, (row,)).square().sum()

    batched = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(len(x)):
        single = grad(loss)(parameters, x[i])
        for name in parameters:
            torch.testing.assert_close(batched[name][i], single[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", ["separable", "algorithm1", "algorithm2", "optimal", "auto"])
def test_every_order_gives_the_same_output(order: str) -> None:
    torch.manual_seed(0)
    layer = kc.TensorLinear("kcp:m=2x3x2,n=2x2x3,K=2,CA=2,CB=2", order=order, gates=3, dtype=torch.float64)
    x = torch.randn(5, 12, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer.to_dense()(x), rtol=0, atol=1e-12)
    assert "multiply-adds" in layer.explain()


def test_an_explicit_tree_is_an_order() -> None:
    layer = kc.TensorLinear("tt:m=2x3,n=2x2,r=2", order=(("x", "G2"), "G1"), dtype=torch.float64)
    x = torch.randn(5, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer.to_dense()(x), rtol=0, atol=1e-12)


def test_the_first_weights_have_the_scale_of_a_linear_layer() -> None:
    torch.manual_seed(0)
    for text in SMALL:
        layer = kc.TensorLinear(text)
        rms = layer.to_dense().weight.square().mean().sqrt().item()
        assert rms == pytest.approx((3 * layer.in_features) ** -0.5, rel=1e-4)
        assert layer.bias is not None and layer.bias.abs().max() <= layer.in_features**-0.5


@pytest.mark.parametrize("gates,shared", [(1, False), (4, False)])
def test_fitting_a_dense_layer_of_full_rank_is_exact(gates: int, shared: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(12, gates * 6, dtype=torch.float64).eval()
    fmt = kc.LowRank((3, 4), (2, 3), r=6)
    layer = kc.TensorLinear.from_dense(linear, fmt, gates=gates, shared=shared)
    x = torch.randn(5, 12, dtype=torch.float64)
    torch.testing.assert_close(layer(x), linear(x), rtol=0, atol=1e-10)
    assert layer.fit_error < 1e-10 and not layer.training


def test_wrong_arguments_are_refused_when_the_layer_is_built() -> None:
    with pytest.raises(kc.PlanError, match="separable"):
        kc.TensorLinear("kcp:m=2x3,n=2x2,K=2,CA=2,CB=2", order="best")
    with pytest.raises(kc.ShapeError, match="kronecell format"):
        kc.TensorLinear(12)  # type: ignore[arg-type]
    with pytest.raises(kc.PlanError, match="G1"):
        kc.TensorLinear("tt:m=2x3,n=2x2,r=2", gates=4, shared=("A1",))
    with pytest.raises(kc.ShapeError, match=r"expected \(\.\.\., 6\)"):
        kc.TensorLinear("tt:m=2x3,n=2x2,r=2")(torch.zeros(3, 7))
    with pytest.raises(kc.ShapeError, match="dtype"):
        kc.TensorLinear("tt:m=2x3,n=2x2,r=2")(torch.zeros(3, 6, dtype=torch.float64))
    with pytest.raises(kc.ShapeError, match=r"torch\.nn\.Linear"):
        kc.TensorLinear.from_dense(nn.GRU(2, 2), "tt:m=2x3,n=2x2,r=2")  # type: ignore[arg-type]
    with pytest.raises(kc.ShapeError, match=r"expected \(4, 6\)"):
        kc.TensorLinear.from_dense(nn.Linear(6, 5), "tt:m=2x3,n=2x2,r=2")


def test_the_text_of_a_layer_says_modes_ranks_and_counts() -> None:
    text = repr(kc.TensorLinear("kcp:m=8x20x20x18,n=4x4x4x4,K=4,CA=4,CB=2", gates=4, bias=False))
    for part in ("57600 -> 1024", "K=4,CA=4,CB=2", "4,736 parameters", "12,454.1x fewer"):
        assert part in text
