"""From a clip to the names of classes: the segments that validation takes, through the model, averaged."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kronecell.data import decode, validation_frames
from kronecell.data.clips import WHOLE, stored_frames
from kronecell.data.stills import resize, to_bytes
from kronecell.errors import KronecellError, printable

Source: TypeAlias = "str | os.PathLike[str] | np.ndarray | Tensor"


@dataclass(frozen=True)
class Preprocessing:
    """How a clip becomes the model's input: `segments` times `frames` pictures of width x height x channels bytes.

    With frames=0 it is the whole clip, once.
    """

    width: int = 160
    height: int = 120
    channels: int = 3
    frames: int = 6
    segments: int = 10
    spread: bool = True  # see kronecell.data.clips: how clips of fewer than segments * frames frames are sampled

    @property
    def input_size(self) -> int:
        """Numbers in one frame."""
        return self.width * self.height * self.channels

    def read(self, source: Source) -> Tensor:
        """What a network reads of a clip: bytes (segments, frames, input_size), also the input of an exported file."""
        return read_segments(source, self)[0]

    def __str__(self) -> str:
        return f"{self.width} x {self.height} x {self.channels}"


@dataclass(frozen=True)
class Prediction:
    """The probabilities of all classes for one clip, in the order of the model's classes."""

    name: str
    classes: tuple[str, ...]
    chances: tuple[float, ...]
    frames: int  # that the clip has
    damage: str | None = None  # why its file ends early

    @property
    def label(self) -> str:
        """The most probable class."""
        return self.top(1)[0][0]

    @property
    def probability(self) -> float:
        """That of the most probable class."""
        return self.top(1)[0][1]

    def top(self, count: int = 5) -> list[tuple[str, float]]:
        """(class, probability), the most probable first."""
        order = sorted(range(len(self.classes)), key=lambda i: -self.chances[i])
        return [(self.classes[i], self.chances[i]) for i in order[:count]]

    def as_dict(self, count: int | None = None) -> dict[str, Any]:
        """For JSON."""
        best = dict(self.top(len(self.classes) if count is None else count))
        facts = {"file": self.name, "class": self.label, "probability": self.probability, "probabilities": best}
        return facts | {"frames": self.frames} | ({"damage": self.damage} if self.damage else {})

    def __str__(self) -> str:
        return f"{self.name}: " + ", ".join(f"{label} {chance:.1%}" for label, chance in self.top(3))


def read_segments(source: Source, preprocessing: Preprocessing) -> tuple[Tensor, int, str | None]:
    """(segments, frames, M) bytes of a clip, the number of frames it has, and why its file ends early."""
    p = preprocessing
    if isinstance(source, (str, os.PathLike)):

        def needed(count: int) -> np.ndarray:
            return np.unique(_numbers(count, p))

        video = decode(source, p.width, p.height, needed, channels=p.channels)
        count, damage = video.num_frames, video.damage
        numbers = _numbers(count, p)
        pictures = video.frames[np.searchsorted(video.indices, numbers)]
    else:
        array = source.detach().cpu().numpy() if isinstance(source, Tensor) else np.asarray(source)
        if array.ndim == 2 and array.shape[1] == p.input_size:
            array = array.reshape(len(array), p.height, p.width, p.channels)
        array = to_bytes(array)
        count, damage = len(array), None
        numbers = _numbers(count, p)
        used = np.unique(numbers)
        small = np.stack([resize(array[i], p.width, p.height, p.channels) for i in used])
        pictures = small[np.searchsorted(used, numbers)]
    rows = np.ascontiguousarray(pictures).reshape(*numbers.shape, p.input_size)
    return torch.from_numpy(rows), count, damage


def _numbers(count: int, p: Preprocessing) -> np.ndarray:
    """The numbers (segments, frames) of the frames that are read of a clip of `count`."""
    if p.frames == 0:
        return stored_frames(count, WHOLE)[None]
    return validation_frames(count, p.segments, p.frames, p.spread)


@torch.no_grad()
def segment_scores(model: Any, segments: Tensor, batch_size: int = 16, lengths: Tensor | None = None) -> Tensor:
    """The mean probabilities (..., classes) over the last but two axes of (..., segments, frames, M).

    `lengths` are those of whole clips (clips, 1, longest, M).
    """
    device = model.classifier.weight.device
    training = model.training
    model.eval()
    try:
        flat = segments.flatten(0, -3)
        parts = flat.split(batch_size)
        counts = [()] * len(parts) if lengths is None else [(n,) for n in lengths.split(batch_size)]
        scores = torch.cat([model(x.to(device), *n).float().cpu() for x, n in zip(parts, counts, strict=True)])
    finally:
        model.train(training)
    return scores.softmax(-1).reshape(*segments.shape[:-2], -1).mean(-2)


def predict(model: Any, source: Source, batch_size: int = 16) -> Prediction:
    """What `VideoClassifier.predict` does for one clip."""
    if model.preprocessing is None:
        raise KronecellError(
            "this classifier does not say how clips become frames; build it with preprocessing=Preprocessing(...), "
            "or load a run directory"
        )
    segments, count, damage = read_segments(source, model.preprocessing)
    chances = segment_scores(model, segments, batch_size)
    name = printable(source) if isinstance(source, (str, os.PathLike)) else "frames"
    return Prediction(name, model.class_names, tuple(chances.tolist()), count, damage)
