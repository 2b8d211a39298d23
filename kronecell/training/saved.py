"""A run directory, or a folder of `kc.save`, as the model that is in it.

A run directory holds model.json (the classifier's arguments, names of classes, preprocessing, where it was trained) and
best.safetensors. Runs of release 0.1 have no model.json: config.toml describes the model, and the names of its classes
are in the store that it was trained on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kronecell import __version__
from kronecell.data import Store, open_store
from kronecell.data.manifest import manifest_hash, read_manifest
from kronecell.deploy import modules
from kronecell.deploy.atomic import write_atomically
from kronecell.deploy.described import borne_out, description
from kronecell.deploy.records import Wrong, anything, named, read_json, table, text, whole
from kronecell.deploy.tensorfile import kinds_of, what_differs
from kronecell.errors import CheckpointError, KronecellError
from kronecell.training.checkpoint import load_tensors, load_weights
from kronecell.training.classifier import VideoClassifier
from kronecell.training.experiment import OLD, load_experiment, read_toml

DESCRIPTION, WEIGHTS, SETTINGS = "model.json", "best.safetensors", "config.toml"
SCHEMA = table(
    {"kronecell_model": whole(1, 1000), "class": text(100), "arguments": named(anything, most=1000)},
    {"versions": named(text(100), most=100)},
)
VERSION = 1  # raised when a reader of the old version could not read the new one


def load(path: str | Path, into: nn.Module | None = None, device: torch.device | str | None = None) -> Any:
    """The module in a folder written by `kc.save`, or the trained classifier of a run directory.

    `into` is filled instead, with what was saved from a module like it.
    """
    run = find_run(Path(path))
    if run is None:
        return modules.load(path, into, device)
    model = load_run(run, device=device)
    if into is None:
        return model
    load_weights(into, model.state_dict(), run)
    return into


def find_run(path: Path) -> Path | None:
    """`path` if it is a run directory, or the only run of an experiment's folder; None if it holds no run."""
    if _is_run(path):
        return path
    if not os.path.isdir(path) or os.path.isfile(path / modules.CONFIG):
        return None
    inside = sorted(child for child in path.iterdir() if child.is_dir() and _is_run(child))
    if len(inside) > 1:
        names = ", ".join(child.name for child in inside[:6])
        raise CheckpointError(f"{path} holds {len(inside)} runs ({names}); name one of them")
    return inside[0] if inside else None


def _is_run(path: Path) -> bool:
    # os.path answers False for a name that no file can have, where Path raises.
    return os.path.isfile(path / SETTINGS) or os.path.isfile(path / DESCRIPTION)


def write_description(folder: Path, model: VideoClassifier) -> None:
    """model.json of a run."""
    record = {"kronecell_model": VERSION, "versions": {"kronecell": __version__, "torch": str(torch.__version__)}}
    content = json.dumps(record | modules.describe(model), indent=1) + "\n"
    write_atomically(folder / DESCRIPTION, lambda path: path.write_text(content))


def load_run(
    folder: Path, data: str | os.PathLike[str] | None = None, device: torch.device | str | None = None
) -> VideoClassifier:
    """The classifier of a run directory with the weights of its best epoch.

    `data` is the store of a run of release 0.1, for the names of its classes; without it, a store beside the run is
    found by its content, or the classes are numbered (`named` is False).
    """
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder} has no weights yet ({WEIGHTS}): its run has not reached its first validation")
    tensors = load_tensors(folder / WEIGHTS)
    if (folder / DESCRIPTION).is_file():
        arguments = _read_description(folder / DESCRIPTION, tensors)
        try:
            model = VideoClassifier.from_saved(arguments, dtype=next(iter(tensors.values())).dtype, device="meta")
        except Exception as error:  # a constructor may fail in any way on arguments that nobody wrote
            raise CheckpointError(f"{folder / DESCRIPTION} does not describe a model: {error}") from None
    else:
        if "classifier.weight" not in tensors:
            raise CheckpointError(f"{folder / WEIGHTS}: missing tensors classifier.weight")
        model = _of_release_0_1(folder, len(tensors["classifier.weight"]), data)
    expected, found = kinds_of(model.state_dict()), kinds_of(tensors)
    if expected != found:  # before memory is asked for
        raise CheckpointError(f"{folder / WEIGHTS}: {what_differs(expected, found)}")
    model = model.to_empty(device=device or "cpu")
    load_weights(model, tensors, folder)
    return model.eval()


def find_store(model: VideoClassifier, near: Path) -> Store | None:
    """The store that a model was trained on, if it lies beside its run, recognised by the hash of its content."""
    wanted = model.facts.get("manifest_hash")
    return next((open_store(root) for root in _stores(near) if _hash_of(root) == wanted), None) if wanted else None


def _stores(near: Path) -> Iterator[Path]:
    """Stores beside a run (runs/NAME/fold0-seed0), in runs/stores, beside runs, and in the current folder."""
    seen = set()
    for above in (*near.resolve().parents[:3], Path.cwd()):
        for manifest in sorted({*above.glob("*/manifest.json"), *above.glob("stores/*/manifest.json")}):
            if manifest.parent not in seen:
                seen.add(manifest.parent)
                yield manifest.parent


def _hash_of(root: Path) -> str | None:
    try:
        return manifest_hash(read_manifest(root / "manifest.json"))
    except (KronecellError, KeyError, OSError):
        return None


def _read_description(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    record = read_json(path, SCHEMA, CheckpointError)
    version = record["kronecell_model"]
    if version > VERSION:
        raise CheckpointError(
            f"{path} has version {version}, this kronecell reads up to {VERSION}; install a newer kronecell"
        )
    try:
        description(record, "model")
        borne_out(record, kinds_of(tensors))
    except Wrong as error:
        raise CheckpointError(f"{path}: {error}") from None
    return dict(record["arguments"])


def _of_release_0_1(folder: Path, classes: int, data: str | os.PathLike[str] | None) -> VideoClassifier:
    own = read_toml(folder / SETTINGS)
    experiment = load_experiment(str(folder / SETTINGS), {key: old for key, old in OLD.items() if key not in own})
    facts: dict[str, Any] = {"experiment": experiment.name, "format": experiment.format}
    try:
        result = json.loads((folder / "result.json").read_text())
        facts |= {key: result[key] for key in ("fold", "seed", "manifest_hash")}
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not finished
    facts["folds"] = {"k": experiment.folds, "seed": experiment.fold_seed, "method": experiment.fold_method}
    with torch.device("meta"):
        model = experiment.build_model(classes, facts)
    store = open_store(data) if data is not None else find_store(model, folder)
    if store is not None:
        if len(store.classes) != classes:
            raise CheckpointError(f"{folder} has {classes} classes, {store.root} has {len(store.classes)}")
        model.class_names, model.named = store.classes, True
    return model
