"""What a finished run says of itself: accuracy with its interval, costs, times, where it differs from the paper."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from kronecell.data import Loader, Store
from kronecell.training.costs import costs, latency_ms
from kronecell.training.experiment import Experiment
from kronecell.training.intervals import wilson
from kronecell.training.loop import Progress, average_over, stopped_by
from kronecell.training.protocol import deviations


def make_result(
    experiment: Experiment,
    model: Any,
    progress: Progress,
    store: Store,
    fold: int,
    seed: int,
    train: Loader,
    valid: Loader,
    notes: Sequence[str],
    replaced: Sequence[str],
) -> dict[str, Any]:
    """What result.json says of a run whose training has ended; `notes` are added to the deviations."""
    scores = [row["top1"] for row in progress.history if row["top1"] is not None]
    frames = experiment.frames or typical_frames(store)
    window = average_over(len(progress.history))
    tested = len(valid.indices)
    last = [row["top1"] for row in progress.history[-window:] if row["top1"] is not None]
    return {
        "experiment": experiment.name,
        "format": experiment.format,
        "shared": experiment.shared,
        "dataset": experiment.dataset,
        "top1": max(scores),
        "top1_last": scores[-1],
        "interval": [*wilson(scores[-1] * tested, tested)],
        "avg": sum(last) / len(last),
        "avg_over": window,
        **costs(model, frames, experiment.batch_size),
        "step_ms": 1e3 * progress.seconds / max(progress.steps, 1),
        "latency_ms": latency_ms(model, frames),
        "seconds": progress.seconds,
        "epochs": progress.epoch,
        "steps": progress.steps,
        "stopped": stopped_by(progress, experiment.train_settings(seed), len(train)),
        "frames": frames,
        "clips": {"train": len(train.indices), "valid": tested, "all": len(store)},
        "classes": len(store.classes),
        "manifest_hash": store.manifest_hash,
        "fold": fold,
        "seed": seed,
        "replaced": sorted({*replaced}),
        "deviations": [*deviations(experiment, progress), *notes],
    }


def typical_frames(store: Store) -> int:
    """The median number of stored frames of a clip: what multiply-adds and latency of whole clips are given for."""
    return int(statistics.median(len(store.indices(i)) for i in range(len(store))))
