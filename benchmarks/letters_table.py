"""The results of benchmarks.letters as JSON, Markdown and two figures; every accuracy with its 95% interval."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import table
from kronecell.deploy.atomic import write_atomically
from kronecell.training.intervals import interval, mean_margin

DENSE = "dense"
COMMAND = "python -m benchmarks.letters --data ../shared/data/avletters --out runs/letters --minutes 60"


def write_results(folder: Path, facts: Mapping[str, Any], quick: bool) -> None:
    """letters.json, letters.md, letters.svg and, where rates were compared, letters-rates.svg."""
    rows = [summarised(row, facts["rows"]) for row in facts["rows"] if row["test"]]
    others = [summarised(row, facts["rows"]) for row in facts["baselines"] if row["test"]]
    document = {"benchmark": "letters", "command": COMMAND, "quick": quick, **facts, "table": rows, "besides": others}
    document["by_structure"] = [summarised(row, facts["rows"]) for row in facts["structure"]]
    dense = next((row["test"] for row in facts["structure"] if row["name"] == DENSE), None)
    document["minus_dense_by_structure"] = {} if dense is None else {
        row["name"]: difference(row["test"], dense) for row in facts["rows"] if row["test"]
    }  # fmt: skip
    document["transfer"] = transfer(facts["sweep"])
    text, page = json.dumps(document, indent=1) + "\n", markdown(document)
    write_atomically(folder / "letters.json", lambda path: path.write_text(text))
    write_atomically(folder / "letters.md", lambda path: path.write_text(page))
    if rows:
        by_structure = [{**row, "name": f"{row['name']}, by structure"} for row in document["by_structure"]]
        draw(folder / "letters.svg", rows + by_structure, others)
    if len({point["rates"] for point in facts["sweep"]}) > 1:
        draw_rates(folder / "letters-rates.svg", facts["sweep"])


def summarised(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One line of the table."""
    test, best = row["test"], row["test"][0]
    scores = {(r["fold"], r["seed"]): (r["accuracy"], r.get("clips", 0)) for r in test}
    talkers = {(r["fold"], r["seed"]): (r["accuracy"], r.get("clips", 0)) for r in row.get("talkers", ())}
    dense = next((r for r in rows if r["name"] == DENSE), None)
    found = {
        "name": row["name"],
        "accuracy": statistics.fmean(r["accuracy"] for r in test),
        "interval": interval(scores),
        "seeds": len(test),
        "difference": None if dense is None or dense["test"] is test else difference(test, dense["test"]),
        "talkers": statistics.fmean(r["accuracy"] for r in row["talkers"]) if talkers else None,
        "talkers_interval": interval(talkers) if talkers else None,
        "talkers_difference": None,
        "inner": max((trial["accuracy"] for trial in row.get("trials", ())), default=None),
        "trials": len(row.get("trials", ())),
        "settings": {k: v for k, v in best["settings"].items() if k not in ("format", "shared", "paper")},
    }
    if talkers and dense is not None and dense.get("talkers") and dense["name"] != row["name"]:
        found["talkers_difference"] = difference(row["talkers"], dense["talkers"])
    for name in ("params_w", "params_model", "ratio_w", "step_ms", "latency_ms", "seconds", "format"):
        found[name] = best.get(name)
    return found


def difference(ours: Sequence[Mapping[str, Any]], dense: Sequence[Mapping[str, Any]]) -> list[float] | None:
    """Ours minus dense, and its 95% interval over clips, which both answered; seeds that both have, folds together."""
    pairs = {(r["fold"], r["seed"]): r for r in dense if "right" in r}
    both = [(r, pairs[r["fold"], r["seed"]]) for r in ours if "right" in r and (r["fold"], r["seed"]) in pairs]
    per_clip: dict[tuple[int, int], list[int]] = {}
    per_seed: dict[int, list[int]] = {}
    for a, b in both:
        for clip, (x, y) in enumerate(zip(a["right"], b["right"], strict=True)):
            per_clip.setdefault((a["fold"], clip), []).append(int(x) - int(y))
            per_seed.setdefault(a["seed"], []).append(int(x) - int(y))
    if len(per_clip) < 2:
        return None
    means = [statistics.fmean(values) for values in per_clip.values()]
    seeds = [statistics.fmean(values) for values in per_seed.values()]
    middle = statistics.fmean(means)
    margin = (mean_margin(means) ** 2 + (mean_margin(seeds) ** 2 if len(seeds) > 1 else 0.0)) ** 0.5
    return [middle, middle - margin, middle + margin]


def transfer(sweep: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For both kinds of rates: best rates, and the mean loss of a network at the best rate of another."""
    found: dict[str, Any] = {}
    for kind in sorted({point["rates"] for point in sweep}):
        curves: dict[tuple[str, int], dict[float, float]] = {}
        for point in sweep:
            if point["rates"] == kind:
                curves.setdefault((point["name"], point["hidden"]), {})[point["rate"]] = point["accuracy"]
        whole = max((len(curve) for curve in curves.values()), default=0)
        curves = {key: curve for key, curve in curves.items() if len(curve) == whole}
        best = {key: max(curve, key=lambda rate, curve=curve: curve[rate]) for key, curve in curves.items()}  # type: ignore[misc]
        losses = [
            curve[best[key]] - curve[best[other]] for key, curve in curves.items() for other in curves if other != key
        ]
        if losses:
            found[kind] = {
                "best": [{"name": name, "hidden": hidden, "rate": rate} for (name, hidden), rate in best.items()],
                "mean_loss": statistics.fmean(losses),
                "largest_loss": max(losses),
                "pairs": len(losses),
            }
    return found


def markdown(document: Mapping[str, Any]) -> str:
    rows, machine = document["table"], document["environment"]
    text = (
        f"# Lip reading from raw pixels\n\n{protocol(document)}\n\nMade by `{document['command']}` on "
        f"{machine['processor']}, one thread, with much other work running: read times as rough ratios.\n\n"
    )
    if document["quick"]:
        text += "**Made with --quick: noise, not letters.**\n\n"
    text += table(
        (
            "LSTM", "accuracy", "95% interval", "minus dense", "seeds", "parameters of W", "ratio of W", "of model",
            "rate", "dropout", "decay", "gain", "inner", "training", "latency",
        ),
        [line(row, document["base"]) for row in rows],
    )  # fmt: skip
    if document["besides"]:
        text += "\nWhat else one would do with the same clips:\n\n" + table(
            ("model", "accuracy", "95% interval", "minus dense LSTM", "seeds", "parameters", "training", "latency"),
            [
                (r["name"], percent(r["accuracy"]), span(r["interval"]), gap(r["difference"]), r["seeds"],
                 f"{r['params_model']:,}", seconds(r["seconds"]), ms(r["latency_ms"]))
                for r in document["besides"]
            ],
        )  # fmt: skip
    people = [row for row in rows if row["talkers"] is not None]
    if people:
        text += "\nTalkers that were never seen (5 folds of two talkers, one seed, the same settings):\n\n" + table(
            ("LSTM", "accuracy", "95% interval", "minus dense"),
            [
                (r["name"], percent(r["talkers"]), span(r["talkers_interval"]), gap(r["talkers_difference"]))
                for r in people
            ],
        )
        text += "\nThe intervals are over clips; talkers differ more than clips do.\n"
    if document["sweep"]:
        text += "\n## Rates by structure\n\n" + rates(document)
    return text


def protocol(document: Mapping[str, Any]) -> str:
    """What was done, in words."""
    base = document["base"]
    return (
        f"AVLetters, {document['clips']} clips: 26 letters, 10 talkers, 3 repetitions. Whole clips of "
        f"{base['width']} x {base['height']} grey pixels, hidden {base['hidden']}, {base['epochs']} epochs, "
        "cosine schedule, Adam, gradients clipped, the mean of all outputs classified. Accuracy of the last "
        "epoch. Each network had the same five trials on the training repetitions alone (trained on 1, "
        "validated on 2): rates 0.001, 0.004 and 0.016, then dropout 0.6 with weight decay 0.1, and gain 1.7, "
        "at the best of these. The best trial's settings were trained on repetitions 1 and 2 and tested on 3. "
        "Intervals are 95%, over clips and seeds; the difference to dense is over the same clips, answer by "
        "answer. Chance is 3.8%."
    )


def line(row: Mapping[str, Any], base: Mapping[str, Any]) -> tuple[object, ...]:
    s = {**base, **row["settings"]}
    return (
        row["name"], percent(row["accuracy"]), span(row["interval"]), gap(row["difference"]), row["seeds"],
        f"{row['params_w']:,}", f"{row['ratio_w']:,.0f}x", f"{row['params_model']:,}", f"{s['learning_rate']:g}",
        f"{s['dropout']:g}", f"{s['weight_decay']:g}", f"{s['input_gain']:g}", percent(row["inner"]),
        seconds(row["seconds"]), ms(row["latency_ms"]),
    )  # fmt: skip


def rates(document: Mapping[str, Any]) -> str:
    """Accuracies on the inner split by rate, and what is lost at another network's best rate."""
    sweep = document["sweep"]
    known = sorted({point["rate"] for point in sweep})
    keys = dict.fromkeys((p["name"], p["hidden"], p["rates"]) for p in sweep)
    lines = []
    for name, hidden, kind in keys:
        curve = {
            p["rate"]: p["accuracy"] for p in sweep if (p["name"], p["hidden"], p["rates"]) == (name, hidden, kind)
        }
        lines.append((name, hidden, kind, *(percent(curve[rate]) if rate in curve else "" for rate in known)))
    text = (
        "`uniform` is one rate for all; with `structure` W has the rate of U times hidden size over inputs, and a "
        "factor of W what changes W as much. Accuracy on the inner split by rate:\n\n"
    )
    text += table(("LSTM", "hidden", "rates", *(f"{rate:g}" for rate in known)), lines)
    for kind, facts in document["transfer"].items():
        text += (
            f"\n- `{kind}`: at the best rate of another network a network loses {100 * facts['mean_loss']:.1f} points "
            f"on average over {facts['pairs']} pairs, at most {100 * facts['largest_loss']:.1f}."
        )
    text += "\n\nInner split, 260 clips, one seed: an accuracy has a standard error of about 3.\n"
    if document["by_structure"]:
        text += "\nTested on repetition 3 at the best rate by structure (four trials, base settings otherwise):\n\n"
        text += table(
            ("LSTM", "accuracy", "95% interval", "minus dense at one rate", "rate"),
            [
                (r["name"], percent(r["accuracy"]), span(r["interval"]), gap(r["difference"]),
                 f"{r['settings']['learning_rate']:g}")
                for r in document["by_structure"]
            ],
        )  # fmt: skip
    known = document["minus_dense_by_structure"]
    if known:
        text += "\nThe networks at one rate, minus dense by structure: "
        text += "; ".join(f"{name} {gap(triple)}" for name, triple in known.items()) + ".\n"
    return text


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def span(pair: Sequence[float] | None) -> str:
    return "" if pair is None else f"{100 * pair[0]:.1f} to {100 * pair[1]:.1f}"


def gap(triple: Sequence[float] | None) -> str:
    return "" if triple is None else f"{100 * triple[0]:+.1f} ({100 * triple[1]:+.1f} to {100 * triple[2]:+.1f})"


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} s"


def ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} ms"


# Figures --------------------------------------------------------------------------------------------------------

COLOURS = {"KCP": "#0b62a8", "dense": "#444444"}


def _plot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "letters", "svg.fonttype": "none", "font.size": 9}
    import matplotlib.pyplot as plt

    return plt


def draw(target: Path, rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> None:
    """A line for each network: its accuracy with the interval, and beside it the parameters of its W.

    Side by side, because most formats have nearly the same size: as points of one plane they lie on each other.
    """
    plt = _plot()
    lines = sorted([(row["accuracy"], row, True) for row in rows] + [(row["accuracy"], row, False) for row in others],
                   key=lambda line: line[0])  # fmt: skip
    height = 1.1 + 0.27 * len(lines)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(7.2, height), sharey=True, layout="constrained", width_ratios=(2, 1)
    )
    for place, (accuracy, row, raw) in enumerate(lines):
        low, high = row["interval"]
        colour = next((c for key, c in COLOURS.items() if row["name"].startswith(key)), "#c4511d")
        colour = colour if raw else "#777777"
        left.errorbar(100 * accuracy, place, xerr=[[100 * (accuracy - low)], [100 * (high - accuracy)]], fmt="o",
                      color=colour, mfc=colour if raw else "white", capsize=3, markersize=5)  # fmt: skip
        right.plot(row["params_w"], place, "s", color=colour, mfc=colour if raw else "white", markersize=5)
        right.annotate(
            f"{row['params_w']:,}",
            (row["params_w"], place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
        )
    left.set_yticks(range(len(lines)), [row["name"] for _, row, _ in lines])
    left.set(xlabel="accuracy on the third repetition, %, and 95% interval")
    right.set(xscale="log", xlabel="parameters of W", xlim=(500, 2e7))
    left.grid(alpha=0.3)
    right.grid(alpha=0.3)
    right.tick_params(axis="y", length=0)
    for side in ("top", "right"):
        left.spines[side].set_visible(False)
        right.spines[side].set_visible(False)
    _save(plt, figure, target)


def draw_rates(target: Path, sweep: Sequence[Mapping[str, Any]]) -> None:
    """Accuracy by rate, uniform beside by structure."""
    plt = _plot()
    kinds = ("uniform", "structure")
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.4), sharey=True, layout="constrained")
    names = [*dict.fromkeys(point["name"] for point in sweep)]
    for axis, kind in zip(axes, kinds, strict=True):
        for number, name in enumerate(names):
            for hidden in sorted({point["hidden"] for point in sweep}):
                found = sorted(
                    (p["rate"], 100 * p["accuracy"])
                    for p in sweep
                    if (p["name"], p["hidden"], p["rates"]) == (name, hidden, kind)
                )
                if found:
                    style = "-o" if hidden == max(point["hidden"] for point in sweep) else "--s"
                    axis.plot(*zip(*found, strict=True), style, color=f"C{number}", label=f"{name}, hidden {hidden}",
                              markersize=4)  # fmt: skip
        axis.set(xscale="log", title=f'rates = "{kind}"', xlabel="learning rate")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy, inner split, %")
    axes[1].legend(fontsize=7)
    _save(plt, figure, target)


def _save(plt: Any, figure: Any, target: Path) -> None:
    write_atomically(target, lambda path: figure.savefig(path, format="svg", metadata={"Date": None}))
    plt.close(figure)
