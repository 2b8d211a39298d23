"""suggest: every row keeps its target, the Pareto mark is right, modes are searched, numbers are recomputed."""

from __future__ import annotations

import json

import pytest
import torch

import kronecell as kc
from kronecell.compress.suggest import KINDS, best_modes, mode_choices, screened, sized


def matrix() -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    W = torch.randn(36, 24, generator=generator, dtype=torch.float64)
    U, S, Vh = torch.linalg.svd(W, full_matrices=False)
    return (U * S * 0.8 ** torch.arange(24)) @ Vh


def test_a_budget_is_kept_and_used_by_every_format() -> None:
    table = kc.suggest(1024, 256, budget=5000)
    assert {row.format.kind for row in table} == {*KINDS}
    for row in table:
        fmt = row.format
        assert (fmt.M, fmt.N) == (1024, 256) and fmt.num_params == row.params <= 5000
        assert row.macs == fmt.plan("optimal", 32).macs and row.latency_ms > 0 and row.error is None
        assert row.ratio == pytest.approx(1024 * 256 / row.params)


def test_an_error_is_reached_by_every_row_with_few_parameters() -> None:
    W = matrix()
    table = kc.suggest(36, 24, error=0.4, W=W, formats=("lowrank", "tt", "tucker"))
    for row in table:
        assert row.error is not None and row.error <= 0.4
        assert row.params < W.numel()
    lowrank = next(row.format for row in table if row.format.kind == "lowrank")
    assert isinstance(lowrank, kc.LowRank)
    assert kc.LowRank((36,), (24,), r=lowrank.r - 1).from_dense(W)[1] > 0.4


def test_a_latency_is_a_target_too() -> None:
    table = kc.suggest(256, 64, latency=50.0, formats=("lowrank", "tt"))
    assert len(table.rows) == 2  # any machine multiplies 32 x 256 x 64 in 50 ms


def test_the_pareto_mark_is_that_of_the_definition() -> None:
    table = kc.suggest(36, 24, budget=200, W=matrix(), formats=("lowrank", "tt", "cp", "kcp"))
    costs = [(row.params, row.latency_ms, row.error) for row in table]
    for row, mine in zip(table, costs, strict=True):
        beaten = any(other != mine and all(a <= b for a, b in zip(other, mine, strict=True)) for other in costs)
        assert row.pareto == (not beaten)
    assert table.best.pareto
    assert json.loads(table.to_json())[0]["format"] == str(table.rows[0].format)
    assert str(table).count("*") >= 2


def test_the_order_of_modes_is_searched() -> None:
    """W is a Kronecker-like sum in one pairing of modes; only that pairing has a small error."""
    planted = kc.TT((6, 6), (6, 4), r=1)
    W = planted.to_dense(planted.init(torch.Generator().manual_seed(0), dtype=torch.float64))
    assert {n for m, n in mode_choices("tt", 36, 24) if m == (6, 6)} == {(4, 6), (6, 4)}
    modes = best_modes("tt", W, None, 80, 0)
    assert modes is not None
    assert screened(sized("tt", *modes, 1), W, None, 0) < 1e-6
    assert screened(kc.TT((6, 6), (4, 6), r=1), W, None, 0) > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of budget, error and latency"),
        ({"budget": 10, "latency": 1.0}, "got budget, latency"),
        ({"error": 0.1}, "give W"),
        ({"budget": -3}, "must be positive"),
        ({"budget": 10, "formats": ("tx",)}, "unknown formats"),
        ({"budget": 10, "W": torch.zeros(3, 3)}, "W must be"),
        ({"budget": 3}, "no format of"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(kc.KronecellError, match=message):
        kc.suggest(36, 24, **options)  # type: ignore[arg-type]
