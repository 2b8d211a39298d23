"""The training loop: what it records, when it stops, and that it is one deterministic function of its seed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kronecell.data import Store
from kronecell.errors import KronecellError
from kronecell.training.checkpoint import load_checkpoint, save_checkpoint
from kronecell.training.classifier import VideoClassifier
from kronecell.training.loop import (
    Diverged,
    Interrupted,
    Progress,
    TrainSettings,
    average_over,
    evaluate,
    fit,
    make_optimiser,
    stopped_by,
)
from kronecell.training.splits import loaders
from tests.training_cases import store, tiny  # noqa: F401


def train(store: Store, seed: int = 0, **changes: Any) -> tuple[VideoClassifier, Progress]:  # noqa: F811
    experiment = tiny(**changes)
    torch.manual_seed(seed)
    model = experiment.build_model(len(store.classes))
    inside, outside = loaders(experiment, store, 0, seed)
    return model, fit(model, inside, outside, experiment.train_settings(seed))


def test_training_lowers_the_loss_and_records_every_epoch(store: Store) -> None:  # noqa: F811
    _, progress = train(store, epochs=12, learning_rate=0.01, dropout=0.0, pixel_mean=0.3)
    losses = [row["loss"] for row in progress.history]
    assert len(losses) == 12 and min(losses[-3:]) < 0.9 * losses[0]
    assert {"epoch", "loss", "train_accuracy", "top1", "seconds", "clips_per_second"} <= {*progress.history[0]}
    assert progress.top1 == max(row["top1"] for row in progress.history)


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(store: Store) -> None:  # noqa: F811
    (one, _), (two, _), (other, _) = train(store), train(store), train(store, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.classifier.weight, other.classifier.weight)


@pytest.mark.parametrize(("before", "same"), [(9.0, True), (60.0, False)])
def test_a_time_limit_that_is_not_reached_changes_nothing_however_slow_the_first_steps_are(
    store: Store,  # noqa: F811
    before: float,
    same: bool,
) -> None:
    """The demo was another run at each start: its learning rate followed the time of the first calls."""
    experiment, found = tiny(schedule="cosine", max_seconds=100.0), []
    for settings, seconds in ((experiment, before), (tiny(schedule="cosine"), 0.0)):
        torch.manual_seed(0)
        model = settings.build_model(len(store.classes))
        inside, outside = loaders(settings, store, 0, 0)
        fit(model, inside, outside, settings.train_settings(0), progress=Progress(seconds=seconds))
        found.append([*model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) == same


def test_reading_ahead_changes_nothing(store: Store) -> None:  # noqa: F811
    one, two = train(store)[0], train(store, workers=2)[0]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("shared", [False, True, ("A1",)])
def test_every_cell_and_sharing_trains(store: Store, cell: str, shared: Any) -> None:  # noqa: F811
    _, progress = train(store, cell=cell, shared=shared, epochs=1)
    assert math.isfinite(progress.history[0]["loss"])


def test_mixed_precision_trains_close_to_single_precision(store: Store) -> None:  # noqa: F811
    single, mixed = (train(store, epochs=1, dropout=0.0, precision=p)[1] for p in ("float32", "bfloat16"))
    assert mixed.history[0]["loss"] == pytest.approx(single.history[0]["loss"], rel=0.03)


def test_validation_is_the_mean_probability_over_segments(store: Store) -> None:  # noqa: F811
    experiment = tiny()
    torch.manual_seed(0)
    model = experiment.build_model(11).eval()
    _, outside = loaders(experiment, store, 0, 0)
    correct = total = 0
    with torch.no_grad():
        for batch in outside:
            for x, y, valid in zip(batch.x, batch.y, batch.valid, strict=True):
                if valid:
                    correct += int(model(x).softmax(-1).mean(0).argmax() == y)
                    total += 1
    assert total == len(outside.indices)
    assert evaluate(model, outside, batch_size=7) == pytest.approx(correct / total)


def test_an_infinite_loss_stops_before_the_weights_are_touched_and_names_the_clips(store: Store) -> None:  # noqa: F811
    experiment = tiny(learning_rate=1e30, epochs=5)
    torch.manual_seed(0)
    model = experiment.build_model(11)
    inside, outside = loaders(experiment, store, 0, 0)
    saved: list[int] = []
    with pytest.raises(Diverged, match=r"v_.*_0\d_0\d\.avi.*last good checkpoint is kept"):
        fit(model, inside, outside, experiment.train_settings(0), save=lambda p: saved.append(p.steps))
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert saved == [*range(1, len(saved) + 1)]


def test_early_stop_ends_after_epochs_without_improvement(store: Store) -> None:  # noqa: F811
    _, progress = train(store, epochs=50, learning_rate=1e-12, early_stop=3)
    assert progress.epoch == 4 and progress.best_epoch == 0


def test_a_time_budget_ends_the_epoch_early_and_still_validates(store: Store) -> None:  # noqa: F811
    _, progress = train(store, epochs=50, max_seconds=1e-6)
    assert progress.steps == 1 and progress.history[-1]["top1"] is not None


def test_what_ended_a_run_early_is_known(store: Store) -> None:  # noqa: F811
    for reason, settings in (
        ("", {"epochs": 2}),
        ("time", {"epochs": 50, "max_seconds": 1e-6}),
        ("patience", {"epochs": 50, "learning_rate": 1e-12, "early_stop": 2}),
    ):
        _, progress = train(store, **settings)
        steps = -(-22 // tiny().batch_size)
        assert stopped_by(progress, tiny(**settings).train_settings(0), steps) == reason


def test_validation_can_be_sparse_but_the_last_epoch_is_always_validated(store: Store) -> None:  # noqa: F811
    _, progress = train(store, epochs=5, eval_every=3)
    assert [row["top1"] is None for row in progress.history] == [True, True, False, True, False]


def test_a_wish_to_stop_saves_and_the_run_continues_to_the_same_bits(store: Store) -> None:  # noqa: F811
    experiment = tiny()
    whole, _ = train(store)
    torch.manual_seed(0)
    model = experiment.build_model(11)
    settings = experiment.train_settings(0)
    optimiser = make_optimiser(model, settings)
    progress, stops = Progress(), 0
    for patience in (1, 3, 2, 5, 4, 1000):  # stops after steps and inside validations
        inside, outside = loaders(experiment, store, 0, 0)
        wishes = iter([False] * (patience - 1) + [True])
        try:
            fit(
                model, inside, outside, settings, optimiser=optimiser, progress=progress,
                should_stop=lambda wishes=wishes: next(wishes, False),  # type: ignore[misc]
            )  # fmt: skip
            break
        except Interrupted:
            stops += 1
            progress = Progress(**progress.as_dict())
    assert stops >= 4
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), model.parameters(), strict=True))


def test_rates_by_structure_follow_the_schedule_in_every_group_and_survive_a_checkpoint(
    store: Store,  # noqa: F811
    tmp_path: Path,
) -> None:
    experiment = tiny(rates="structure", init="spectral", schedule="cosine", epochs=4)
    settings = experiment.train_settings(0)

    def fresh() -> tuple[VideoClassifier, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = experiment.build_model(11)
        return model, make_optimiser(model, settings)

    model, optimiser = fresh()
    whole = fit(model, *loaders(experiment, store, 0, 0), settings, optimiser=optimiser)
    rates = {group["scale"]: group["lr"] for group in optimiser.param_groups}
    assert len(rates) > 3 and whole.epoch == 4
    assert all(rate == pytest.approx(scale * rates[1.0]) and rate > 0 for scale, rate in rates.items())

    again, other = fresh()
    saved: list[Progress] = []

    def save(progress: Progress) -> None:
        saved.append(Progress(**progress.as_dict()))
        save_checkpoint(tmp_path, again, other, {}, progress.steps)

    wishes = iter([False] * 6 + [True])
    with pytest.raises(Interrupted):
        fit(again, *loaders(experiment, store, 0, 0), settings, optimiser=other, save=save,
            should_stop=lambda: next(wishes, False))  # fmt: skip
    resumed, third = fresh()
    load_checkpoint(tmp_path, resumed, third)
    fit(resumed, *loaders(experiment, store, 0, 0), settings, optimiser=third, progress=saved[-1])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize(("epochs", "window"), [(400, 100), (200, 100), (199, 49), (40, 10), (3, 1), (1, 1)])
def test_the_average_is_over_the_papers_100_epochs_or_a_quarter(epochs: int, window: int) -> None:
    assert average_over(epochs) == window


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"learning_rate": 0.0},
        {"learning_rate": math.nan},
        {"learning_rate": 1e38},
        {"weight_decay": -1.0},
        {"clip_norm": math.inf},
        {"precision": "float8"},
        {"schedule": "sideways"},
        {"rates": "guessed"},
        {"eval_every": 0},
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(wrong: dict[str, Any]) -> None:
    from kronecell.training.loop import check_settings

    with pytest.raises(KronecellError, match=next(iter(wrong))):
        check_settings(TrainSettings(**wrong))


def test_the_model_takes_bytes_and_floats_alike_and_normalises_as_documented() -> None:
    torch.manual_seed(0)
    frames = torch.randint(0, 256, (2, 6, 2304), dtype=torch.uint8)
    for changes in ({}, {"pixel_mean": 0.3, "input_gain": 0.5}, {"normalise": "frame"}):
        model = tiny(**changes).build_model(11).eval()
        torch.testing.assert_close(model(frames), model(frames.float()), rtol=1e-5, atol=1e-6)

    def read(model: torch.nn.Module) -> torch.Tensor:  # the layer reads a byte as a number from 0 to 1
        scale, shift = model.normalisation(frames)
        return frames.float() / 255 * scale + shift

    x = read(tiny(pixel_mean=0.3, input_gain=0.5).build_model(11))
    torch.testing.assert_close(x, (frames.float() / 255 - 0.3) * 0.5)
    x = read(tiny(normalise="frame").build_model(11))
    torch.testing.assert_close(x.mean(-1), torch.zeros(2, 6), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.square().mean(-1), torch.ones(2, 6), atol=1e-3, rtol=0)
