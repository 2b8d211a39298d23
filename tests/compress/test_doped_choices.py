"""kc.compress and kc.suggest choose densities: a few large entries beside a structure, indices counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import kronecell as kc
from kronecell.errors import KronecellError
from kronecell.nn.quantize import bytes_of


def spiked(rows: int, columns: int, rank: int, share: float, seed: int = 0) -> Tensor:
    """Low rank, and a share of entries that fit no pattern."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator) / rank**0.5
    spikes = torch.rand(rows, columns, generator=generator) < share
    return W + spikes * 8 * torch.randn(rows, columns, generator=generator)


def layer() -> nn.LSTM:
    rnn = nn.LSTM(64, 64)
    with torch.no_grad():
        rnn.weight_ih_l0.copy_(spiked(256, 64, 4, 0.02))
        rnn.weight_hh_l0.copy_(spiked(256, 64, 4, 0.02, 1))
    return rnn


def indices(module: nn.Module) -> int:
    return kc.count(module).index_bytes


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_size_in_bytes_may_go_to_entries_where_they_pay(calibrated: bool) -> None:
    """The same bytes without entries lose several times as much."""
    torch.manual_seed(0)
    rnn, data = layer(), torch.randn(40, 8, 64) if calibrated else None
    errors = {}
    for kinds in ("lowrank", "lowrank|doped+lowrank"):
        small, report = kc.compress(rnn, {"": kinds, "weight_hh_l0": kinds}, size=0.3, bits=(), calibration=data)
        assert bytes_of(small) <= 0.3 * bytes_of(rnn) and bytes_of(small) == report.model_bytes_after
        errors[kinds] = max(entry.error for entry in report.layers)
        assert (indices(small) > 0) == ("doped" in kinds)
    assert errors["lowrank|doped+lowrank"] < 0.5 * errors["lowrank"]


def test_integers_and_entries_are_chosen_together() -> None:
    small, _ = kc.compress(layer(), {"": "doped+lowrank", "weight_hh_l0": "doped+tt|lowrank"}, size=0.12)
    assert bytes_of(small) <= 0.12 * bytes_of(layer()) and indices(small) > 0
    assert small(torch.zeros(2, 1, 64))[0].shape == (2, 1, 64)


def test_entries_are_not_chosen_where_a_structure_says_it_all() -> None:
    rnn = nn.LSTM(64, 64)
    with torch.no_grad():
        rnn.weight_ih_l0.copy_(spiked(256, 64, 4, 0.0))
    small, _ = kc.compress(rnn, {"": "lowrank|doped+lowrank"}, error=1e-3)
    assert isinstance(small.weight_ih_l0.format, kc.LowRank)


def test_an_error_and_a_budget_of_parameters_take_densities_too() -> None:
    small, report = kc.compress(layer(), {"": "doped+lowrank"}, error=0.1)
    assert isinstance(small.weight_ih_l0.format, kc.Doped) and report.layers[0].error <= 0.1
    small, report = kc.compress(layer(), {"": "doped+lowrank"}, budget=0.2)
    stored = report.layers[0].params_after + indices(small) / 4
    assert 0.1 * 256 * 64 < stored <= 0.2 * 256 * 64, "four bytes of indices count as a parameter"


def test_a_doped_format_in_a_rule_counts_its_indices() -> None:
    small, _ = kc.compress(layer(), {"": "doped:0.02+lowrank:r=4", "weight_hh_l0": "lowrank"}, size=0.25, bits=())
    assert bytes_of(small) <= 0.25 * bytes_of(layer())


def test_suggest_has_a_row_for_a_doped_kind_at_equal_bytes() -> None:
    W = spiked(64, 48, 4, 0.02)
    plain, doped = kc.suggest(64, 48, budget=900, W=W, formats=("lowrank", "doped+lowrank")).rows
    if isinstance(plain.format, kc.Doped):
        plain, doped = doped, plain
    assert isinstance(doped.format, kc.Doped) and str(doped.format).startswith("doped:0.")
    assert doped.params == doped.format.num_params + -(-doped.format.sparse().index_bytes // 4) <= 900
    assert doped.error is not None and plain.error is not None and doped.error < 0.5 * plain.error
    (found,) = kc.suggest(64, 48, error=0.2, W=W, formats=("doped+lowrank",)).rows
    assert found.error is not None and found.error <= 0.2
    (unseen,) = kc.suggest(64, 48, budget=900, formats=("doped+tt",)).rows
    assert isinstance(unseen.format, kc.Doped) and unseen.params <= 900


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: kc.suggest(8, 8, budget=9, formats=("doped+doped",)), "expected some of .* or doped\\+ and one"),
        (lambda: kc.compress(layer(), {"": "doped+nothing"}, size=0.5), "unknown format nothing"),
        (lambda: kc.compress(layer(), {"": "doped+dense"}, size=0.5), "unknown format dense"),
    ],
)
def test_mistakes_are_named(call: object, words: str) -> None:
    with pytest.raises(KronecellError, match=words):
        call()  # type: ignore[operator]
