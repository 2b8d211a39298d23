"""Data of benchmarks.doped: spoken digits as log-mel frames, and characters of plays; each with its three parts."""

from __future__ import annotations

import math
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import kronecell as kc


@dataclass(frozen=True)
class Task:
    """Sizes of a network, of its first training (dense) and of the second, which is that of every variant."""

    name: str
    inputs: int
    hidden: int
    batch: int  # of the first training
    steps: int
    more_batch: int  # of the second
    more: int
    rate: float  # of the first
    cell: str = "LSTM"

    @property
    def gates(self) -> int:
        return 4 if self.cell == "LSTM" else 3

    @property
    def rnn(self) -> type[kc.LSTM] | type[kc.GRU]:
        """The class of the network's layer."""
        return kc.LSTM if self.cell == "LSTM" else kc.GRU

    @property
    def dense_bytes(self) -> int:
        """Of W and U in float32."""
        return 4 * self.gates * self.hidden * (self.inputs + self.hidden)


def log_mel(samples: np.ndarray, rate: int = 8000, bands: int = 40, size: int = 256, hop: int = 80) -> np.ndarray:
    """Logarithms of the energies in mel bands, (frames, bands), for frames of 32 ms every 10 ms."""
    samples = np.pad(samples, (0, max(0, size - len(samples))))
    starts = np.arange(0, len(samples) - size + 1, hop)
    frames = samples[starts[:, None] + np.arange(size)] * np.hanning(size)
    power = np.abs(np.fft.rfft(frames, axis=1)) ** 2
    edges = 700 * (np.exp(np.linspace(0, np.log1p(rate / 2 / 700), bands + 2)) - 1)
    frequencies = np.fft.rfftfreq(size, 1 / rate)
    up = (frequencies - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    down = (edges[2:, None] - frequencies) / (edges[2:] - edges[1:-1])[:, None]
    filters = np.maximum(0, np.minimum(up, down))
    return np.log(power @ filters.T + 1e-6).astype(np.float32)


class Digits:
    """Recordings 0 to 4 of every digit and speaker test, 5 to 9 validate, the others train; at most 100 frames each."""

    classes = 10

    def __init__(self, folder: Path, most: int | None = None) -> None:
        parts: dict[str, list[tuple[Tensor, int]]] = {"train": [], "valid": [], "test": []}
        for path in sorted(folder.glob("*.wav"))[:: 1 if most is None else 7][:most]:
            digit, _, number = path.stem.split("_")
            with wave.open(str(path)) as file:
                samples = np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16) / 32768.0
            part = "test" if int(number) < 5 else "valid" if int(number) < 10 else "train"
            parts[part].append((torch.from_numpy(log_mel(samples))[:100], int(digit)))
        everything = torch.cat([frames for frames, _ in parts["train"]])
        mean, std = everything.mean(0), everything.std(0)
        self.parts = {name: [((x - mean) / std, y) for x, y in part] for name, part in parts.items()}

    def batches(self, batch: int, seed: int) -> Iterator[Any]:
        """Endless."""
        train = self.parts["train"]
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(train), generator=generator)
            for chosen in order.split(batch)[: max(1, len(order) // batch)]:
                some = [train[i] for i in chosen.tolist()]
                yield pack_sequence([x for x, _ in some], enforce_sorted=False), torch.tensor([y for _, y in some])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, part: str) -> dict[str, Any]:
        """Loss, accuracy in percent, and which recordings were right."""
        items, losses, right = self.parts[part], [], ""
        for first in range(0, len(items), 100):
            some = items[first : first + 100]
            scores = model(pack_sequence([x for x, _ in some], enforce_sorted=False))
            wanted = torch.tensor([y for _, y in some])
            right += "".join(str(int(answer)) for answer in scores.argmax(1) == wanted)
            losses.append(F.cross_entropy(scores, wanted, reduction="none"))
        score = 100 * right.count("1") / max(len(right), 1)
        return {"loss": float(torch.cat(losses).mean()), "score": score, "right": right}


class Text:
    """The first 90% of the characters train, 5% validate, the last 5% test, in rows of 500."""

    length = 64

    def __init__(self, path: Path, most: int | None = None) -> None:
        text = path.read_text()
        letters = sorted(set(text))
        self.classes = len(letters)
        numbers = torch.tensor([letters.index(letter) for letter in text[:most]])
        first, second = len(numbers) * 90 // 100, len(numbers) * 95 // 100
        self.parts = {"train": numbers[:first], "valid": numbers[first:second], "test": numbers[second:]}

    def batches(self, batch: int, seed: int) -> Iterator[Any]:
        """Endless."""
        train = self.parts["train"]
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(train) - self.length - 1, (batch,), generator=generator)
            yield train[starts[:, None] + torch.arange(self.length + 1)].t().contiguous()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:-1]).flatten(0, 1), batch[1:].flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module, part: str) -> dict[str, Any]:
        """Loss, perplexity of a character, and the losses of all rows."""
        test = self.parts[part]
        width = min(500, len(test) // 2)
        rows = test[: len(test) // width * width].reshape(-1, width).t()
        losses = F.cross_entropy(model(rows[:-1]).movedim(2, 1), rows[1:], reduction="none").mean(0)
        loss = float(losses.mean())
        return {"loss": loss, "score": math.exp(loss), "rows": [round(value, 5) for value in losses.tolist()]}


class Network(nn.Module):
    """Characters are embedded; frames are read as they are. A class for the last state, or for every step."""

    def __init__(self, task: Task, classes: int, rnn: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, task.inputs) if task.name == "text" else None
        self.rnn = rnn
        self.head = nn.Linear(task.hidden, classes)

    def forward(self, x: Any) -> Tensor:
        if self.embed is not None:
            return self.head(self.rnn(self.embed(x))[0])
        last = self.rnn(x)[1]
        return self.head((last[0] if isinstance(last, tuple) else last)[-1])
