"""Doped formats on real data: spoken digits (accuracy) and characters of plays (perplexity), at equal bytes.

    python -m benchmarks.doped --minutes 40        trains what is missing, in order of importance; run again to go on
    python -m benchmarks.doped --summary           only writes the page from the runs there are

An LSTM over log-mel frames, and one over characters, from scratch. W and U of the LSTM are dense, in a structure,
pruned by magnitude, or a structure with a sparse part, each with the ranks that fill a budget of bytes: values in
float32, and the indices of sparse parts. Of a doped format's bytes half are the sparse part's. All networks have the
same data, steps and learning rate; what is reported is that of the last step on data that nothing was chosen on, and
again in 8 bits.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import wave
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import kronecell as kc
from benchmarks.results import RESULTS, Options, machine, table, write
from kronecell.formats.places import gaps_of, largest_places
from kronecell.formats.recipes import recipe_modes
from kronecell.plans.sparse import Sparse
from kronecell.training.intervals import wilson

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SHARE = 0.5  # of a doped format's bytes that are the sparse part's
STRUCTURES = ("lowrank", "kcp", "tt", "tr")
VARIANTS = (
    "dense", "lowrank", "pruned", "doped lowrank", "kcp", "tt", "tr", "doped kcp", "doped tt", "doped tr",
    "doped lowrank, no dropout", "doped lowrank, blocks",
)  # fmt: skip
RATIOS = (10, 20, 40, 5)
SEEDS = 3


@dataclass(frozen=True)
class Task:
    """Sizes of a network and of its training."""

    name: str
    inputs: int
    hidden: int
    batch: int
    steps: int
    rate: float


TASKS = {
    "digits": Task("digits", 40, 128, 64, 320, 3e-3),
    "text": Task("text", 128, 256, 32, 400, 3e-3),
}
TINY = {"digits": Task("digits", 40, 64, 4, 4, 3e-3), "text": Task("text", 64, 64, 2, 4, 3e-3)}


# Data ----------------------------------------------------------------------------------------------------------------


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
    """Recordings 0 to 4 of every digit and speaker test, the others train; at most 100 frames each."""

    classes = 10

    def __init__(self, folder: Path, most: int | None = None) -> None:
        self.train: list[tuple[Tensor, int]] = []
        self.test: list[tuple[Tensor, int]] = []
        for path in sorted(folder.glob("*.wav"))[:: 1 if most is None else 7][:most]:
            digit, _, number = path.stem.split("_")
            with wave.open(str(path)) as file:
                samples = np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16) / 32768.0
            frames = torch.from_numpy(log_mel(samples))[:100]
            (self.test if int(number) < 5 else self.train).append((frames, int(digit)))
        everything = torch.cat([frames for frames, _ in self.train])
        mean, std = everything.mean(0), everything.std(0)
        self.train, self.test = ([((x - mean) / std, y) for x, y in part] for part in (self.train, self.test))

    def batches(self, task: Task, seed: int) -> Iterator[Any]:
        """Endless."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.train), generator=generator)
            for chosen in order.split(task.batch)[: max(1, len(order) // task.batch)]:
                some = [self.train[i] for i in chosen.tolist()]
                yield pack_sequence([x for x, _ in some], enforce_sorted=False), torch.tensor([y for _, y in some])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        """Accuracy with its 95% interval."""
        right = 0
        for first in range(0, len(self.test), 100):
            some = self.test[first : first + 100]
            scores = model(pack_sequence([x for x, _ in some], enforce_sorted=False))
            right += int((scores.argmax(1) == torch.tensor([y for _, y in some])).sum())
        return {"score": 100 * right / len(self.test), "right": right, "of": len(self.test)}


class Text:
    """The first 90% of the characters train, the last 10% are for validation, in rows of 500."""

    def __init__(self, path: Path, most: int | None = None) -> None:
        text = path.read_text()
        letters = sorted(set(text))
        self.classes = len(letters)
        numbers = torch.tensor([letters.index(letter) for letter in text[:most]])
        cut = len(numbers) * 9 // 10
        self.train, self.test = numbers[:cut], numbers[cut:]
        self.length = 64

    def batches(self, task: Task, seed: int) -> Iterator[Any]:
        """Endless."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(self.train) - self.length - 1, (task.batch,), generator=generator)
            rows = self.train[starts[:, None] + torch.arange(self.length + 1)]
            yield rows.t().contiguous()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:-1]).flatten(0, 1), batch[1:].flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        """Perplexity of a character, and the standard error of its logarithm over rows."""
        width = min(500, len(self.test) // 2)
        rows = self.test[: len(self.test) // width * width].reshape(-1, width).t()
        losses = F.cross_entropy(model(rows[:-1]).movedim(2, 1), rows[1:], reduction="none").mean(0)
        error = float(losses.std()) / len(losses) ** 0.5
        return {"score": math.exp(float(losses.mean())), "error_of_log": error, "of": len(losses)}


# Networks ------------------------------------------------------------------------------------------------------------


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
        return self.head(self.rnn(x)[1][0][-1])


def budget_format(kind: str, M: int, N: int, gates: int, budget: float) -> kc.Format:
    """The largest ranks of a structure whose values take at most this many bytes."""
    m, n = recipe_modes(kind, M, N)
    make: dict[str, Callable[[int], kc.Format]] = {
        "lowrank": lambda r: kc.LowRank(m, n, r, clip=True),
        "tt": lambda r: kc.TT(m, n, r, clip=True),
        "tr": lambda r: kc.TR(m, n, r, clip=True),
        "kcp": lambda r: kc.KCP(m, n, K=r, CA=4, CB=2, tie="all", clip=True),
    }
    best = make[kind](1)
    for rank in range(2, 400):
        fmt = make[kind](rank)
        if fmt == best or 4 * fmt.params(gates) > budget:  # clipped, or too large
            break
        best = fmt
    return best


def stored_bytes(fmt: kc.Format, gates: int) -> int:
    sparse = fmt.sparse(gates)
    return 4 * fmt.params(gates) + (0 if sparse is None else sparse.index_bytes)


def format_of(variant: str, M: int, N: int, gates: int, budget: float) -> kc.Format:
    """The format of a variant for one matrix."""
    name, _, option = variant.partition(", ")
    kind = name.removeprefix("doped ")
    if kind == name:
        return budget_format(kind, M, N, gates, budget)
    structure = budget_format(kind, M, N, gates, (1 - SHARE) * budget)
    left = max(0.0, budget - 4 * structure.params(gates))
    block = 16 if option == "blocks" else 1
    width = 1 if left / budget > 0.2 else 2
    density = left / (4 + width / block) / (gates * M * N)
    fmt = kc.Doped(structure, density, block)
    while density > 1e-6 and stored_bytes(fmt, gates) > budget:
        density *= 0.98
        fmt = kc.Doped(structure, density, block)
    return fmt


class Pruning:
    """Magnitude pruning of W and U of an nn.LSTM by the same schedule."""

    def __init__(self, rnn: nn.LSTM, schedule: kc.SparsitySchedule, ratio: float) -> None:
        self.schedule, self.ratio, self.steps = schedule, ratio, 0
        self.parts = [(w, torch.ones_like(w)) for w in (rnn.weight_ih_l0, rnn.weight_hh_l0)]

    def target(self, weight: Tensor) -> Sparse:
        """As many entries, of five bytes or six, as the budget has."""
        for width in (5, 6):
            size = Sparse.of(*weight.shape, 4 / self.ratio / width)
            if 4 + size.gap_bytes <= width:
                return size
        return size

    @torch.no_grad()
    def step(self, _: object = None) -> None:
        self.steps += 1
        if self.schedule.is_due(self.steps):
            for weight, mask in self.parts:
                target = self.target(weight)
                share = target.count / target.places
                size = Sparse.of(*weight.shape, self.schedule.density(self.steps, share))
                places = largest_places((weight * mask).abs().flatten(), size)
                assert int(gaps_of(places, size).min()) > 0
                mask.zero_().view(-1)[places] = 1
        for weight, mask in self.parts:
            weight *= mask

    def bytes(self) -> int:
        sizes = [self.target(weight) for weight, _ in self.parts]
        return sum(4 * size.num_values + size.index_bytes for size in sizes)


def built(task: Task, classes: int, variant: str, ratio: int, steps: int) -> tuple[Network, Any, int, str]:
    """A network, what trains its sparse parts, and the bytes and formats of W and U."""
    M, N = task.inputs, task.hidden
    dense = 4 * 4 * N * (M + N)
    rate = 0.0 if "no dropout" in variant else kc.SparsitySchedule(end=1).dropout
    schedule = kc.SparsitySchedule(
        begin=steps // 10, end=max(steps // 10 + 1, steps * 6 // 10), every=max(1, steps // 40), dropout=rate
    )
    if variant == "dense":
        return Network(task, classes, kc.LSTM(M, N)), None, dense, "dense"
    if variant == "pruned":
        rnn = nn.LSTM(M, N)
        pruning = Pruning(rnn, schedule, ratio)
        return Network(task, classes, rnn), pruning, pruning.bytes(), "pruned"
    formats = [format_of(variant, width, N, 4, 4 * 4 * width * N / ratio) for width in (M, N)]
    model = Network(task, classes, kc.LSTM(M, N, input_format=formats[0], hidden_format=formats[1]))
    sparsity = kc.train_sparsity(model, schedule) if variant.startswith("doped") else None
    return model, sparsity, sum(stored_bytes(fmt, 4) for fmt in formats), " and ".join(map(str, formats))


# Runs ----------------------------------------------------------------------------------------------------------------


def train(task: Task, data: Any, variant: str, ratio: int, seed: int) -> dict[str, Any]:
    """One network from scratch; its record."""
    torch.manual_seed(seed)
    started = time.process_time()
    model, sparsity, size, formats = built(task, data.classes, variant, ratio, task.steps)
    optimizer = torch.optim.Adam(model.parameters(), lr=task.rate, foreach=False)
    batches = data.batches(task, seed)
    for step in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = task.rate * 0.5 * (1 + math.cos(math.pi * step / task.steps))
        optimizer.zero_grad(set_to_none=True)
        loss = data.loss(model.train(), next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if sparsity is not None:
            sparsity.step(optimizer)
    model.eval()
    record = {"formats": formats, "bytes": size, "parameters": sum(p.numel() for p in model.rnn.parameters())}
    record |= {"loss": float(loss.detach()), **data.evaluate(model)}
    if variant != "pruned":
        small = kc.quantize(model, 8)
        record["in_8_bits"] = data.evaluate(small) | {"bytes": quantized_bytes(small.rnn)}
    return record | {"cpu_seconds": round(time.process_time() - started, 1)}


def quantized_bytes(rnn: nn.Module) -> int:
    """Of W and U; biases stay as they are in all networks."""
    kept = {name: t for name, t in rnn.state_dict().items() if not name.startswith("bias")}
    return sum(tensor.numel() * tensor.element_size() for tensor in kept.values())


def runs() -> Iterator[tuple[str, str, int, int]]:
    """Task, variant, ratio, seed; the most important first. A dense network has no ratio."""
    for seed in range(SEEDS):
        for ratio in RATIOS:
            for task in TASKS:
                for variant in VARIANTS:
                    if variant == "dense" and ratio != RATIOS[0]:
                        continue
                    yield task, variant, 1 if variant == "dense" else ratio, seed


def key_of(task: Task, variant: str, ratio: int, seed: int) -> str:
    return f"{task.name}/{task.steps} steps/{variant}/{ratio}x/seed {seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny networks, a few steps, one run of each kind")
    parser.add_argument("--summary", action="store_true", help="only write the page")
    parser.add_argument("--minutes", type=float, default=120.0, help="start no run after so many")
    parser.add_argument("--only", default="", help="one task")
    parser.add_argument("--times", type=int, default=1, help="so many times the steps")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.results.mkdir(parents=True, exist_ok=True)
    options = Options(arguments.quick, arguments.results)
    found = (options.read("doped") or {}).get("runs", {})
    tasks = TINY if arguments.quick else TASKS
    loaded: dict[str, Any] = {}
    started = time.monotonic()
    for name, variant, ratio, seed in () if arguments.summary else runs():
        task = replace(tasks[name], steps=tasks[name].steps * arguments.times)
        key = key_of(task, variant, ratio, seed)
        if key in found or arguments.only not in ("", name) or (arguments.quick and (seed or ratio not in (1, 10))):
            continue
        if time.monotonic() - started > 60 * arguments.minutes:
            break
        if name not in loaded:
            most = {"digits": 60, "text": 4000} if arguments.quick else {"digits": None, "text": None}
            make = {"digits": lambda m: Digits(arguments.data / "digits", m),
                    "text": lambda m: Text(arguments.data / "text" / "tinyshakespeare.txt", m)}  # fmt: skip
            loaded[name] = make[name](most[name])
        found[key] = train(task, loaded[name], variant, ratio, seed)
        print(f"{key}: {found[key]['score']:.3f}, {found[key]['cpu_seconds']} s", file=sys.stderr, flush=True)
        write(options, "doped", {"machine": machine(), "runs": found}, page(found))
    write(options, "doped", {"machine": machine(), "runs": found}, page(found))


# The page ------------------------------------------------------------------------------------------------------------


def page(found: dict[str, dict[str, Any]]) -> str:
    """Tables of all runs by task and ratio."""
    lines = ["# Doped formats on real data", "", machine(), "", (__doc__ or "").split("\n\n")[2].replace("\n", " "), ""]
    for name, steps in sorted({(key.split("/")[0], int(key.split("/")[1].split()[0])) for key in found}):
        task = replace(TASKS[name], steps=steps)
        lines += [f"## {name}: {steps} steps of {task.batch}, LSTM({task.inputs}, {task.hidden})", ""]
        head = ["W and U", "bytes", "fewer", "seeds", unit(name), "in 8 bits", "bytes", "fewer"]
        rows = []
        for ratio in (1, *sorted(RATIOS)):
            for variant in VARIANTS:
                keys = [key_of(task, variant, ratio, seed) for seed in range(SEEDS)]
                some = [found[key] for key in keys if key in found]
                if some:
                    rows.append(row(name, task, variant, some))
        lines += [table(head, rows)]
    return "\n".join(lines) + "\n"


def unit(name: str) -> str:
    return "accuracy" if name == "digits" else "perplexity"


def row(name: str, task: Task, variant: str, some: list[dict[str, Any]]) -> list[str]:
    dense = 16 * task.hidden * (task.inputs + task.hidden)
    cells = [variant, f"{some[0]['bytes']:,}", f"{dense / some[0]['bytes']:.1f}x", str(len(some)), score(name, some)]
    small = [record["in_8_bits"] for record in some if "in_8_bits" in record]
    if not small:
        return [*cells, "-", "-", "-"]
    return [*cells, score(name, small), f"{small[0]['bytes']:,}", f"{dense / small[0]['bytes']:.1f}x"]


def score(name: str, some: list[dict[str, Any]]) -> str:
    """The mean over seeds with its 95% interval: over recordings, or over rows of text and seeds."""
    mean = fmean(record["score"] for record in some)
    if name == "digits":
        low, high = wilson(sum(record["right"] for record in some), sum(record["of"] for record in some))
        return f"{mean:.1f}% ({100 * low:.1f} to {100 * high:.1f})"
    error = fmean(record["error_of_log"] for record in some)
    spread = stdev([math.log(record["score"]) for record in some]) / len(some) ** 0.5 if len(some) > 1 else 0.0
    half = 1.96 * math.hypot(error, spread)
    return f"{mean:.3f} ({mean * math.exp(-half):.3f} to {mean * math.exp(half):.3f})"


if __name__ == "__main__":
    main()
