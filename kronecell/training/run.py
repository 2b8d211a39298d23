"""Run an experiment in a directory of its own: locked, resumable, and done only once.

OUT/NAME/foldF-seedS/
  config.toml        the resolved experiment          environment.json   versions, threads, processor
  metrics.jsonl      one line per epoch               status.json        running, finished, failed, interrupted
  result.json        when finished                    model.json         the classifier: classes, preprocessing, layers
  best.safetensors   its weights, of the best epoch: kronecell.load(folder) gives the two as a VideoClassifier
  checkpoint.json and checkpoint-*.safetensors        lock               held while a process trains
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kronecell.data import Loader, Store
from kronecell.deploy.atomic import LockedError, exclusive, remove_temporaries, write_atomically
from kronecell.deploy.records import is_there
from kronecell.errors import CheckpointError, KronecellError, printable
from kronecell.training.checkpoint import RECORD, load_checkpoint, save_checkpoint, save_tensors
from kronecell.training.display import Display, TensorBoard
from kronecell.training.distributed import World
from kronecell.training.environment import environment
from kronecell.training.experiment import (
    OLD,
    Experiment,
    differences,
    list_experiments,
    load_experiment,
    make_experiment,
    parse_overrides,
    read_toml,
)
from kronecell.training.loop import (
    Callbacks,
    Diverged,
    Interrupted,
    Progress,
    fit,
    make_optimiser,
    make_sparsity,
)
from kronecell.training.protocol import settle_data
from kronecell.training.records import read_result, read_status, saved_progress
from kronecell.training.result import make_result
from kronecell.training.saved import WEIGHTS, write_description
from kronecell.training.splits import check_classes, data_notes, loaders, settle_folds

__all__ = [
    "Experiment",
    "list_experiments",
    "load_experiment",
    "make_experiment",
    "parse_overrides",
    "run",
    "run_folder",
]


class Busy(KronecellError):
    """Another process trains this run."""

    exit_code = 1


def run_folder(out: Path, experiment: Experiment, fold: int, seed: int) -> Path:
    """Where a run lives."""
    return Path(out) / (experiment.name or "experiment") / f"fold{fold}-seed{seed}"


def run(
    experiment: Experiment,
    store: Store,
    out: str | os.PathLike[str] = "runs",
    fold: int = 0,
    seed: int = 0,
    *,
    world: World | None = None,
    show: bool = True,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Train one fold with one seed and return its result; a finished run is only read, an interrupted one continued.

    SIGTERM and SIGINT save a checkpoint and raise Interrupted. `notes` are added to the deviations in the result.
    """
    world = world or World()
    # So that the run directory says which folds it used, and on which data.
    experiment = settle_data(settle_folds(experiment, store), store.manifest["name"], store.classes, len(store))
    folder = run_folder(Path(out), experiment, fold, seed)
    experiment = _as_started(folder, experiment)
    finished = _finished_result(folder, experiment, store)
    world.wait()  # every process reads before one of them writes
    if finished is not None:
        if world.is_main and read_status(folder).get("state") != "finished":  # killed after the result was written
            with _lock(folder, world):
                _status(folder, world, "finished", "", finished["epochs"], experiment.epochs)
        if world.is_main and show:
            text = "was finished before, its result is read; another --seed or --set name=NAME trains anew"
            print(f"{printable(folder)}: {text}", file=sys.stderr, flush=True)
        return finished
    # Before anything is written: settings that do not fit the data must not stay behind in the run directory.
    check_classes(experiment, store)
    batches = loaders(experiment, store, fold, seed, world)
    with _lock(folder, world):
        read_status(folder)  # a damaged one is refused before it is written over
        _settle_config(folder, experiment, world)
        try:
            with _stop_on_signals() as should_stop:
                return _train(folder, experiment, store, batches, fold, seed, world, show, notes, should_stop)
        except Interrupted:
            _status(folder, world, "interrupted", "stopped by a signal; run again to continue")
            raise
        except (KronecellError, OSError) as error:
            _status(folder, world, "failed", str(error))
            raise
        except BaseException as error:
            reason = world.explained(error)
            _status(folder, world, "failed", f"{type(reason).__name__}: {reason}")
            if reason is error:
                raise
            raise reason from None


def _train(
    folder: Path,
    experiment: Experiment,
    store: Store,
    batches: tuple[Loader, Loader],
    fold: int,
    seed: int,
    world: World,
    show: bool,
    notes: Sequence[str],
    should_stop: Callable[[], bool],
) -> dict[str, Any]:
    train, valid = batches
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (the global generators are part of every checkpoint)
    random.seed(seed)
    model = experiment.build_model(store.classes, _facts(experiment, store, fold, seed)).to(world.device)
    settings = experiment.train_settings(seed)
    if world.is_main:
        write_description(folder, model)
    progress = saved_progress(folder, store.manifest_hash, fold, seed)
    sparsity = make_sparsity(model, settings, len(train), progress)
    optimiser = make_optimiser(model, settings)
    if progress is not None:
        load_checkpoint(folder, model, optimiser)
    elif world.is_main and is_there(folder / "metrics.jsonl") and (folder / "metrics.jsonl").stat().st_size:
        print(f"{printable(folder)}: has no {RECORD}; starts from the first epoch", file=sys.stderr, flush=True)
    progress = progress or Progress()
    records = _Records(folder, world, model, progress, experiment.epochs)
    display = Display(f"{experiment.name} fold {fold} seed {seed}", experiment.epochs, experiment.max_seconds, show)
    if not (show and world.is_main):
        display.close()
        display.show = False
    board = TensorBoard(folder / "tensorboard") if world.is_main else None
    identity = {"manifest_hash": store.manifest_hash, "fold": fold, "seed": seed}

    def save(progress: Progress) -> None:
        if world.is_main:
            save_checkpoint(folder, model, optimiser, {**identity, "progress": progress.as_dict()}, progress.steps)
        world.wait()

    if progress.steps:
        display.note(f"goes on in epoch {progress.epoch + 1}, after step {progress.steps} of the run")
    for text in data_notes(experiment, store):
        display.note(text)
    try:
        fit(
            model,
            train,
            valid,
            settings,
            optimiser=optimiser,
            sparsity=sparsity,
            progress=progress,
            world=world,
            save=save,
            callbacks=_All(records, display, board),
            should_stop=should_stop,
        )
    except Diverged as error:
        raise Diverged(f"{folder}: {error}") from None
    finally:
        display.close()
        if board is not None:
            board.close()
    replaced = [*train.replaced, *valid.replaced]
    result = make_result(experiment, model, progress, store, fold, seed, train, valid, notes, replaced)
    if world.is_main:
        _write_json(folder / "result.json", result)
    _status(folder, world, "finished", "", progress.epoch, experiment.epochs)
    world.wait()
    return result


def _facts(experiment: Experiment, store: Store, fold: int, seed: int) -> dict[str, Any]:
    """What `kronecell evaluate` needs to know which clips the model has not seen."""
    folds = {"k": experiment.folds, "seed": experiment.fold_seed, "method": experiment.fold_method}
    return {
        "experiment": experiment.name,
        "format": experiment.format,
        "fold": fold,
        "seed": seed,
        "folds": folds,
        "manifest_hash": store.manifest_hash,
    }


class _All(Callbacks):
    def __init__(self, *parts: Callbacks | None) -> None:
        self.parts = [part for part in parts if part is not None]

    def on_step(self, progress: Progress, steps: int) -> None:
        for part in self.parts:
            part.on_step(progress, steps)

    def on_evaluation(self, done: int, total: int) -> None:
        for part in self.parts:
            part.on_evaluation(done, total)

    def on_epoch(self, row: dict[str, Any], improved: bool) -> None:
        for part in self.parts:
            part.on_epoch(row, improved)


class _Records(Callbacks):
    """Keeps metrics.jsonl, status.json and the best weights on rank 0."""

    def __init__(self, folder: Path, world: World, model: torch.nn.Module, progress: Progress, epochs: int) -> None:
        self.folder, self.world, self.model, self.epochs = folder, world, model, epochs
        # Lines after the checkpoint belong to steps that will run again.
        lines = "".join(json.dumps(row) + "\n" for row in progress.history)
        if world.is_main:
            write_atomically(folder / "metrics.jsonl", lambda path: path.write_text(lines))
        _status(folder, world, "running", "", progress.epoch, epochs)

    def on_epoch(self, row: dict[str, Any], improved: bool) -> None:
        if not self.world.is_main:
            return
        try:
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise KronecellError(f"cannot write {self.folder / 'metrics.jsonl'}: {error.strerror or error}") from None
        if improved:
            save_tensors(self.folder / WEIGHTS, self.model.state_dict())
        _status(self.folder, self.world, "running", "", row["epoch"] + 1, self.epochs)


# The run directory ----------------------------------------------------------------------------------------------


def _finished_result(folder: Path, experiment: Experiment, store: Store) -> dict[str, Any] | None:
    if not is_there(folder / "result.json"):
        return None
    _check_config(folder, experiment)
    result = read_result(folder)
    if result.get("manifest_hash") != store.manifest_hash:
        raise CheckpointError(f"{folder}: was trained on other data; use the same data or another --out")
    return result


def _settle_config(folder: Path, experiment: Experiment, world: World) -> None:
    _check_config(folder, experiment)
    world.wait()
    if world.is_main:
        write_atomically(folder / "config.toml", lambda path: path.write_text(experiment.to_toml()))
        _write_json(folder / "environment.json", environment(world.size, str(world.device)))


def _as_started(folder: Path, experiment: Experiment) -> Experiment:
    """Settings that an older release did not have are what it did, in a run that it started."""
    path = folder / "config.toml"
    old = read_toml(path) if is_there(path) else OLD
    missing: dict[str, Any] = {key: value for key, value in OLD.items() if key not in old}
    return replace(experiment, **missing)


def _check_config(folder: Path, experiment: Experiment) -> None:
    path = folder / "config.toml"
    begun = any(is_there(folder / name) for name in (RECORD, "result.json"))
    if is_there(path) and begun:  # what never made a step is simply started with the new settings
        changed = differences(read_toml(path), experiment)
        if changed:
            raise KronecellError(
                f"{folder}: was started with other settings ({'; '.join(changed[:4])}); "
                f"use another --out or --set name=..., or delete the folder"
            )
    elif begun:
        raise CheckpointError(f"{printable(path)} is missing: with which settings this run was started is not known")


@contextmanager
def _lock(folder: Path, world: World) -> Iterator[None]:
    """Only one run at a time; the system releases the lock however the process ends."""
    if not world.is_main:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KronecellError(f"cannot write to {folder}: {error.strerror or error}") from None
    try:
        with exclusive(folder / "lock"):
            remove_temporaries(folder)  # of a process that was killed while writing
            yield
    except LockedError:
        raise Busy(f"{folder}: another process is training here; wait for it or use --out") from None


@contextmanager
def _stop_on_signals() -> Iterator[Callable[[], bool]]:
    """SIGTERM and SIGINT ask for a stop at the next step; a second one stops at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield lambda: False
        return

    def receive(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    old = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _status(
    folder: Path, world: World, state: str, message: str, epoch: int | None = None, epochs: int | None = None
) -> None:
    """Write status.json; where that fails too (a full disk), the error that led here is the one to report."""
    if not world.is_main:
        return
    path = folder / "status.json"
    try:
        before = read_status(folder) if epoch is None or epochs is None else {}
        record = {
            "state": state,
            "epoch": before.get("epoch", 0) if epoch is None else epoch,
            "epochs": before.get("epochs", 0) if epochs is None else epochs,
            "message": message,
        }
        _write_json(path, record)
    except (KronecellError, OSError, ValueError):
        if state in ("running", "finished"):
            raise


def _write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1) + "\n"
    write_atomically(path, lambda target: target.write_text(text))
