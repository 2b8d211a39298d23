"""Training checkpoints: tensors as safetensors, everything else as JSON, replaced so that one of them is always whole.

    checkpoint.json                   written last; names the file with the tensors and has their digest and its own
    checkpoint-STEP.safetensors       model, optimiser and random generators

A kill between the two writes leaves the old pair; the next save deletes tensors that checkpoint.json does not
name. Nothing is pickled, and nothing depends on how many processes were training. What is read back is checked first:
types and ranges, digests, and every shape against this run's model; checkpoints of release 0.1 have no digest.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kronecell.deploy.atomic import write_atomically
from kronecell.deploy.records import (
    anything,
    is_there,
    many,
    named,
    number,
    optional,
    read_json,
    row,
    table,
    text,
    whole,
)
from kronecell.deploy.tensorfile import read_tensors, write_tensors
from kronecell.errors import CheckpointError, printable

RECORD = "checkpoint.json"
FORMAT = "kronecell checkpoint 1"
ANEW = "delete checkpoint.json to start this run again"
HASH = text(64, "[0-9a-f]{64}")
WORD = whole(0, 2**32 - 1)
SCHEMA = table(
    {
        "format": text(100, FORMAT),
        "tensors": text(100, r"checkpoint-\d+(-again)?\.safetensors"),
        "random": table(
            {
                # Positions and words in range: the generators themselves believe what they are given.
                "numpy": row(whole(0, 624), whole(0, 1), number()),
                "python": row(whole(3, 3), row(*[WORD] * 624, whole(0, 624)), optional(number())),
            }
        ),
        "facts": named(anything),
        "optimiser": many(table({"params": many(whole(), 100_000)}), 1000),
    },
    {"tensors_sha256": HASH, "record_sha256": HASH},
)


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
    names = (f"checkpoint-{number}.safetensors", f"checkpoint-{number}-again.safetensors")
    name = names[_whole_now(folder) == names[0]]  # never over the tensors of the checkpoint that is whole now
    digest = save_tensors(folder / name, tensors)
    record = {"format": FORMAT, "tensors": name, "tensors_sha256": digest, "random": random_facts, "facts": dict(facts)}
    record["optimiser"] = state["param_groups"]
    record["record_sha256"] = _digest(record)
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
    tensors = read_tensors(folder / record["tensors"], advice=ANEW, digest=record.get("tensors_sha256"))
    load_weights(model, {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}, folder)
    try:
        _restore_optimiser(optimiser, tensors, record["optimiser"])
        _restore_random(tensors, record["random"])
    except Exception as error:  # torch, numpy and random have an error of their own for every wrong number
        raise CheckpointError(f"{printable(folder)}: its checkpoint does not fit this run: {error}") from None
    return dict(record["facts"])


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors in one piece as safetensors; returns their digest, which the file has too."""
    return write_tensors(path, tensors)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, against its digest."""
    return read_tensors(path)


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
    if not is_there(path):
        return None
    record: dict[str, Any] = read_json(path, SCHEMA, CheckpointError, ANEW, most=64 << 20)
    digest = record.pop("record_sha256", None)
    if digest is not None and digest != _digest(record):
        raise CheckpointError(f"{printable(path)}: is damaged: it does not match its digest; {ANEW}")
    return record


def _whole_now(folder: Path) -> str | None:
    try:
        record = _record(folder)
    except CheckpointError:
        return None
    return None if record is None else record["tensors"]


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _restore_optimiser(
    optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor], saved: list[dict[str, Any]]
) -> None:
    """Put in the saved state; the settings of the groups are this run's, and were the same when it was saved."""
    groups = optimiser.state_dict()["param_groups"]
    if len(saved) != len(groups):
        raise CheckpointError(f"{len(saved)} groups of parameters instead of {len(groups)}")
    for old, new in zip(saved, json.loads(json.dumps(groups)), strict=True):
        # The learning rate is set in every step.
        wrong = [name for name in {*old} & {*new} - {"lr"} if old[name] != new[name]]
        if wrong:
            raise CheckpointError(f"the optimiser's {', '.join(sorted(wrong))} differ")
    shapes = [tuple(parameter.shape) for group in optimiser.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimiser."):
            _, index, entry = name.split(".", 2)
            if tuple(tensor.shape) != (() if entry == "step" else shapes[int(index)]):
                raise CheckpointError(f"{name} has the shape {tuple(tensor.shape)}")
            state.setdefault(int(index), {})[entry] = tensor
    if len({tuple(sorted(entries)) for entries in state.values()}) > 1:
        raise CheckpointError("a part of the optimiser's state is missing")
    optimiser.load_state_dict({"state": state, "param_groups": groups})


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
