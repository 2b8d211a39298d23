"""How good a classifier is on labelled clips: accuracy with its uncertainty, each class, what is taken for what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kronecell.data import Loader, Store, make_folds
from kronecell.errors import DataError
from kronecell.training.classifier import VideoClassifier
from kronecell.training.intervals import wilson
from kronecell.training.predict import segment_scores


@dataclass(frozen=True)
class Answer:
    """One clip: its name, its class, what the model says and how sure it is."""

    name: str
    label: str
    answer: str
    probability: float


@dataclass(frozen=True)
class Evaluation:
    """The confusion matrix, rows the true classes, and the answer for every clip."""

    classes: tuple[str, ...]
    confusion: np.ndarray  # (true, answered) numbers of clips
    answers: tuple[Answer, ...]
    groups: int  # recordings that the clips come from
    unreadable: dict[str, str]

    @property
    def count(self) -> int:
        """Clips."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """The part of the clips that is answered correctly."""
        return float(np.trace(self.confusion)) / max(self.count, 1)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the accuracy."""
        return wilson(int(np.trace(self.confusion)), self.count)

    def per_class(self) -> list[dict[str, Any]]:
        """Clips, recall with interval, and precision of every class that has clips or answers."""
        rows = []
        for i, label in enumerate(self.classes):
            there, said, right = (int(n) for n in (self.confusion[i].sum(), self.confusion[:, i].sum(), 0))
            right = int(self.confusion[i, i])
            if there or said:
                row: dict[str, Any] = {"class": label, "clips": there, "answered": said, "correct": right}
                row["recall"] = right / there if there else None
                row["interval"] = list(wilson(right, there)) if there else None
                row["precision"] = right / said if said else None
                rows.append(row)
        return rows

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "clips": self.count,
            "groups": self.groups,
            "accuracy": self.accuracy,
            "interval": [*self.interval],
            "classes": [*self.classes],
            "per_class": self.per_class(),
            "confusion": self.confusion.tolist(),
            "answers": [vars(answer) for answer in self.answers],
            "unreadable": self.unreadable,
        }


def held_out(model: VideoClassifier, store: Store) -> list[int] | None:
    """The clips of `store` that the model was not trained on; None if it was trained on another store."""
    facts = model.facts
    if facts.get("manifest_hash") != store.manifest_hash or "fold" not in facts:
        return None
    wanted, stored = facts["folds"], store.manifest["folds"]
    same = stored is not None and all(wanted[key] == stored[key] for key in ("k", "seed", "method"))
    folds = store.folds if same else make_folds(store.clips, wanted["k"], wanted["seed"], wanted["method"])
    return [i for i, fold in enumerate(folds) if fold == facts["fold"]]


def evaluate_clips(
    model: VideoClassifier,
    store: Store,
    indices: Sequence[int] | None = None,
    batch_size: int = 16,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Evaluation:
    """Answer every clip; classes of store and model are matched by name, and the store may lack some of them."""
    p = model.preprocessing
    if p is None or (p.width, p.height, p.channels) != (store.width, store.height, store.channels):
        size = f"{store.width} x {store.height} x {store.channels}"
        raise DataError(f"{store.root}: has frames of {size}, the model needs {p}; prepare it with these sizes")
    position = {label: number for number, label in enumerate(_names_for(model, store))}
    indices = range(len(store)) if indices is None else indices
    videos = max(1, batch_size // (p.segments if p.frames else 1))
    sampling = {"frames": p.frames, "segments": p.segments, "spread": p.spread}
    loader = Loader(store, indices, videos, seed=0, train=False, workers=1, **sampling)  # type: ignore[arg-type]
    confusion = np.zeros((len(position), len(position)), dtype=np.int64)
    names, answers, groups = [*position], [], set()
    group_of = {clip.name: clip.group for clip in store.clips}
    for done, batch in enumerate(loader, 1):
        chances = segment_scores(model, batch.x, batch_size, batch.lengths)
        for chance, y, name, valid in zip(chances, batch.y, batch.names, batch.valid, strict=True):
            if valid:
                label = store.classes[int(y)]
                best = int(torch.argmax(chance))
                confusion[position[label], best] += 1
                answers.append(Answer(name, label, names[best], float(chance[best])))
                groups.add(group_of[name])
        progress(done, len(loader))
    return Evaluation(tuple(names), confusion, tuple(answers), len(groups), dict(loader.replaced))


def _names_for(model: VideoClassifier, store: Store) -> tuple[str, ...]:
    """The model's names of classes, or the store's where the model has only numbers."""
    if not model.named:
        if len(store.classes) != len(model.class_names):
            raise DataError(f"{store.root}: has {len(store.classes)} classes, the model {len(model.class_names)}")
        return store.classes
    unknown = sorted({clip.label for clip in store.clips} - {*model.class_names})
    if unknown:
        raise DataError(
            f"{store.root}: the model does not know the class(es) {', '.join(unknown[:8])}; it knows "
            f"{', '.join(model.class_names[:12])}{' ...' if len(model.class_names) > 12 else ''}"
        )
    return model.class_names
