"""Clips of a store as `kc.finetune` reads batches: inputs and classes, as often as it likes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kronecell.data import Loader, Store, make_folds
from kronecell.errors import DataError
from kronecell.training.classifier import VideoClassifier
from kronecell.training.evaluation import held_out
from kronecell.training.experiment import read_toml
from kronecell.training.saved import SETTINGS

BATCH = 16


class Clips:
    """((frames, lengths) or frames, classes); training clips come in a new order at each reading, drawn by torch."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        self.loader.set_epoch(int(torch.randint(2**31, ())) if self.loader.train else 0)
        for batch in self.loader:
            x, y, lengths = batch.x, batch.y, batch.lengths
            if not self.loader.train:  # (clips, segments, time, M), of which some only fill up the batch
                segments = x.shape[1]
                x, y = x[batch.valid].flatten(0, 1), y[batch.valid].repeat_interleave(segments)
                lengths = None if lengths is None else lengths[batch.valid]
            yield (x if lengths is None else (x, lengths)), y


def clips_for(model: VideoClassifier, store: Store, source: Path, seed: int = 0) -> tuple[Clips, Clips]:
    """Clips to train a model on, and those to validate it on: the fold that its own run held out.

    Of a store that the model was not trained on, the first fold is held out. Batches and mirroring are those of the
    run, if `source` is one.
    """
    p = model.preprocessing
    if p is None or (p.width, p.height, p.channels) != (store.width, store.height, store.channels):
        size = f"{store.width} x {store.height} x {store.channels}"
        raise DataError(f"{store.root}: has frames of {size}, the model needs {p}; prepare it with these sizes")
    if model.named and store.classes != model.class_names:
        theirs, own = ", ".join(store.classes[:8]), ", ".join(model.class_names[:8])
        raise DataError(f"{store.root}: has the classes {theirs}, the model {own}")
    outside = held_out(model, store)
    if outside is None:
        folds = store.folds if store.manifest["folds"] is not None else make_folds(store.clips, 5, 0, "group")
        outside = [i for i, fold in enumerate(folds) if fold == 0]
    inside = sorted({*range(len(store))} - {*outside})
    settings: dict[str, Any] = read_toml(source / SETTINGS) if (source / SETTINGS).is_file() else {}
    count = int(settings.get("batch_size", BATCH))
    common: dict[str, Any] = {"seed": seed, "workers": 1}
    common |= {"frames": p.frames, "segments": p.segments, "spread": p.spread}
    train = Loader(store, inside, count, flip=bool(settings.get("flip", False)), **common)
    valid = Loader(store, outside, max(1, count // (p.segments if p.frames else 1)), train=False, **common)
    return Clips(train), Clips(valid)
