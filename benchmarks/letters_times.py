"""What the networks of benchmarks.letters take, timed in turn in one run: a clip, and a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import letters_baselines as baselines
from benchmarks.timing import interleave
from kronecell.training.splits import loaders

FRAMES = 25  # of the clip; a training step has the clips of a batch, whole
KEY = "times-fold0-seed0"


def measured(study: Any, experiment: Callable[[Mapping[str, Any]], Any]) -> dict[str, Any]:
    """Milliseconds by network, kept among the records; `experiment` makes one of settings."""
    known = study.records.get(KEY, {})
    if known is not None:
        return dict(known)
    clips: dict[str, Callable[[], object]] = {}
    steps: dict[str, Callable[[], object]] = {}
    batch = None
    for name in (*study.formats, *baselines.NETWORKS):
        e = experiment(study.formats.get(name, {}))
        train, _ = loaders(e, study.inner, 1, 0)
        batch = next(iter(train)) if batch is None else batch
        torch.manual_seed(0)
        own = name in study.formats
        model = e.build_model(study.inner.classes) if own else baselines.build(name, e, train, len(study.inner.classes))
        clip = torch.zeros(1, FRAMES, e.input_size, dtype=torch.uint8)
        clips[name] = answer(model, (clip,) if own else (clip, torch.tensor([FRAMES])))
        steps[name] = step(e.build_model(study.inner.classes) if own else model, batch.x, batch.lengths, batch.y)
    few = 1 if study.seeds == 1 else 11
    found = {"clip_ms": milliseconds(interleave(clips, few)), "step_ms": milliseconds(interleave(steps, few))}
    return dict(study.records.put(KEY, {"settings": {}, "accuracy": 0.0, **found}))


def answer(model: nn.Module, arguments: tuple[Tensor, ...]) -> Callable[[], object]:
    """One clip."""

    def call() -> object:
        with torch.no_grad():
            return model.eval()(*arguments)

    return call


def step(model: nn.Module, x: Tensor, lengths: Tensor, y: Tensor) -> Callable[[], object]:
    """Forward, backward and Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)

    def call() -> object:
        optimizer.zero_grad()
        F.cross_entropy(model.train()(x, lengths), y).backward()
        optimizer.step()
        return None

    return call


def milliseconds(samples: Mapping[str, list[float]]) -> dict[str, float]:
    """The lower quartile: what is above it on a shared machine is other work."""
    return {name: round(1e3 * sorted(times)[len(times) // 4], 4) for name, times in samples.items()}
