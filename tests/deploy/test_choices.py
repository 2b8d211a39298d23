"""Measured choices travel to other processes by file; anything else in a file is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kronecell as kc
from kronecell.ops.tune import choices

TEXT = "kcp:m=8x10,n=4x4,K=2,CA=2,CB=2"


@pytest.fixture(autouse=True)
def nothing_measured() -> Iterator[None]:
    choices.forget()
    yield
    choices.forget()


def test_saved_choices_are_used_after_loading(tmp_path: Path) -> None:
    layer, x = kc.TensorLinear(TEXT).eval(), torch.randn(6, 80)
    kc.tune(layer, x, grad=False, repeats=1)
    with torch.no_grad():
        tuned, frozen, y = layer.plan(6), kc.freeze(layer, rows=(6,)).plan(6), layer(x)
    kc.save_choices(tmp_path / "choices.json")
    choices.forget()
    assert kc.load_choices(tmp_path / "choices.json") == 2  # of the layer, and frozen
    with torch.no_grad():
        assert layer.plan(6) == tuned
        assert kc.freeze(layer, rows=(6,)).plan(6) == frozen
        torch.testing.assert_close(layer(x), y)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kronecell_choices": 2, "choices": {}}', '{"kronecell_choices": 1}']
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "choices.json"
    with pytest.raises(kc.PlanError, match="cannot be read"):
        kc.load_choices(path)
    path.write_text(text)
    with pytest.raises(kc.PlanError, match="write a file of choices"):
        kc.load_choices(path)


def test_a_choice_of_a_candidate_that_does_not_exist_is_an_error_when_it_is_used(tmp_path: Path) -> None:
    layer, x = kc.TensorLinear(TEXT).eval(), torch.randn(6, 80)
    with torch.no_grad():
        key = layer.product(6).key
    document = {"kronecell_choices": 1, "choices": {key: "no such plan"}}
    (tmp_path / "choices.json").write_text(json.dumps(document))
    kc.load_choices(tmp_path / "choices.json")
    with torch.no_grad(), pytest.raises(kc.PlanError, match="tune again"):
        layer(x)
