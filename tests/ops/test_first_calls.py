"""What is derived from a plan once holds no tensor of the call that came first: a tracer's, a device's, a mode's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kronecell as kc
from tests.cases import dense_product
from tests.ops.plan_cases import F64, assert_same, derivatives, leaves_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def exported(layer: kc.TensorLinear, x: Tensor) -> Any:
    return torch.export.export(layer, (x,))


def compiled(layer: kc.TensorLinear, x: Tensor) -> Any:
    torch.compiler.reset()
    return torch.compile(layer, fullgraph=True, backend="aot_eager")(x)


def on_meta(layer: kc.TensorLinear, x: Tensor) -> Any:
    with torch.device("meta"):
        return layer.to("meta")(x.to("meta"))


def in_inference_mode(layer: kc.TensorLinear, x: Tensor) -> Any:
    with torch.inference_mode():
        return layer(x)


def in_vmap(layer: kc.TensorLinear, x: Tensor) -> Any:
    return torch.vmap(layer)(x)


def default_dtype(layer: kc.TensorLinear, x: Tensor) -> Any:
    torch.set_default_dtype(F64)
    try:
        return layer(x)
    finally:
        torch.set_default_dtype(torch.float32)


FIRST: list[Callable[[kc.TensorLinear, Tensor], Any]] = [
    exported, compiled, on_meta, in_inference_mode, in_vmap, default_dtype,
]  # fmt: skip


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("first", FIRST, ids=lambda first: first.__name__)
def test_a_plan_that_was_met_first_elsewhere_is_run_as_always(
    first: Callable[[kc.TensorLinear, Tensor], Any], number: int
) -> None:
    """Every case has a matrix of its own, which nothing has met before."""
    size = 3 + FIRST.index(first)
    fmt: kc.Format = [
        kc.KCP((size, 5), (3, 2), 2, 2, 2),
        kc.KCP((size, 5), (2, 2), 2, (1, 2), (2, 1)),
        kc.HT((size, 3, 2), (2, 2, 2), 2),
    ][number]
    for order in (*fmt.orders(), "auto"):
        layer = kc.TensorLinear(fmt, order=order, gates=2)
        first(layer, torch.randn(4, fmt.M))
    x = torch.randn(4, fmt.M, dtype=F64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    factors = leaves_of(fmt, 2)
    leaves = [x, *factors.values()]
    want = derivatives(lambda: dense_product(fmt, x, factors, 2, False), leaves)
    for order in (*fmt.orders(), "auto"):
        layer = kc.TensorLinear(fmt, order=order, gates=2, bias=False, dtype=F64)

        def product(layer: kc.TensorLinear = layer) -> Tensor:
            return torch.func.functional_call(layer, factors, (x,))

        assert_same(derivatives(product, leaves), want, f"{fmt} {order}")
        single = layer.float()
        assert_same(
            [single(x.detach().float()).detach()], [single.to_dense()(x.detach().float()).detach()], order, 1e-5
        )
