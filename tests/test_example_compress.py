"""The example: a trained bidirectional LSTM, compressed ten times and fine-tuned, is as good as before."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "compress_and_finetune.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compress_and_finetune", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("distill", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ten_times_fewer_parameters_and_within_two_points_after_fine_tuning(distill: bool) -> None:
    results, report, model, small = example().run(distill)
    assert results["original"] >= 0.9
    assert results["fine-tuned"] >= results["original"] - 0.02
    assert report.ratio >= 10
    assert report.params_before == sum(p.numel() for name, p in model.rnn.named_parameters() if "weight" in name)
    assert report.params_after == sum(p.numel() for name, p in small.rnn.named_parameters() if "weight" in name)
    assert report.model_params_after == sum(p.numel() for p in small.parameters())
