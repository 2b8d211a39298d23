"""What the files of a run directory may say; a damaged one is named, and a run never starts again without a word."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kronecell.deploy.records import (
    Wrong,
    checked,
    is_there,
    many,
    number,
    one_of,
    optional,
    read_json,
    table,
    text,
    whole,
)
from kronecell.errors import CheckpointError, printable
from kronecell.training.checkpoint import ANEW, RECORD, read_facts
from kronecell.training.loop import Progress

STATES = ("running", "finished", "failed", "interrupted")
MOST_EPOCHS = 10**7

STATUS = table(
    {"state": one_of(*STATES)},
    {"epoch": whole(0, MOST_EPOCHS), "epochs": whole(0, MOST_EPOCHS), "message": text(100_000)},
)
COUNT, SHARE = whole(0, 2**62), number(0, 1)
RESULT = table(
    {
        **dict.fromkeys(("experiment", "format", "dataset", "manifest_hash"), text()),
        **dict.fromkeys(("top1", "avg"), SHARE),
        **dict.fromkeys(("params_w", "params_model", "macs_executed", "macs_paper"), number(0)),
        **dict.fromkeys(("ratio_w", "ratio_model", "step_ms", "latency_ms", "seconds"), number(0)),
        **dict.fromkeys(("avg_over", "epochs", "fold", "seed"), COUNT),
        "deviations": many(text(), 1000),
    },
    {"top1_last": SHARE, "interval": many(SHARE, 2), "stopped": text(20)},  # not in results of 0.1
)
ROW = table(
    {
        "epoch": whole(0, MOST_EPOCHS),
        "loss": number(),
        "train_accuracy": SHARE,
        "top1": optional(SHARE),
        **dict.fromkeys(("seconds", "clips_per_second", "eval_seconds"), number(0)),
        "steps": COUNT,
    }
)
PROGRESS = table(
    {
        "epoch": whole(0, MOST_EPOCHS),
        "best_epoch": whole(-1, MOST_EPOCHS),
        **dict.fromkeys(("step", "steps"), COUNT),
        "top1": SHARE,
        "loss_sum": number(),
        **dict.fromkeys(("correct", "seen", "epoch_seconds", "seconds"), number(0)),
        "history": many(ROW, MOST_EPOCHS),
    },
    rest=None,
)
FACTS = table({"manifest_hash": text(64), "fold": COUNT, "seed": COUNT, "progress": PROGRESS})


def read_status(folder: Path) -> dict[str, Any]:
    """status.json of a run; {} where there is none."""
    path = folder / "status.json"
    if not is_there(path):
        return {}
    status: dict[str, Any] = read_json(path, STATUS, CheckpointError, "delete it; it is written again")
    return status


def read_result(folder: Path) -> dict[str, Any]:
    """result.json of a finished run."""
    advice = "delete it to finish this run again"
    result: dict[str, Any] = read_json(folder / "result.json", RESULT, CheckpointError, advice)
    return result


def saved_progress(folder: Path, manifest_hash: str, fold: int, seed: int) -> Progress | None:
    """Where the checkpoint of a run stands; None if there is no checkpoint."""
    facts = read_facts(folder)
    if facts is None:
        return None
    source = printable(folder / RECORD)
    checked(facts, FACTS, CheckpointError, source, ANEW)
    if facts["manifest_hash"] != manifest_hash:
        raise CheckpointError(f"{printable(folder)}: was trained on other data; use the same data or another --out")
    if (facts["fold"], facts["seed"]) != (fold, seed):
        raise CheckpointError(f"{source}: is of fold {facts['fold']} and seed {facts['seed']}; {ANEW}")
    checked(facts["progress"], _agrees, CheckpointError, source, ANEW)
    return Progress(**facts["progress"])


def _agrees(progress: Mapping[str, Any], place: str) -> None:
    """The numbers of a checked progress against each other."""
    epoch, history = progress["epoch"], progress["history"]
    if [row["epoch"] for row in history] != [*range(epoch)]:
        raise Wrong(f"{epoch} epochs were finished, but the history has {len(history)} others")
    scores = [row["top1"] for row in history if row["top1"] is not None]
    best = progress["best_epoch"]
    if best >= epoch or (best < 0) != (not scores) or (scores and not math.isclose(max(scores), progress["top1"])):
        raise Wrong(f"the best epoch is {best} with {progress['top1']:g}, which the history does not have")
