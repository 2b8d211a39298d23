"""The page and the two pictures of benchmarks.doped: loss against bytes, and against latency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.results import table
from kronecell.deploy.atomic import write_atomically
from kronecell.training.intervals import CERTAINTY, mean_margin, wilson

Runs = Mapping[str, Mapping[str, Any]]
HEAD = ("W and U", "bits", "bytes", "fewer", "seeds", "rate", "entries' share")
SEARCHED = (
    "The rules of the search were changed while test scores of first runs were known, and those runs were made again: "
    "more steps, higher rates for all; rates for integers of their own; at twenty times in 8 bits a search of its own "
    "(low rank 5.96 before, doped 5.53, pruned 5.71); at forty times the share of 8 bits, not of floats (doped 6.12 "
    "before)."
)
LOST = {"text": "perplexity above dense, %, test", "digits": "accuracy beside dense, points, test"}
BITS = {32: "-", 8: "--", 6: ":", 4: "", 3: ""}  # and how their points are joined
STYLES = {
    "dense": ("#444444", "*"), "lowrank": ("#c4511d", "s"), "pruned": ("#777777", "^"),
    "doped lowrank": ("#0b62a8", "o"), "tt": ("#2c8c4a", "v"), "doped tt": ("#7a3fa0", "D"),
    "hybrid lowrank": ("#b08a00", "P"),
}  # fmt: skip


def parsed(key: str) -> tuple[str, str, int, float, int]:
    """Task, variant, bits, ratio and seed of a run's name."""
    task, variant, bits, ratio, seed = key.split("/")
    return task, variant, int(bits.split()[0]), float(ratio[:-1]), int(seed.split()[1])


def grouped(runs: Runs) -> dict[tuple[str, str, int, float], list[Mapping[str, Any]]]:
    """Runs that differ by their seed alone; a dense network with fewer bits is a variant of its own."""
    found: dict[tuple[str, str, int, float], dict[int, Mapping[str, Any]]] = {}
    for key, record in runs.items():
        task, variant, bits, ratio, seed = parsed(key)
        found.setdefault((task, variant, bits, ratio), {})[seed] = record
        for fewer in (8, 4, 3):
            if f"{fewer} bits" in record:
                small = {**record, **record[f"{fewer} bits"]}
                small["ratio"] = record["bytes"] / small["bytes"]
                found.setdefault((task, variant, fewer, ratio), {})[seed] = small
    return {key: [seeds[seed] for seed in sorted(seeds)] for key, seeds in found.items()}


def page(document: Mapping[str, Any], about: str) -> str:
    """Tables by task: all runs by bits and ratio, each beside the dense network of the same seeds."""
    runs = document["runs"]
    lines = ["# Doped formats on real data", "", document["machine"], "", about, ""]
    for task, facts in document["tasks"].items():
        mine = {key: some for key, some in grouped(runs).items() if key[0] == task}
        if not mine:
            continue
        lines += [
            f"## {task}: LSTM({facts['inputs']}, {facts['hidden']})", "",
            f"{facts['steps']} steps of {facts['batch']} for the dense network, then {facts['more']} of "
            f"{facts['more_batch']} for every variant, dense, too. {_starts(task, document)}", "",
        ]  # fmt: skip
        dense = {parsed(key)[4]: record for key, record in runs.items() if key.startswith(f"{task}/dense/32")}
        rows = []
        for key in sorted(
            mine, key=lambda key: (key[1].startswith("from"), key[3], -key[2], key[1] != "dense", key[1])
        ):
            some = mine[key]
            shown = [
                key[1],
                key[2],
                f"{some[0]['bytes']:,}",
                f"{some[0]['ratio']:.1f}x",
                len(some),
                f"{some[0]['rate']:g}",
            ]
            share = f"{some[0]['share']:.0%}" if "doped" in key[1] or "hybrid" in key[1] else ""
            above = "" if key[1] == "dense" and key[2] == 32 else text_of(task, difference(task, some, dense))
            rows.append([*shown, share, text_of(task, score(task, some), signed=False), above])
        lines += [
            table((*HEAD, unit(task), f"beside dense, {'points' if task == 'digits' else 'perplexity'}"), rows),
            "",
        ]
    lines += [
        "Intervals are 95%. Accuracy: over recordings and seeds; beside dense: over recordings that both answered, "
        "and seeds. Perplexity: over rows of 500 characters and seeds; beside dense: their ratio on the same rows.", "",
    ]  # fmt: skip
    if document.get("search"):
        lines += ["## The search", "", SEARCHED, "", *_search(document["search"])]
    if document.get("latency"):
        rows = [[name.split("/", 1)[1].rsplit("/", 1)[0], f"{ms:.2f}"] for name, ms in document["latency"].items()]
        lines += ["## Latency", "", "Milliseconds of 50 steps of the text's LSTM, batch 1, one thread.", "",
                  table(("W and U", "ms"), rows)]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def _starts(task: str, document: Mapping[str, Any]) -> str:
    found = {key: facts for key, facts in document["starts"].items() if key.startswith(f"{task}/")}
    texts = [f"{facts['valid']:.2f}" for facts in found.values()]
    return f"Validation {unit(task)} after the first training: {', '.join(texts)}." if texts else ""


def _search(search: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows: dict[tuple[str, str], list[str]] = {}
    for key, facts in search.items():
        task, variant, bits, rate, share = key.split("/")
        part = f" ({share})" if variant.split(" ")[0] in ("doped", "hybrid") else ""
        rows.setdefault((f"{task}, {variant}", bits), []).append(f"{rate.split()[1]}{part}: {facts['score']:.2f}")
    return [
        table(("variant", "bits", "rate: score on validation data"), [[*key, "; ".join(v)] for key, v in rows.items()]),
        "",
    ]


def unit(task: str) -> str:
    return "accuracy" if task == "digits" else "perplexity"


def score(task: str, some: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """The mean over seeds with its 95% interval."""
    if task == "digits":
        count = len(some[0]["right"])
        right = [record["right"].count("1") / count for record in some]
        low, high = wilson(fmean(right) * count, count)
        extra = mean_margin(right) if len(right) > 1 else 0.0
        mean = fmean(right)
        return 100 * mean, 100 * (mean - math.hypot(mean - low, extra)), 100 * (mean + math.hypot(high - mean, extra))
    logs = [fmean(record["rows"]) for record in some]
    return _ratio([fmean(values) for values in zip(*(record["rows"] for record in some), strict=True)], logs)


def difference(
    task: str, some: Sequence[Mapping[str, Any]], dense: Mapping[int, Mapping[str, Any]]
) -> tuple[float, float, float] | None:
    """Accuracy minus dense in points, or perplexity over dense in percent above one; seeds that both have."""
    pairs = [(record, dense[seed]) for seed, record in enumerate(some) if seed in dense]
    if not pairs:
        return None
    if task == "digits":
        each = [[int(a) - int(b) for a, b in zip(x["right"], y["right"], strict=True)] for x, y in pairs]
    else:
        each = [[a - b for a, b in zip(x["rows"], y["rows"], strict=True)] for x, y in pairs]
    means = [fmean(values) for values in zip(*each, strict=True)]
    seeds = [fmean(values) for values in each]
    if task == "digits":
        half = math.hypot(mean_margin(means), mean_margin(seeds) if len(seeds) > 1 else 0.0)
        return 100 * fmean(means), 100 * (fmean(means) - half), 100 * (fmean(means) + half)
    middle, low, high = (100 * (value - 1) for value in _ratio(means, seeds))
    return middle, low, high


def _ratio(rows: Sequence[float], seeds: Sequence[float]) -> tuple[float, float, float]:
    """exp of a mean of logarithms, with its interval over rows and seeds."""
    mean = fmean(rows)
    spread = (sum((value - mean) ** 2 for value in rows) / max(1, len(rows) - 1) / len(rows)) ** 0.5
    half = math.hypot(CERTAINTY * spread, mean_margin(seeds) if len(seeds) > 1 else 0.0)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def text_of(task: str, triple: tuple[float, float, float] | None, signed: bool = True) -> str:
    if triple is None:
        return ""
    if signed:
        end = "" if task == "digits" else "%"
        return f"{triple[0]:+.1f}{end} ({triple[1]:+.1f} to {triple[2]:+.1f})"
    if task == "digits":
        return f"{triple[0]:.1f}% ({triple[1]:.1f} to {triple[2]:.1f})"
    return f"{triple[0]:.3f} ({triple[1]:.3f} to {triple[2]:.3f})"


# Pictures ------------------------------------------------------------------------------------------------------------


def draw(document: Mapping[str, Any], folder: Path) -> None:
    """doped.svg: what is lost beside dense against bytes, by task; doped-latency.svg: the same of the text by time."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "kronecell", "font.size": 9}
    import matplotlib.pyplot as plt

    runs = document["runs"]
    groups = {key: some for key, some in grouped(runs).items() if ", " not in key[1]}
    tasks = [task for task in document["tasks"] if f"{task}/dense/32 bits/1x/seed 0" in runs]
    figure, axes = plt.subplots(1, max(1, len(tasks)), figsize=(10, 4.2), layout="constrained", squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=False):
        for number, variant in enumerate(STYLES):
            for bits in BITS:
                points = [
                    (key[3], some[0]["ratio"], some) for key, some in groups.items() if key[:3] == (task, variant, bits)
                ]
                aside = 1 + 0.02 * (number - len(STYLES) / 2)  # so that intervals do not hide each other
                lost = [
                    (ratio * aside, beside(task, some, runs)) for _, ratio, some in sorted(points, key=lambda p: p[0])
                ]
                _line(axis, lost, variant, bits)
        axis.axhline(0, color="#444444", linewidth=0.7, linestyle=":")
        axis.set(xscale="log", xlabel="times fewer bytes of W and U", title=task, ylabel=LOST[task], xlim=(0.9, 50))
        axis.set_xticks([1, 2, 5, 10, 20, 40], ["1", "2", "5", "10", "20", "40"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    _finish(plt, figure, axes[0], folder / "doped.svg")
    if document.get("latency"):
        figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
        for variant in STYLES:
            for bits in BITS:
                points = []
                for key, some in groups.items():
                    took = document["latency"].get(f"text/{variant}/{bits} bits/{key[3]:g}x/seed 0")
                    if key[:3] == ("text", variant, bits) and took is not None:
                        points.append((took, beside("text", some, runs)))
                _line(axis, sorted(points), variant, bits, joined=False)
        axis.set(xlabel="milliseconds of 50 steps, batch 1, one thread", ylabel=LOST["text"], title="text")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
        _finish(plt, figure, [axis], folder / "doped-latency.svg")


def beside(task: str, some: Sequence[Mapping[str, Any]], runs: Runs) -> tuple[float, float, float]:
    """What is lost beside the dense networks in float32 of the same seeds."""
    dense = {parsed(key)[4]: record for key, record in runs.items() if key.startswith(f"{task}/dense/32")}
    found = difference(task, some, dense)
    assert found is not None
    return found


def _line(axis: Any, points: Sequence[Any], variant: str, bits: int, joined: bool = True) -> None:
    """Points with their intervals: filled in float32, hollow in 8 bits, small in fewer."""
    if not points:
        return
    colour, mark = STYLES[variant]
    middle = [value[0] for _, value in points]
    spread = [[value[0] - value[1] for _, value in points], [value[2] - value[0] for _, value in points]]
    axis.errorbar([x for x, _ in points], middle, spread, fmt=f"{mark}{BITS[bits] if joined else ''}", color=colour,
                  capsize=2, linewidth=1, markersize=6 if bits > 6 else 4, mfc=colour if bits == 32 else "white",
                  label=f"{variant}, {'float32' if bits == 32 else f'{bits} bits'}")  # fmt: skip


def _finish(plt: Any, figure: Any, axes: Sequence[Any], target: Path) -> None:
    """With one legend for all axes."""
    named = {label: mark for axis in axes for mark, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend([*named.values()], [*named], loc="outside right upper", frameon=False, fontsize=8)
    write_atomically(target, lambda path: figure.savefig(path, format="svg", metadata={"Date": None}))
    plt.close(figure)
