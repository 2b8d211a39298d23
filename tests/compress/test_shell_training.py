"""`kronecell compress RUN OUT --train DATA`: a smaller classifier, trained on its run's clips in one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer import Typer
from typer.testing import CliRunner

import kronecell as kc
from kronecell.cli.compress import compress
from kronecell.data import Store
from kronecell.nn.quantize import bytes_of
from kronecell.training.batches import clips_for
from kronecell.training.evaluation import evaluate_clips, held_out
from kronecell.training.run import run as train
from kronecell.training.run import run_folder
from tests.training_cases import make_store, tiny


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Store]:
    """A dense run of three epochs, and its store."""
    folder = tmp_path_factory.mktemp("runs")
    store = make_store(folder)
    experiment = tiny(format="dense")
    train(experiment, store, folder / "runs", show=False)
    return run_folder(folder / "runs", experiment, 0, 0), store


def shell(*arguments: str) -> Any:
    app = Typer()
    app.command("compress")(compress)
    done = CliRunner().invoke(app, [*arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.mark.parametrize("options", [[], ["--stages", "2"], ["--rule", "rnn=lowrank", "--bits", "8"]])
def test_a_run_becomes_a_smaller_classifier_in_one_command(
    runs: tuple[Path, Store], tmp_path: Path, options: list[str]
) -> None:
    folder, store = runs
    shell(str(folder), str(tmp_path / "s"), "--size", "0.2", "--train", str(store.root), "--steps", "4", *options)
    small, dense = kc.load(tmp_path / "s"), kc.load(folder)
    assert isinstance(small, kc.VideoClassifier) and bytes_of(small) <= 0.2 * bytes_of(dense)
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [
        "compression.json", "config.json", "model.safetensors",
    ]  # fmt: skip
    outside = held_out(small, store)
    assert outside is not None and evaluate_clips(small, store, outside).count == len(outside)
    report = json.loads((tmp_path / "s" / "compression.json").read_text())
    assert report["totals"]["model_bytes_after"] <= 0.2 * report["totals"]["model_bytes_before"]


def test_what_was_held_out_is_not_trained_on(runs: tuple[Path, Store]) -> None:
    folder, store = runs
    model = kc.load(folder)
    clips, held = clips_for(model, store, folder)
    outside = held_out(model, store)
    assert outside is not None and not {*clips.loader.indices.tolist()} & {*outside}
    assert held.loader.indices.tolist() == outside
    assert sum(len(y) for _, y in held) == len(outside) * model.preprocessing.segments
    torch.manual_seed(0)
    first = [y.tolist() for _, y in clips]
    assert first != [y.tolist() for _, y in clips]  # another order
    torch.manual_seed(0)
    assert first == [y.tolist() for _, y in clips]


def test_what_is_no_classifier_is_refused_with_a_way_out(runs: tuple[Path, Store], tmp_path: Path) -> None:
    folder, store = runs
    file = tmp_path / "net.safetensors"
    save_file(nn.LSTM(8, 8).state_dict(), file)
    with pytest.raises(kc.KronecellError, match="--train is for a run"):
        shell(str(file), str(tmp_path / "s"), "--size", "0.2", "--train", str(store.root))
    with pytest.raises(kc.KronecellError, match="no data at"):
        shell(str(folder), str(tmp_path / "s"), "--size", "0.2", "--train", str(tmp_path / "none"))
    assert not (tmp_path / "s").exists()
