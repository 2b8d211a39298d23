"""Training checkpoints: tensors as safetensors, everything else as JSON, replaced so that one of them is always whole.

    checkpoint.json                   written last; names the file with the tensors
    checkpoint-STEP.safetensors       model, optimiser and random generators

A kill between the two writes leaves the old pair; the next save deletes tensors that checkpoint.json does not
name. Nothing is pickled, and nothing depends on how many processes were training.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kronecell.deploy.atomic import write_atomically
from kronecell.errors import CheckpointError

RECORD = "checkpoint.json"
FORMAT = "kronecell checkpoint 1"


def save_checkpoint(
    folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, facts: Mapping[str, Any], number: int
) -> None:
    """Replace the checkpoint in `folder`; `facts` is whatever JSON the caller needs back."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    state = optimiser.state_dict()
    for index, entries in state["state"].items():
        for name, value in entries.items():
            tensors[f"optimiser.{index}.{name}"] = torch.as_tensor(value)
    random_tensors, random_facts = _random_state()
    tensors |= random_tensors
    name = f"checkpoint-{number}.safetensors"
    save_tensors(folder / name, tensors)
    record = {"format": FORMAT, "tensors": name, "random": random_facts, "facts": dict(facts)}
    record["optimiser"] = state["param_groups"]
    text = json.dumps(record, indent=1) + "\n"
    write_atomically(folder / RECORD, lambda path: path.write_text(text))
    for old in folder.glob("checkpoint-*.safetensors"):
        if old.name != name:
            old.unlink(missing_ok=True)


def read_facts(folder: Path) -> dict[str, Any] | None:
    """The facts of the checkpoint in `folder`, or None if there is none."""
    record = _record(folder)
    return None if record is None else record["facts"]


def load_checkpoint(folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Put the checkpoint in `folder` into model, optimiser and generators; returns its facts, None if there is none."""
    record = _record(folder)
    if record is None:
        return None
    tensors = load_tensors(folder / record["tensors"])
    load_weights(model, {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}, folder)
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimiser."):
            _, index, entry = name.split(".", 2)
            state.setdefault(int(index), {})[entry] = tensor
    try:
        optimiser.load_state_dict({"state": state, "param_groups": record["optimiser"]})
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: its optimiser does not fit this run: {error}") from None
    _restore_random(tensors, record["random"])
    return dict(record["facts"])


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors in one piece as safetensors."""
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}

    def write(target: Path) -> None:
        try:
            save_file(plain, target)
        except SafetensorError as error:
            raise CheckpointError(f"cannot write {path}: {' '.join(str(error).split())}") from None

    write_atomically(path, write)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({' '.join(str(error).split())}); delete checkpoint.json to start this run again"
        ) from None


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], source: Path) -> None:
    """Copy weights into a model that has exactly these, or say what differs."""
    own = model.state_dict()
    wrong = sorted(name for name in {*own, *weights} if name not in own or name not in weights)
    wrong += sorted(name for name in {*own} & {*weights} if own[name].shape != weights[name].shape)
    if wrong:
        raise CheckpointError(f"{source}: holds another model; these weights differ: {', '.join(wrong[:5])}")
    model.load_state_dict(dict(weights))


def _record(folder: Path) -> dict[str, Any] | None:
    path = folder / RECORD
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(f"{path}: is not a '{FORMAT}'; delete it to start this run again")
    return record


def _random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The generators of torch, numpy and Python, as tensors and as JSON."""
    tensors = {"random.torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    legacy = np.random.get_state(legacy=False)  # noqa: NPY002 (the global generator is what has to be kept)
    assert isinstance(legacy, dict)
    tensors["random.numpy"] = torch.from_numpy(legacy["state"]["key"].astype(np.int64))
    version, words, gauss = random.getstate()
    facts = {
        "numpy": [legacy["state"]["pos"], legacy["has_gauss"], legacy["gauss"]],
        "python": [version, [*words], gauss],
    }
    return tensors, facts


def _restore_random(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    torch.set_rng_state(tensors["random.torch"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
    position, has_gauss, gauss = facts["numpy"]
    key = tensors["random.numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, gauss))  # noqa: NPY002
    version, words, python_gauss = facts["python"]
    random.setstate((version, tuple(words), python_gauss))
