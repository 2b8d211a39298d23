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
Seeds = Mapping[int, Mapping[str, Any]]  # runs that differ by their seed alone
Group = tuple[str, str, str, float]  # task, variant, mode, ratio
BESIDE = ("dense", "lowrank", "pruned")
HEAD = ("W and U", "values", "bytes", "fewer", "seeds", "rate", "entries' share")
CHANGED = (
    "The rules were changed three times while test scores of older runs were known, and all runs made again. Sparse "
    "parts used to keep many entries until 45% of the training, and all values had the same bits: doped low ranks then "
    "lost 0.8 to 4.2% more than low ranks. Searches used to be five times shorter than the training, and chose rates "
    "that were too low for it (text, low rank, 10 times: 0.0004, and 3.1% above dense, behind doped by 1.2%)."
)
LOST = {"text": "perplexity above dense, %, test", "digits": "accuracy beside dense, points, test"}
MODES = {"float32": "-", "integers": "--"}  # and how their points are joined
STYLES = {  # what is drawn; other structures are in the tables
    "dense": ("#444444", "*"),
    "lowrank": ("#c4511d", "s"),
    "pruned": ("#777777", "^"),
    "doped lowrank": ("#0b62a8", "o"),
}


def parsed(key: str) -> tuple[Group, int]:
    """Group and seed of a run's name."""
    task, variant, mode, ratio, seed = key.split("/")
    return (task, variant, mode, float(ratio[:-1])), int(seed.split()[1])


def grouped(runs: Runs) -> dict[Group, Seeds]:
    """Runs that differ by their seed alone; a dense network with fewer bits is a variant of its own."""
    found: dict[Group, dict[int, Mapping[str, Any]]] = {}
    for key, record in runs.items():
        (task, variant, mode, ratio), seed = parsed(key)
        found.setdefault((task, variant, mode, ratio), {})[seed] = record
        for fewer in (name for name in record if name.endswith(" bits")):
            small = {**record, **record[fewer], "bits": [int(fewer.split()[0])] * 2}
            small["ratio"] = record["bytes"] / small["bytes"]
            found.setdefault((task, variant, fewer, ratio), {})[seed] = small
    return {key: dict(sorted(seeds.items())) for key, seeds in found.items()}


def is_digits(task: str) -> bool:
    return task.startswith("digits")


def summary(runs: Runs) -> list[dict[str, Any]]:
    """A row for each group: what it takes, and its score beside that of the dense network, low rank and pruning."""
    groups, rows = grouped(runs), []
    for key in sorted(groups, key=_order):
        (task, variant, mode, ratio), seeds = key, groups[key]
        first = next(iter(seeds.values()))
        start = "from scratch, " if variant.startswith("from") else ""
        dense = groups.get((task, f"{start}dense", "float32", ratio if start else 1.0), {})
        others = {"dense": dense} | {name: groups.get((task, start + name, mode, ratio), {}) for name in BESIDE[1:]}
        rows.append(
            {"task": task, "variant": variant, "mode": mode, "ratio": ratio, "seeds": len(seeds)}
            | {name: first[name] for name in ("bytes", "rate", "bits", "share")}
            | {"fewer": first["ratio"], "score": score(task, seeds)}
            | {f"beside {n}": None if o is seeds else difference(task, seeds, o) for n, o in others.items()}
        )
    return rows


def _order(key: Group) -> tuple[object, ...]:
    """Dense first, then by ratio and mode; a variant before its doped kind."""
    task, variant, mode, ratio = key
    scratch = variant.startswith("from")
    return task, scratch, ratio, "bits" in mode, mode, variant.partition(",")[0].split(" ")[-1], variant


def page(document: Mapping[str, Any], about: str) -> str:
    """Tables by task: all runs by ratio and mode."""
    lines = ["# Doped formats on real data", "", document["machine"], "", about, ""]
    for task, facts in document["tasks"].items():
        mine = [_cells(row) for row in document["table"] if row["task"] == task]
        if mine:
            lines += [
                f"## {task}: {facts['cell']}({facts['inputs']}, {facts['hidden']})", "",
                f"{facts['steps']} steps of {facts['batch']} for the dense network, then {facts['more']} of "
                f"{facts['more_batch']} for every variant, dense, too. {_starts(task, document)}", "",
                table((*HEAD, unit(task), *(f"beside {name}" for name in BESIDE)), mine), "",
            ]  # fmt: skip
    lines += [
        "Intervals are 95%. Accuracy: over recordings and seeds; beside another: in points, over recordings that both "
        "answered, and seeds. Perplexity: over rows of 500 characters and seeds; beside another: their ratio on the "
        "same rows. Beside low rank and pruned: at the same budget of bytes, with values of the same kind.", "",
    ]  # fmt: skip
    if document.get("search"):
        lines += ["## The search", "", CHANGED, "", *_search(document["search"])]
    if document.get("latency"):
        rows = [[name.split("/", 1)[1].rsplit("/", 1)[0], f"{ms:.2f}"] for name, ms in document["latency"].items()]
        lines += ["## Latency", "", "Milliseconds of 50 steps of the text's LSTM, batch 1, one thread.", "",
                  table(("W and U", "ms"), rows)]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def _cells(row: Mapping[str, Any]) -> list[object]:
    value, entry = row["bits"]
    values = "float32" if value == 32 else f"{value} bits" + (f", entries {entry}" if entry != value else "")
    share = f"{row['share']:.0%}" if "doped" in row["variant"] or "hybrid" in row["variant"] else ""
    cells = [
        row["variant"],
        values,
        f"{row['bytes']:,}",
        f"{row['fewer']:.1f}x",
        row["seeds"],
        f"{row['rate']:g}",
        share,
    ]
    cells.append(text_of(row["task"], row["score"], signed=False))
    return cells + [text_of(row["task"], row[f"beside {name}"]) for name in BESIDE]


def _starts(task: str, document: Mapping[str, Any]) -> str:
    found = {key: facts for key, facts in document["starts"].items() if key.startswith(f"{task}/")}
    texts = [f"{facts['valid']:.2f}" for facts in found.values()]
    return f"Validation {unit(task)} after the first training: {', '.join(texts)}." if texts else ""


def _search(search: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows: dict[tuple[str, str], list[str]] = {}
    for key, facts in search.items():
        task, variant, bits, rate, share = key.split("/")
        part = f" ({share})" if variant.split(" ")[0] in ("doped", "hybrid") else ""
        found = "diverged" if facts["score"] is None else f"{facts['score']:.2f}"
        rows.setdefault((f"{task}, {variant}", bits), []).append(f"{rate.split()[1]}{part}: {found}")
    return [
        table(("variant", "bits", "rate: score on validation data"), [[*key, "; ".join(v)] for key, v in rows.items()]),
        "",
    ]


def unit(task: str) -> str:
    return "accuracy" if is_digits(task) else "perplexity"


def score(task: str, seeds: Seeds) -> tuple[float, float, float]:
    """The mean over seeds with its 95% interval."""
    some = [*seeds.values()]
    if is_digits(task):
        count = len(some[0]["right"])
        right = [record["right"].count("1") / count for record in some]
        low, high = wilson(fmean(right) * count, count)
        extra = mean_margin(right) if len(right) > 1 else 0.0
        mean = fmean(right)
        low, high = mean - math.hypot(mean - low, extra), mean + math.hypot(high - mean, extra)
        return 100 * mean, 100 * max(0.0, low), 100 * min(1.0, high)
    logs = [fmean(record["rows"]) for record in some]
    return _ratio([fmean(values) for values in zip(*(record["rows"] for record in some), strict=True)], logs)


def difference(task: str, seeds: Seeds, others: Seeds) -> tuple[float, float, float] | None:
    """Accuracy minus theirs in points, or perplexity over theirs in percent above one; seeds that both have."""
    pairs = [(record, others[seed]) for seed, record in seeds.items() if seed in others]
    if not pairs:
        return None
    if is_digits(task):
        each = [[int(a) - int(b) for a, b in zip(x["right"], y["right"], strict=True)] for x, y in pairs]
    else:
        each = [[a - b for a, b in zip(x["rows"], y["rows"], strict=True)] for x, y in pairs]
    means = [fmean(values) for values in zip(*each, strict=True)]
    by_seed = [fmean(values) for values in each]
    if is_digits(task):
        half = math.hypot(mean_margin(means), mean_margin(by_seed) if len(by_seed) > 1 else 0.0)
        return 100 * fmean(means), 100 * (fmean(means) - half), 100 * (fmean(means) + half)
    middle, low, high = (100 * (value - 1) for value in _ratio(means, by_seed))
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
        end = "" if is_digits(task) else "%"
        return f"{triple[0]:+.1f}{end} ({triple[1]:+.1f} to {triple[2]:+.1f})"
    if is_digits(task):
        return f"{triple[0]:.1f}% ({triple[1]:.1f} to {triple[2]:.1f})"
    return f"{triple[0]:.3f} ({triple[1]:.3f} to {triple[2]:.3f})"


# Pictures ------------------------------------------------------------------------------------------------------------


def draw(document: Mapping[str, Any], folder: Path) -> None:
    """doped.svg: what is lost beside dense against bytes, by task; doped-latency.svg: the same of the text by time."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "kronecell", "font.size": 9}
    import matplotlib.pyplot as plt

    rows = [row for row in document["table"] if row["variant"] in STYLES]
    tasks = [task for task in LOST if any(row["task"] == task for row in rows)]
    figure, axes = plt.subplots(1, max(1, len(tasks)), figsize=(10, 4.6), layout="constrained", squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=False):
        for number, variant in enumerate(STYLES):
            for mode in MODES:
                # So that intervals do not hide each other, points at one ratio stand side by side.
                aside = 1 + 0.05 * (number - 2) + 0.025 * (mode == "float32") if variant != "dense" else 1.0
                points = [
                    (row["fewer"] * aside, row["beside dense"])
                    for row in rows
                    if (row["task"], row["variant"]) == (task, variant)
                    and (row["mode"] == mode or ("bits" in row["mode"] and mode == "integers"))
                ]
                _line(axis, sorted(points), variant, mode)
        axis.axhline(0, color="#444444", linewidth=0.7, linestyle=":")
        axis.set(xscale="log", xlabel="times fewer bytes of W and U", title=task, ylabel=LOST[task], xlim=(0.9, 50))
        axis.set_xticks([1, 2, 5, 10, 20, 40], ["1", "2", "5", "10", "20", "40"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    _finish(plt, figure, axes[0], folder / "doped.svg")
    if document.get("latency"):
        figure, axis = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
        for variant in STYLES:
            for mode in MODES:
                points = []
                for row in rows:
                    took = document["latency"].get(f"text/{variant}/{mode}/{row['ratio']:g}x/seed 0")
                    if (row["task"], row["variant"], row["mode"]) == ("text", variant, mode) and took is not None:
                        points.append((took, row["beside dense"]))
                _line(axis, sorted(points), variant, mode, joined=False)
        axis.set(xlabel="milliseconds of 50 steps, batch 1, one thread", ylabel=LOST["text"], title="text")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
        _finish(plt, figure, [axis], folder / "doped-latency.svg")


def _line(axis: Any, points: Sequence[Any], variant: str, mode: str, joined: bool = True) -> None:
    """Points with their intervals: filled in float32, hollow in integers."""
    points = [point for point in points if point[1] is not None]
    if not points:
        return
    colour, mark = STYLES[variant]
    middle = [value[0] for _, value in points]
    spread = [[value[0] - value[1] for _, value in points], [value[2] - value[0] for _, value in points]]
    axis.errorbar([x for x, _ in points], middle, spread, fmt=f"{mark}{MODES[mode] if joined else ''}", color=colour,
                  capsize=2, linewidth=1, markersize=5, mfc=colour if mode == "float32" else "white",
                  label=f"{variant}, {mode}")  # fmt: skip


def _finish(plt: Any, figure: Any, axes: Sequence[Any], target: Path) -> None:
    """With one legend for all axes."""
    named = {label: mark for axis in axes for mark, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend([*named.values()], [*named], loc="outside right upper", frameon=False, fontsize=8)
    write_atomically(target, lambda path: figure.savefig(path, format="svg", metadata={"Date": None}))
    plt.close(figure)
