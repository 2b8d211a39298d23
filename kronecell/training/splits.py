"""Which clips a run trains on and which it validates on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kronecell.data import Loader, Store, make_folds
from kronecell.errors import DataError, KronecellError
from kronecell.training.distributed import World
from kronecell.training.experiment import Experiment

FOLDS: dict[str, Any] = {
    "k": 5,
    "seed": 0,
    "method": "group",
}  # for a store without folds; `kronecell data prepare` makes the same


def settle_folds(experiment: Experiment, store: Store | None) -> Experiment:
    """The experiment with number, seed and method of its folds; where it leaves them open, the store's."""
    stored = (store.manifest["folds"] if store else None) or FOLDS
    return replace(
        experiment,
        folds=experiment.folds or stored["k"],
        fold_seed=experiment.fold_seed if experiment.fold_seed >= 0 else stored["seed"],
        fold_method=experiment.fold_method if experiment.fold_method != "store" else stored["method"],
    )


def fold_of_each_clip(experiment: Experiment, store: Store) -> tuple[int, ...]:
    """The store's own folds where the experiment agrees with them, otherwise those the experiment describes."""
    e, stored = settle_folds(experiment, store), store.manifest["folds"]
    if stored is not None and (e.folds, e.fold_seed, e.fold_method) == (stored["k"], stored["seed"], stored["method"]):
        return store.folds
    return make_folds(store.clips, e.folds, e.fold_seed, e.fold_method)


def check_fold(fold: int, count: int) -> None:
    """Refuse a fold that is not there."""
    if not 0 <= fold < count:
        raise KronecellError(f"fold must be 0 to {count - 1}, got {fold}")


def loaders(
    experiment: Experiment, store: Store, fold: int, seed: int, world: World | None = None
) -> tuple[Loader, Loader]:
    """Training on all folds but one, validation on that one."""
    world = world or World()
    check_fold(fold, settle_folds(experiment, store).folds)
    if (store.width, store.height) != (experiment.width, experiment.height):
        raise DataError(
            f"{store.root}: has frames of {store.width} x {store.height}, the experiment needs "
            f"{experiment.width} x {experiment.height}; prepare it with these sizes"
        )
    if store.channels != experiment.channels:
        raise DataError(
            f"{store.root}: has frames of {store.channels} channel(s), the experiment needs {experiment.channels}; "
            f"--set channels={store.channels} takes what the store has"
        )
    folds = fold_of_each_clip(experiment, store)
    inside = [i for i, f in enumerate(folds) if f != fold]
    outside = [i for i, f in enumerate(folds) if f == fold]
    common = {"seed": seed, "rank": world.rank, "world_size": world.size, "frames": experiment.frames}
    common |= {"workers": experiment.workers, "segments": experiment.segments, "spread": experiment.spread}
    train = Loader(store, inside, experiment.batch_size, flip=experiment.flip, **common)  # type: ignore[arg-type]
    parts = experiment.segments if experiment.frames else 1
    videos = world.size * max(1, experiment.batch_size // (parts * world.size))
    return train, Loader(store, outside, videos, train=False, **common)  # type: ignore[arg-type]


def data_notes(experiment: Experiment, store: Store) -> list[str]:
    """What a person should know about the data when training starts."""
    notes = []
    needed = experiment.segments * experiment.frames
    short = sum(store.num_frames(i) < needed for i in range(len(store)))
    if short and experiment.spread:
        notes.append(
            f"{short} of {len(store)} clips have fewer than {needed} frames ({experiment.segments} segments of "
            f"{experiment.frames}): their samples overlap, each over half of the clip"
        )
    thinned = sum(len(store.indices(i)) < store.num_frames(i) for i in range(len(store)))
    if thinned and experiment.frames == 0:
        notes.append(
            f"{thinned} of {len(store)} clips are longer than what the store keeps of them: frames are left out"
        )
    present = {clip.label for clip in store.clips}
    missing = [label for label in store.classes if label not in present]
    if missing:
        notes.append(f"no readable clip of the class(es) {', '.join(missing[:8])}")
    return notes


def check_classes(experiment: Experiment, store: Store) -> None:
    """Refuse a store with another number of classes than the experiment insists on."""
    found = len(store.classes)
    if experiment.classes not in (0, found):
        raise DataError(
            f"{store.root}: has {found} classes, experiment {experiment.name!r} expects {experiment.classes}"
            f"{experiment.dataset and f' ({experiment.dataset})'}; --set classes=0 takes what the data has"
        )
