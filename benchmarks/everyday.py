"""Two everyday recurrent networks down the documented path: a search by size, training, integers; seconds and scores.

    python -m benchmarks.everyday [--quick] [--results FOLDER] [--work FOLDER] [--minutes N]

A bidirectional LSTM of two layers of 400 units reads spoken digits (log-mel frames), an LSTM of three layers of 256
reads characters of plays. Both are trained here first, on ../shared/data. The best state on validation data is taken,
and scores are those of test data that nothing was chosen on. An interrupted run continues.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import kronecell as kc
from benchmarks.doped import DATA, Digits, Text
from benchmarks.results import RESULTS, Options, machine, table, write
from kronecell.deploy.atomic import write_atomically
from kronecell.nn.quantize import bytes_of
from kronecell.training.intervals import wilson

EVERY = 3  # frames of speech, of which one is read: 30 ms
LENGTH, ROWS = 64, 32  # characters of a row, rows of a batch
RATE = 2e-3
AGAIN = 4  # times fewer steps than the first training has, for a compressed network
SIZES = (4, 8)  # times fewer bytes, without training and with


class Tagger(nn.Module):
    """Frames of a recording -> a digit, by the mean of the outputs."""

    def __init__(self, width: int = 400) -> None:
        super().__init__()
        self.rnn = nn.LSTM(40, width, num_layers=2, bidirectional=True)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, frames: PackedSequence) -> Tensor:
        """(recordings, 10)."""
        output, lengths = pad_packed_sequence(self.rnn(frames)[0])
        return self.head(output.sum(0) / lengths[:, None])


class Writer(nn.Module):
    """Characters (rows, time) -> scores of the next ones."""

    def __init__(self, letters: int, width: int = 256) -> None:
        super().__init__()
        self.table = nn.Embedding(letters, 64)
        self.rnn = nn.LSTM(64, width, num_layers=3, batch_first=True)
        self.head = nn.Linear(width, letters)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, letters, time): as cross_entropy takes it."""
        return self.head(self.rnn(self.table(x))[0]).movedim(2, 1)


class Batches:
    """The same number of batches at each reading, drawn by torch's generator."""

    def __init__(self, count: int, draw: Callable[[], Any]) -> None:
        self.count, self.draw = count, draw

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return (self.draw() for _ in range(self.count))


@dataclass
class Case:
    """A network, its data, and how it is scored."""

    name: str
    unit: str
    model: nn.Module
    train: Batches
    valid: list[Any]
    test: list[Any]
    steps: int

    @torch.no_grad()
    def score(self, model: nn.Module, batches: list[Any]) -> tuple[str, float]:
        """Accuracy with its interval, or the perplexity of a character."""
        if self.unit == "perplexity":
            losses = [float(F.cross_entropy(model(x), y)) for x, y in batches]
            value = math.exp(sum(losses) / len(losses))
            return f"{value:.3f}", value
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in batches)
        count = sum(len(y) for _, y in batches)
        low, high = wilson(right, count)
        return f"{100 * right / count:.1f} % ({100 * low:.1f} to {100 * high:.1f})", 100 * right / count


def digits(quick: bool) -> Case:
    """Recordings 0 to 4 of each speaker and digit test; of the others every eighth validates."""
    data = Digits(DATA / "digits", 60 if quick else None)
    valid, train = data.train[::8], [clip for i, clip in enumerate(data.train) if i % 8]

    def batch(some: list[tuple[Tensor, int]]) -> tuple[PackedSequence, Tensor]:
        return pack_sequence([x[::EVERY] for x, _ in some], enforce_sorted=False), torch.tensor([y for _, y in some])

    def draw() -> Any:
        return batch([train[i] for i in torch.randint(len(train), (8 if quick else 32,)).tolist()])

    def fixed(some: list[tuple[Tensor, int]]) -> list[Any]:
        return [batch(some[i : i + 50]) for i in range(0, len(some), 50)]

    model = Tagger(48 if quick else 400)
    return Case("digits", "accuracy", model, Batches(40, draw), fixed(valid), fixed(data.test), 4 if quick else 120)


def text(quick: bool) -> Case:
    """The last 5 % of the characters test, the 5 % before validate."""
    data = Text(next((DATA / "text").glob("*.txt")), 20_000 if quick else None)
    half = len(data.test) // 2

    def rows(part: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        chosen = part[starts[:, None] + torch.arange(LENGTH + 1)]
        return chosen[:, :-1], chosen[:, 1:]

    def draw() -> Any:
        return rows(data.train, torch.randint(len(data.train) - LENGTH - 1, (4 if quick else ROWS,)))

    def fixed(part: Tensor, most: int) -> list[Any]:
        starts = torch.arange(0, len(part) - LENGTH - 1, LENGTH)
        return [rows(part, some) for some in starts[: most * 100].split(100)]

    model = Writer(data.classes, 48 if quick else 256)
    valid, test = fixed(data.test[:half], 3), fixed(data.test[half:], 8)
    return Case("text", "perplexity", model, Batches(100, draw), valid, test, 4 if quick else 300)


@dataclass
class Work:
    """Where rows and models are kept."""

    options: Options
    folder: Path
    until: float

    def once(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """The row of this name: read, or made if there is time left."""
        path = self.folder / f"{name}.json"
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text())
            return found
        if time.monotonic() > self.until:
            return None
        row = {"name": name} | make()
        write_atomically(path, lambda temporary: temporary.write_text(json.dumps(row) + "\n"))
        self.options.say(f"{name}: {row['score_text']}, {row['bytes']:,} bytes, {row['seconds']:.0f} s")
        return row


def run(work: Work, case: Case) -> list[dict[str, Any]]:
    """Every row of one network."""
    folder = work.folder / case.name
    loss = F.cross_entropy
    training: dict[str, Any] = {"eval_every": 20, "steps": case.steps, "progress": work.options.say}

    def row(model: nn.Module, how: str, started: float, **more: Any) -> dict[str, Any]:
        seconds = time.monotonic() - started
        shown, value = case.score(model, case.test)
        return {"case": case.name, "how": how, "bytes": bytes_of(model), "score": value, "score_text": shown,
                "seconds": seconds} | more  # fmt: skip

    def first() -> dict[str, Any]:
        started = time.monotonic()
        model, _ = kc.finetune(case.model, None, case.train, loss=loss, valid=case.valid, lr=RATE,
                               folder=folder / "training", **training)  # fmt: skip
        kc.save(model, folder / "model")
        return row(model, "trained here", started)

    rows = [work.once(f"{case.name}-float", first)]
    if rows[0] is None:
        return []
    model = kc.load(folder / "model", into=copy.deepcopy(case.model)).eval()
    calibration = [x for x, _ in case.valid]

    def integers(bits: int) -> dict[str, Any]:
        started = time.monotonic()
        return row(kc.quantize(model, bits=bits), f"kc.quantize, {bits} bits", started)

    def smaller(times: int, train: bool) -> dict[str, Any]:
        started, lines = time.monotonic(), [time.monotonic()]
        gaps: list[float] = []

        def progress(line: str) -> None:
            gaps.append(time.monotonic() - lines[-1])
            lines.append(time.monotonic())

        more = {"train": case.train, "loss": loss, "valid": case.valid} if train else {}
        options = {
            **training,
            "steps": max(1, case.steps // AGAIN),
            "lr": RATE / 2,
            "folder": folder / f"{times}x",
            "progress": work.options.say,
        }
        small, report = kc.compress(
            model, size=1 / times, calibration=calibration, progress=progress, training=options, **more
        )
        forms = {layer.name: layer.format for layer in report.layers}
        made = row(small, f"size=1/{times}" + (", train=..." if train else ""), started, layers=forms)
        kc.save(small, folder / f"{times}x-model")
        again = kc.load(folder / f"{times}x-model", into=model)
        with torch.no_grad():
            same = torch.equal(again(case.test[0][0]), small(case.test[0][0]))
        return made | {"trained": train, "longest_silence": max(gaps, default=0.0), "loads_the_same": same}

    for bits in (8, 4):
        rows.append(work.once(f"{case.name}-bits-{bits}", lambda bits=bits: integers(bits)))  # type: ignore[misc]
    for train in (False, True):
        for times in SIZES:
            name = f"{case.name}-{times}x" + ("-trained" if train else "")
            rows.append(work.once(name, lambda times=times, train=train: smaller(times, train)))  # type: ignore[misc]
    return [found for found in rows if found is not None]


def publish(work: Work, rows: list[dict[str, Any]]) -> None:
    """The table."""
    whole = {row["case"]: row["bytes"] for row in rows if row["how"] == "trained here"}
    lines = [
        (row["case"], row["how"], f"{row['bytes']:,}", f"{whole[row['case']] / row['bytes']:.1f}x", row["score_text"],
         f"{row['seconds']:.0f}") for row in rows
    ]  # fmt: skip
    about = (
        f"# Everyday networks, smaller\n\n{machine()}\n\nDigits: a bidirectional LSTM of two layers of 400 units, "
        "accuracy on 300 recordings with its 95 % interval. Text: an LSTM of three layers of 256, perplexity of a "
        "character. Seconds are of the whole call on one core that other work shared, training included; "
        "calibration is the validation data. A compressed network is trained for a quarter of the steps of the first "
        "training.\n\n"
    )
    head = ("network", "what was done", "bytes", "smaller", "score", "seconds")
    write(work.options, "everyday", {"rows": rows}, about + table(head, lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny networks and data")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--work", type=Path, default=Path("runs/everyday"), help="folder of models and checkpoints")
    parser.add_argument("--minutes", type=float, default=30, help="after which nothing new is begun")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for folder in (arguments.work, arguments.results):
        folder.mkdir(parents=True, exist_ok=True)
    options = Options(arguments.quick, arguments.results)
    work = Work(options, arguments.work, time.monotonic() + 60 * arguments.minutes)
    rows = []
    for make in (text, digits):
        torch.manual_seed(0)
        rows += run(work, make(arguments.quick))
    publish(work, rows)


if __name__ == "__main__":
    main()
