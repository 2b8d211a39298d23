"""Our loop trains doped formats by settings: from dense to the density of the format, to the same bits after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kronecell as kc
from kronecell.data import Store
from kronecell.errors import KronecellError
from kronecell.training.checkpoint import load_checkpoint, save_checkpoint
from kronecell.training.classifier import VideoClassifier
from kronecell.training.loop import Interrupted, Progress, fit, make_optimiser, make_sparsity
from kronecell.training.run import run
from kronecell.training.splits import loaders
from tests.training_cases import store, tiny  # noqa: F401

DOPED: dict[str, Any] = {"format": "doped:0.05+tt:r=2", "shared": False, "epochs": 6, "sparse_from": 0.2}
STEPS = 3  # of an epoch


def made(changes: dict[str, Any], progress: Progress | None = None) -> tuple[Any, ...]:
    experiment = tiny(**DOPED | changes)
    settings = experiment.train_settings(0)
    torch.manual_seed(0)
    model = experiment.build_model(11)
    sparsity = make_sparsity(model, settings, STEPS, progress)
    return experiment, settings, model, sparsity, make_optimiser(model, settings)


def test_a_run_ends_with_a_model_of_its_format_that_loads_and_answers(store: Store, tmp_path: Path) -> None:  # noqa: F811
    experiment = tiny(**DOPED)
    result = run(experiment, store, tmp_path, show=False)
    (folder,) = tmp_path.glob("*/fold0-seed0")
    model = kc.load(folder)
    assert isinstance(model, VideoClassifier)
    layer = model.rnn.weight_ih_l0
    assert layer.settled and layer.sparse.size == layer.format.sparse(4)
    assert result["params_w"] == layer.format.params(4)
    assert bool(layer.sparse.entries.any()), "S has been trained"
    assert run(experiment, store, tmp_path, show=False) == result


def test_epochs_in_which_s_is_larger_than_its_format_says_are_not_validated(store: Store) -> None:  # noqa: F811
    _, settings, model, sparsity, optimiser = made({"sparse_at": 0.5})
    progress = fit(model, *loaders(tiny(**DOPED), store, 0, 0), settings, optimiser=optimiser, sparsity=sparsity)
    assert [row["top1"] is None for row in progress.history] == [True, True, False, False, False, False]
    assert sparsity.finished and sparsity.steps == progress.steps == 6 * STEPS and progress.best_epoch >= 2


@pytest.mark.parametrize("rates", ["uniform", "structure"])
@pytest.mark.parametrize("stop", [1, 5, 9, 12, 16])
def test_a_stopped_run_goes_on_to_the_same_bits(store: Store, tmp_path: Path, rates: str, stop: int) -> None:  # noqa: F811
    changes = {"rates": rates}
    experiment, settings, model, sparsity, optimiser = made(changes)
    fit(model, *loaders(experiment, store, 0, 0), settings, optimiser=optimiser, sparsity=sparsity)

    _, _, other, sparsity, optimiser = made(changes)
    saved: list[Progress] = []

    def save(progress: Progress) -> None:
        saved.append(Progress(**progress.as_dict()))
        save_checkpoint(tmp_path, other, optimiser, {}, progress.steps)

    with pytest.raises(Interrupted):
        wishes = iter([False] * (stop - 1) + [True] * 9)
        fit(other, *loaders(experiment, store, 0, 0), settings, optimiser=optimiser, sparsity=sparsity, save=save,
            should_stop=lambda: next(wishes, False))  # fmt: skip
    _, _, again, sparsity, optimiser = made(changes, saved[-1])
    load_checkpoint(tmp_path, again, optimiser)
    fit(again, *loaders(experiment, store, 0, 0), settings, optimiser=optimiser, sparsity=sparsity, progress=saved[-1])
    ours, wanted = again.state_dict(), model.state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in wanted.items())


def test_a_run_that_time_cuts_short_has_its_density_all_the_same(store: Store, tmp_path: Path) -> None:  # noqa: F811
    changes = {"max_seconds": 1e-6}
    experiment, settings, model, sparsity, optimiser = made(changes)
    saved: list[Progress] = []

    def save(progress: Progress) -> None:
        saved.append(Progress(**progress.as_dict()))
        save_checkpoint(tmp_path, model, optimiser, {}, progress.steps)

    fit(model, *loaders(experiment, store, 0, 0), settings, optimiser=optimiser, sparsity=sparsity, save=save)
    assert saved[-1].steps == 1 and sparsity.finished and model.rnn.weight_ih_l0.settled
    _, _, again, _, optimiser = made(changes, saved[-1])  # killed before the result was written
    load_checkpoint(tmp_path, again, optimiser)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_without_a_schedule_or_a_doped_format_there_is_nothing_to_do(store: Store) -> None:  # noqa: F811
    assert made({"sparse_at": 0.0})[3] is None
    assert made({"format": "tt:r=2"})[3] is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"sparse_at": 0.1}, "sparse_at must be 0, or above sparse_from = 0.2, got 0.1"),
        ({"sparse_at": 1.5}, "sparse_at from 0 to 1; got 0.2, 0.5, 1.5"),
        ({"codropout": 1.0}, "codropout must be from 0 to below 1"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(KronecellError, match=words):
        tiny(**DOPED | wrong)
