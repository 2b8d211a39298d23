"""Which clips a run validates on: the folds of the store, unless the experiment says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomllib

from kronecell.data import Store, find_dataset, make_folds, prepare, write_synthetic
from kronecell.errors import KronecellError
from kronecell.training.experiment import Experiment, list_experiments, load_experiment
from kronecell.training.run import run, run_folder
from kronecell.training.splits import loaders, settle_folds
from tests.training_cases import tiny

UNSAID = {"folds": 0, "fold_method": "store", "fold_seed": -1}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store whose folds are none of the defaults."""
    folder = tmp_path_factory.mktemp("folds")
    videos = write_synthetic(folder / "videos", 4, 2, (32, 24), 12, progress=False)
    options = {"workers": 1, "progress": False, "folds": 3, "fold_seed": 7, "fold_method": "random"}
    return prepare(find_dataset(videos), folder / "store", 32, 24, **options)  # type: ignore[arg-type]


def validated(experiment: Experiment, store: Store, fold: int) -> list[int]:
    return [int(i) for i in loaders(experiment, store, fold, seed=0)[1].indices]


def test_training_validates_on_the_folds_that_prepare_made(store: Store) -> None:
    for fold in range(3):
        expected = [i for i, f in enumerate(store.folds) if f == fold]
        assert validated(tiny(**UNSAID), store, fold) == expected
        assert expected != [i for i, f in enumerate(make_folds(store.clips, 3)) if f == fold]
    with pytest.raises(KronecellError, match="fold must be 0 to 2, got 3"):
        loaders(tiny(**UNSAID), store, 3, seed=0)


def test_an_experiment_may_say_otherwise(store: Store) -> None:
    for said, settings in (
        ({"folds": 2}, (2, 7, "random")),
        ({"fold_seed": 1}, (3, 1, "random")),
        ({"folds": 2, "fold_method": "group", "fold_seed": 0}, (2, 0, "group")),
    ):
        experiment = tiny(**(UNSAID | said))
        expected = [i for i, f in enumerate(make_folds(store.clips, *settings)) if f == 0]
        assert validated(experiment, store, 0) == expected
        settled = settle_folds(experiment, store)
        assert (settled.folds, settled.fold_seed, settled.fold_method) == settings


def test_a_store_without_folds_is_split_as_prepare_does_by_default(tmp_path: Path) -> None:
    videos = write_synthetic(tmp_path / "videos", 5, 5, (32, 24), 12, progress=False)
    whole = prepare(find_dataset(videos), tmp_path / "store", 32, 24, workers=2, progress=False, folds=60)
    assert whole.manifest["folds"] is None  # more folds than groups
    settled = settle_folds(tiny(**UNSAID), whole)
    assert (settled.folds, settled.fold_seed, settled.fold_method) == (5, 0, "group")
    assert validated(tiny(**UNSAID), whole, 0) == [i for i, f in enumerate(make_folds(whole.clips)) if f == 0]


def test_a_run_records_the_folds_it_used(store: Store, tmp_path: Path) -> None:
    experiment = tiny(**UNSAID, epochs=1)
    result = run(experiment, store, tmp_path, fold=2, show=False)
    config = tomllib.loads((run_folder(tmp_path, experiment, 2, 0) / "config.toml").read_text())
    assert (config["folds"], config["fold_seed"], config["fold_method"]) == (3, 7, "random")
    assert "folds 3 instead of 5" in result["deviations"]
    assert any("folds are random" in text for text in result["deviations"])
    assert run(experiment, store, tmp_path, fold=2, show=False) == result


def test_packaged_experiments_leave_folds_to_the_store_but_where_a_data_set_has_a_protocol() -> None:
    for name in list_experiments():
        e = load_experiment(name)
        if e.dataset == "avletters":  # its protocol is part of the data set: a repetition is held out
            assert (e.folds, e.fold_method) == (3, "repetition"), name
        else:
            assert (e.folds, e.fold_method, e.fold_seed) == (0, "store", -1), name
