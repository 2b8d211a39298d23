"""to_dense against definitions written out by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import kronecell as kc
from tests.formats.oracles import CASES


@pytest.mark.parametrize(("fmt", "oracle"), CASES, ids=lambda value: str(value) if isinstance(value, kc.Format) else "")
def test_to_dense_is_the_definition(fmt: kc.Format, oracle: Callable[..., np.ndarray]) -> None:
    factors = fmt.init(torch.Generator().manual_seed(3), dtype=torch.float64, std=1.0)
    expected = oracle(fmt, {name: t.numpy() for name, t in factors.items()})
    np.testing.assert_allclose(fmt.to_dense(factors).numpy(), expected, rtol=1e-12, atol=1e-13)


def test_gates_are_independent_matrices_and_shared_factors_are_common() -> None:
    fmt = kc.TT((2, 3), (3, 2), 2)
    factors = fmt.init(torch.Generator().manual_seed(0), dtype=torch.float64, gates=3, shared=True)
    assert factors["G1"].shape == (3, 2, 3, 2) and factors["G2"].shape == (2, 3, 2)
    W = fmt.to_dense(factors, gates=3, shared=True)
    for g in range(3):
        single = fmt.to_dense({"G1": factors["G1"][g], "G2": factors["G2"]})
        torch.testing.assert_close(W[g], single, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    ("text", "unshared", "gated"),
    [
        ("tt:m=8x20x20x18,n=4x4x4x4,r=4", True, {"G1"}),
        ("bt:m=8x20x20x18,n=4x4x4x4,r=4", True, {"F1"}),
        ("ht:m=8x20x20x18,n=4x4x4x4,r=4", True, {"U1"}),
        ("tr:m=4x2x5,n=4x4,r=2", True, {"G2"}),
        ("kcp:m=8x20x20x18,n=4x4x4x4,K=4,CA=4,CB=2", True, {"A1", "B1"}),
        ("kcp:m=8x20x20x18,n=4x4x4x4,K=4,CA=4,CB=2", ("A1",), {"A1"}),
    ],
)
def test_sharing_keeps_one_factor_per_gate_where_the_paper_does(text: str, unshared: object, gated: set[str]) -> None:
    network = kc.parse(text).network(4, unshared)
    assert {f.name for f in network.parameters if "g" in f.legs} == gated
