"""Doped formats on real data: spoken digits (accuracy) and characters of plays (perplexity), at equal bytes.

    python -m benchmarks.doped --minutes 60        trains what is missing, in order of importance; run again to go on
    python -m benchmarks.doped --summary           only writes the page and the pictures from the runs there are

An LSTM or GRU over log-mel frames, and an LSTM over characters. A dense network is trained first. Every variant starts
from it and is trained on for the same steps, with the same data: dense, as a structure fitted to it, pruned by
magnitude, a structure with some dense rows (hybrid), or a structure with a sparse part (doped), which starts as all
that the structure leaves. Sizes are those that fill a budget of bytes, with indices and scales. Values are float32, or
integers, rounded after training: 6 bits, and 4 for entries of a sparse part. Learning rate, and the share of bytes of a
sparse part (or the bits of a pruned matrix), are chosen for every variant on validation data, by trainings as long as
those that count: at 10 times fewer bytes for 5 and 10 times, at 40 for 20 and 40. Test data are read once a run, at its
end. Variants that are "aware" compute with rounded weights of 5 bits in the last 30% of their training, as kc.finetune
does. Latency of a pruned network is that of a doped one whose structure is a column of zeros.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import kronecell as kc
from benchmarks.doped_data import Digits, Network, Task, Text
from benchmarks.doped_models import FLOATS, Numbers, Variant, bytes_of_weights, timed_model
from benchmarks.doped_page import draw, page, summary
from benchmarks.results import RESULTS, Options, machine, write
from benchmarks.timing import interleave
from kronecell.deploy.atomic import write_atomically

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
RATES = (4e-4, 1e-3, 3e-3, 8e-3, 2e-2)
TASKS = {
    "text": Task("text", 128, 256, 32, 1500, 16, 1000, 4e-3),
    "digits": Task("digits", 40, 128, 64, 800, 64, 600, 3e-3),
    "digits, GRU": Task("digits, GRU", 40, 128, 64, 800, 64, 600, 3e-3, "GRU"),
}
TINY = {
    "text": Task("text", 64, 64, 2, 4, 2, 4, 3e-3),
    "digits": Task("digits", 40, 64, 4, 4, 4, 4, 3e-3),
    "digits, GRU": Task("digits, GRU", 40, 64, 4, 4, 4, 4, 3e-3, "GRU"),
}
SHARES = (0.15, 0.05, 0.4)  # of a doped or hybrid format's bytes that are the sparse part's; the first for rates
NUMBERS = {  # what values may be; the first is tried at all rates
    "float32": {"": (FLOATS,)},
    "integers": {"": (Numbers(6, 6),), "pruned": (Numbers(6, 6), Numbers(4, 4)), "doped": (Numbers(6, 4),)},
}
MAIN = ("lowrank", "pruned", "doped lowrank")  # at all ratios, with all seeds
OTHERS = ("kp", "doped kp", "tt", "doped tt", "kcp", "doped kcp", "tr", "doped tr", "hybrid lowrank")
DROPOUT = "doped lowrank, dropout"
AWARE = ("lowrank, aware", "doped lowrank, aware")  # trained with rounded weights at last
SCRATCH = ("dense", "lowrank", "pruned", "doped lowrank", DROPOUT, "kp", "doped kp", "doped kp, dropout")
Key = tuple[str, str, str, str, float, int]  # task, start, variant, mode, ratio, seed
QUICK = ("dense", *MAIN, "hybrid lowrank", DROPOUT)
FEWER_BITS = (8, 6, 5, 4, 3)  # of the dense network


def runs() -> Iterator[Key]:
    """All runs, the most important first. A dense network has no ratio: its sizes are those of its bits."""

    def each(
        task: str, variants: Sequence[str], modes: Sequence[str], ratio: float, seeds: Sequence[int]
    ) -> Iterator[Key]:
        for seed in seeds:
            yield task, "dense", "dense", "float32", 1, seed
            for mode in modes:
                yield from ((task, "dense", variant, mode, ratio, seed) for variant in variants)

    both, first = ("integers", "float32"), ("text", "digits")
    for task in first:
        yield from each(task, MAIN, both, 10, (0, 1, 2))
    for ratio in (20, 40):
        for task in first:
            yield from each(task, MAIN, ("integers",), ratio, (0, 1, 2))
    yield from each("text", AWARE, ("integers",), 10, (0, 1, 2))
    yield from each("text", (DROPOUT, "doped lowrank, blocks"), ("integers",), 10, (0,))
    for task in first:
        yield from each(task, OTHERS, ("integers",), 10, (0,))
    yield from each("text", ("doped kp, dropout",), ("integers",), 10, (0,))
    yield from each("digits, GRU", MAIN, ("integers",), 10, (0, 1, 2))
    for seed in (0, 1, 2):
        yield from (("digits", "scratch", variant, "float32", 10, seed) for variant in SCRATCH)
    for task in first:
        yield from each(task, OTHERS, ("float32",), 10, (0,))
        yield from each(task, OTHERS, ("integers",), 10, (1, 2))
    for ratio in (20, 40):
        for task in first:
            yield from each(task, MAIN, ("float32",), ratio, (0, 1, 2))
    for task in first:
        yield from each(task, MAIN, both, 5, (0, 1, 2))


def name_of(key: Key) -> str:
    task, start, variant, mode, ratio, seed = key
    how = "" if start == "dense" else "from scratch, "
    return f"{task}/{how}{variant}/{mode}/{ratio:g}x/seed {seed}"


class Work:
    """What all runs share: results so far, data, dense networks."""

    def __init__(self, options: Options, data: Path, folder: Path, minutes: float) -> None:
        self.options, self.source, self.folder = options, data, folder
        self.until = time.monotonic() + 60 * minutes
        self.tasks = TINY if options.quick else TASKS
        self.kept: dict[str, Any] = options.read("doped") or {}
        for part in ("runs", "search", "starts", "latency"):
            self.kept.setdefault(part, {})
        self.loaded: dict[str, Any] = {}
        self.dense: dict[tuple[str, int], Network] = {}

    def say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    def data(self, task: str) -> Any:
        if task not in self.loaded:
            quick = self.options.quick
            self.loaded[task] = (
                Digits(self.source / "digits", 200 if quick else None) if task.startswith("digits")
                else Text(self.source / "text" / "tinyshakespeare.txt", 20_000 if quick else None)
            )  # fmt: skip
        return self.loaded[task]

    def start(self, name: str, seed: int) -> Network:
        """The dense network that all variants of a seed start from."""
        if (name, seed) not in self.dense:
            task, data = self.tasks[name], self.data(name)
            torch.manual_seed(seed)
            model = Network(task, data.classes, task.rnn(task.inputs, task.hidden))
            path = self.folder / f"{name.replace(', ', '-')}-{task.steps}-{seed}.pt"
            if path.exists():
                model.load_state_dict(torch.load(path))
            else:
                seconds = trained(data.batches(task.batch, seed), data, model, None, task.rate, task.steps)
                write_atomically(path, lambda temporary: torch.save(model.state_dict(), temporary))
                facts = {part: data.evaluate(model.eval(), part)["score"] for part in ("train", "valid")}
                self.kept["starts"][f"{name}/seed {seed}"] = facts | {"steps": task.steps, "cpu_seconds": seconds}
                self.say(f"{name} dense, seed {seed}: {facts}, {seconds} s")
            self.dense[name, seed] = model.eval()
        return self.dense[name, seed]

    def chosen(self, name: str, variant: str, mode: str, ratio: float) -> tuple[float, Numbers, float]:
        """Rate, bits and share of a variant: the best on validation data after as long a training as counts.

        The search goes from the middle rate up as long as that helps, or else down; then bits, then shares are tried
        at the best rate.
        """
        kind = variant.split(" ")[0]
        numbers = NUMBERS[mode].get(kind, NUMBERS[mode][""])
        shares = SHARES if kind in ("doped", "hybrid") else SHARES[:1]

        def loss(at: int, bits: Numbers = numbers[0], share: float = shares[0]) -> float:
            return self.trial(name, variant, bits, ratio, RATES[at], share) if 0 <= at < len(RATES) else math.inf

        at = len(RATES) // 2
        way = 1 if loss(at + 1) < loss(at) else -1
        while loss(at + way) < loss(at):
            at += way
        bits = min(numbers, key=lambda bits: loss(at, bits))
        return RATES[at], bits, min(shares, key=lambda share: loss(at, bits, share))

    def trial(self, name: str, variant: str, numbers: Numbers, ratio: float, rate: float, share: float) -> float:
        """The validation loss."""
        text = f"{name}/{variant}/{numbers} {ratio:g}x/rate {rate:g}/share {share:g}"
        if text not in self.kept["search"]:
            task, data, steps = self.tasks[name], self.data(name), self.tasks[name].more
            start = self.start(name, 0)
            torch.manual_seed(0)
            made = Variant(task, data.classes, variant, numbers, ratio, share, steps, start)
            seconds = trained(data.batches(task.more_batch, 0), data, made.model, made, rate, steps)
            finite = all(bool(torch.isfinite(weight).all()) for weight in made.model.parameters())
            found = data.evaluate(made.finished()[0], "valid") if finite else {"loss": None, "score": None}
            self.kept["search"][text] = {k: found[k] for k in ("loss", "score")} | {"cpu_seconds": seconds}
            self.say(f"search {text}: {found['score']}, {seconds} s")
        loss: float | None = self.kept["search"][text]["loss"]
        return loss if loss is not None and math.isfinite(loss) else math.inf

    def run(self, key: Key) -> dict[str, Any]:
        """One network from its start to the test data."""
        name, start, variant, mode, ratio, seed = key
        task, data = self.tasks[name], self.data(name)
        # What changes in training alone has the settings of the variant without it.
        alone = variant.removesuffix(", dropout").removesuffix(", aware")
        rate, numbers, share = self.chosen(name, alone, mode, 10 if ratio <= 10 else 40)
        if ", aware" in variant:
            numbers = Numbers(5, min(5, numbers.entries))
        if start == "dense":
            dense, steps, batch = self.start(name, seed), task.more, task.more_batch
        else:
            dense, steps, batch, rate = None, task.steps + task.more, task.batch, task.rate
        torch.manual_seed(seed)
        made = Variant(task, data.classes, variant, numbers, ratio, share, steps, dense)
        seconds = trained(data.batches(batch, seed + 100), data, made.model, made, rate, steps)
        model, size = made.finished()
        record = {"formats": [str(fmt) for fmt in made.formats], "bytes": size, "ratio": task.dense_bytes / size}
        record |= {"rate": rate, "bits": [numbers.bits, numbers.entries], "share": share, "steps": steps}
        record |= {"cpu_seconds": seconds} | data.evaluate(model, "test")
        if variant == "dense":  # the same network with fewer bits
            for fewer in FEWER_BITS:
                small = kc.quantize(made.model, fewer)
                record[f"{fewer} bits"] = data.evaluate(small, "test") | {"bytes": bytes_of_weights(small.rnn)}
        return record

    def document(self) -> dict[str, Any]:
        """All that is known, as the result file has it."""
        kept = {part: self.kept[part] for part in ("starts", "search", "runs", "latency")}
        tasks = {name: vars(task) for name, task in self.tasks.items()}
        return {"machine": machine(), "tasks": tasks, "table": summary(kept["runs"]), **kept}

    def write(self) -> None:
        document = self.document()
        write(self.options, "doped", document, page(document, (__doc__ or "").split("\n\n")[2].replace("\n", " ")))


def trained(batches: Iterator[Any], data: Any, model: Any, made: Variant | None, rate: float, steps: int) -> float:
    """Adam with a cosine; the seconds of processor that it took."""
    started = time.process_time()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, foreach=False)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
        if made is not None and (more := made.more_parameters(step / steps)):
            optimizer.add_param_group({"params": more})
        optimizer.zero_grad(set_to_none=True)
        batch = next(batches)
        loss = data.loss(model.train(), batch) if made is None else made.loss(data, batch, step / steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if made is not None:
            made.step(optimizer)
    return round(time.process_time() - started, 1)


def latencies(work: Work) -> None:
    """Milliseconds of 50 steps at batch 1, one thread, of all variants of the text that were run; in turn."""
    torch.set_num_threads(1)
    task, models = work.tasks["text"], {}
    torch.manual_seed(0)
    for key in runs():
        name, start, variant, _, ratio, seed = key
        record = work.kept["runs"].get(name_of(key))
        if name == "text" and not seed and record is not None and start == "dense" and "dropout" not in variant:
            model = timed_model(task, variant, Numbers(*record["bits"]), ratio, record["share"])
            if model is not None:
                models[name_of(key)] = model
    x = torch.randn(50, 1, task.inputs)
    with torch.inference_mode():
        samples = interleave({name: lambda m=m: m(x) for name, m in models.items()}, 1 if work.options.quick else 15)
    work.kept["latency"] = {name: 1e3 * sorted(times)[len(times) // 4] for name, times in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny networks, a few steps, one run of each kind")
    parser.add_argument("--summary", action="store_true", help="only write the page and the pictures")
    parser.add_argument("--latency", action="store_true", help="measure latencies before")
    parser.add_argument("--minutes", type=float, default=80.0, help="start no run after so many")
    parser.add_argument("--only", default="", help="one task")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=Path("runs/doped"), help="folder of the dense networks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for folder in (arguments.results, arguments.work):
        folder.mkdir(parents=True, exist_ok=True)
    options = Options(arguments.quick, arguments.results)
    work = Work(options, arguments.data, arguments.work, arguments.minutes)
    for key in () if arguments.summary else runs():
        task, start, variant, _, ratio, seed = key
        if name_of(key) in work.kept["runs"] or arguments.only not in ("", task):
            continue
        if arguments.quick and (seed or ratio not in (1, 10) or start != "dense" or variant not in QUICK):
            continue
        if time.monotonic() > work.until:
            break
        record = work.kept["runs"][name_of(key)] = work.run(key)
        work.say(f"{name_of(key)}: {record['score']:.3f}, {record['ratio']:.2f}x, {record['cpu_seconds']} s")
        work.write()
    if arguments.latency:
        latencies(work)
    work.write()
    draw(work.document(), arguments.results)


if __name__ == "__main__":
    main()
