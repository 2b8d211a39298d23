"""The results of benchmarks.letters as JSON, Markdown and two figures; every accuracy with its 95% interval."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import letters_rotation
from benchmarks.letters_answers import (
    DENSE,
    LEAST_RATIO,
    Triple,
    accuracy_interval,
    answers_of,
    difference,
    gap,
    ms,
    percent,
    span,
)  # fmt: skip
from benchmarks.letters_figures import draw, draw_rates
from benchmarks.letters_records import Record, to_json
from benchmarks.results import table
from kronecell.deploy.atomic import write_atomically
from kronecell.training.intervals import Variance, mean_margin, seed_variance

BY_STRUCTURE = ", by structure"  # the same network with rates = "structure"
COMMAND = "python -m benchmarks.letters --data ../shared/data/avletters --out runs/letters --minutes 60"
TRIAL = re.compile(r"(tested\d-)?(inner|again)-")  # keys of runs that choose


def write_results(folder: Path, facts: Mapping[str, Any], quick: bool, runs: Mapping[str, Record]) -> None:
    """letters.json, letters.md, letters.svg and, where rates were compared, letters-rates.svg."""
    tested = [row for row in facts["rows"] if row["test"]]
    noise = seed_variance(answers_of(row["test"]) for row in [*tested, *facts["baselines"]] if row["test"])
    rows = [summarised(row, tested, facts["people"], noise) for row in tested]
    others = [summarised(row, tested, facts["people"], noise) for row in facts["baselines"]]
    document: dict[str, Any] = {
        "benchmark": "letters", "command": COMMAND, "quick": quick,
        **{name: facts[name] for name in ("environment", "base", "clips")},
        "table": rows, "besides": others, "verdict": verdict(tested, noise),
        "times": facts["times"], "rotation": letters_rotation.summarised(facts["rotation"], noise),
        "sweep": facts["sweep"],
        "transfer": transfer(facts["sweep"]), "kcp": questions(facts["kcp"]), "learnt": facts["kcp"]["learnt"],
        "runs": {key: brief(key, record) for key, record in runs.items()},
    }  # fmt: skip
    text, page = to_json(document), markdown(document)
    write_atomically(folder / "letters.json", lambda path: path.write_text(text))
    write_atomically(folder / "letters.md", lambda path: path.write_text(page))
    if rows:
        draw(folder / "letters.svg", rows, others)
    if len({point["rates"] for point in facts["sweep"]}) > 1:
        draw_rates(folder / "letters-rates.svg", facts["sweep"])


def brief(key: str, record: Record) -> Record:
    """A run for the results: of a trial not every answer, no time, and no more digits than mean something."""
    dropped = ("seconds", "latency_ms", *(("right",) if TRIAL.match(key) else ()))
    kept = {name: value for name, value in record.items() if name not in dropped}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in kept.items()}


# Figures of one network -----------------------------------------------------------------------------------------


def summarised(
    row: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    people: Mapping[str, Sequence[str]],
    noise: Variance | None,
) -> dict[str, Any]:
    """One line of the table; differences are to both kinds of dense."""
    test, talkers = row["test"], row.get("talkers", ())
    against = {other["name"]: other for other in rows if other["name"] in (DENSE, DENSE + BY_STRUCTURE)}
    plain, fair = against.get(DENSE), against.get(DENSE + BY_STRUCTURE)
    found = {
        "name": row["name"],
        "accuracy": statistics.fmean(r["accuracy"] for r in test),
        "interval": accuracy_interval(test, noise),
        "seeds": len(test),
        "difference": to_other(row, plain, noise),
        "difference_by_structure": to_other(row, fair, noise),
        "talkers": statistics.fmean(r["accuracy"] for r in talkers) if talkers else None,
        "talkers_interval": over_talkers(talkers, None, people),
        "talkers_difference": to_talkers(row, plain, people),
        "talkers_difference_by_structure": to_talkers(row, fair, people),
        "inner": max((trial["accuracy"] for trial in row.get("trials", ())), default=None),
        "again": statistics.fmean(r["accuracy"] for r in row["again"]) if row.get("again") else None,
        "trials": len(row.get("trials", ())),
        "settings": {k: v for k, v in test[0]["settings"].items() if k not in ("format", "shared")},
    }
    return found | {name: test[0].get(name) for name in ("params_w", "params_model", "ratio_w", "format")}


def to_other(row: Mapping[str, Any], other: Mapping[str, Any] | None, noise: Variance | None) -> Triple | None:
    return None if other is None or other["name"] == row["name"] else difference(row["test"], other["test"], noise)


def to_talkers(
    row: Mapping[str, Any], other: Mapping[str, Any] | None, people: Mapping[str, Sequence[str]]
) -> Triple | None:
    if other is None or other["name"] == row["name"] or not row.get("talkers") or not other.get("talkers"):
        return None
    found = over_talkers(row["talkers"], other["talkers"], people)
    return None if found is None else [sum(found) / 2, *found]


def over_talkers(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]] | None, people: Mapping[str, Sequence[str]]
) -> list[float] | None:
    """The 95% interval of the mean over talkers: of the accuracy, or of the difference to another network's."""
    values: dict[str, list[float]] = {}
    others = {(run["fold"], run["seed"]): run for run in theirs or ()}
    for run in ours:
        other = others.get((run["fold"], run["seed"]), {"right": "0" * len(run.get("right", ""))})
        for name, x, y in zip(people[str(run["fold"])], run.get("right", ""), other.get("right", ""), strict=False):
            values.setdefault(name, []).append(float(int(x) - int(y)))
    if len(values) < 2:
        return None
    means = [statistics.fmean(one) for one in values.values()]
    middle, margin = statistics.fmean(means), mean_margin(means)
    return [middle - margin, middle + margin]


def verdict(rows: Sequence[Mapping[str, Any]], noise: Variance | None) -> dict[str, Any]:
    """The best of each kind, chosen on the training repetitions, compared on the test clips."""

    def best(chosen: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        ready = [row for row in chosen if row["again"]]
        return max(ready, key=lambda row: statistics.fmean(r["accuracy"] for r in row["again"]), default=None)

    dense = best([row for row in rows if row["name"].startswith(DENSE)])
    small = [row for row in rows if (row["test"][0].get("ratio_w") or 0) >= LEAST_RATIO]
    first, kcp = best(small), best([row for row in small if row["name"].startswith("KCP")])
    if dense is None or first is None or kcp is None:
        return {}
    found = {"dense": dense["name"], "compressed": first["name"], "kcp": kcp["name"]}
    found["ratio"] = first["test"][0]["ratio_w"]
    found["compressed minus dense"] = difference(first["test"], dense["test"], noise)
    same = kcp is first
    found["kcp minus compressed"] = [0.0] * 3 if same else difference(kcp["test"], first["test"], noise)
    found["kcp minus dense"] = difference(kcp["test"], dense["test"], noise)
    return found


def questions(kcp: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The study of KCP: each line with its interval and its difference to the first line of its question."""
    found: dict[str, list[dict[str, Any]]] = {}
    formats = {(line["format"], line["shared"]): line for lines in kcp["questions"].values() for line in lines}
    noise = seed_variance(answers_of(line["runs"]) for line in formats.values())
    for question, lines in kcp["questions"].items():
        found[question] = [
            {
                "label": line["label"], "format": line["format"], "shared": line["shared"], "rate": line["rate"],
                "params_w": line["runs"][0].get("params_w"), "seeds": len(line["runs"]),
                "accuracy": statistics.fmean(r["accuracy"] for r in line["runs"]),
                "interval": accuracy_interval(line["runs"], noise),
                "difference": None if line is lines[0] else difference(line["runs"], lines[0]["runs"], noise),
            }
            for line in lines
        ]  # fmt: skip
    return found


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


# The page -------------------------------------------------------------------------------------------------------


def markdown(document: Mapping[str, Any]) -> str:
    rows, machine = document["table"], document["environment"]
    text = (
        f"# Lip reading from raw pixels\n\n{protocol(document)}\n\nMade by `{document['command']}` on "
        f"{machine['processor']}. Times are for one thread, measured in turn in one run: a training step of 16 clips, "
        "and one clip of 25 frames.\n\n"
    )
    if document["quick"]:
        text += "**Made with --quick: noise, not letters.**\n\n"
    text += table(
        (
            "LSTM", "accuracy", "95% interval", "minus dense", "minus dense, by structure", "seeds", "parameters of W",
            "ratio of W", "of model", "rate", "dropout", "decay", "gain", "inner", "again", "training step", "a clip",
        ),
        [(*line(row, document["base"]), *took(row, document)) for row in rows],
    )  # fmt: skip
    text += said(document["verdict"]) + letters_rotation.page(document["rotation"])
    if document["besides"]:
        text += "\nWhat else one would do with the same clips:\n\n" + table(
            ("model", "accuracy", "95% interval", "minus dense LSTM", "seeds", "parameters", "training step", "a clip"),
            [
                (r["name"], percent(r["accuracy"]), span(r["interval"]), gap(r["difference"]), r["seeds"],
                 f"{r['params_model']:,}", *took(r, document))
                for r in document["besides"]
            ],
        )  # fmt: skip
    people = [row for row in rows if row["talkers"] is not None]
    if people:
        text += "\nTalkers that were never seen (5 folds of two talkers, one seed, the same settings):\n\n" + table(
            ("LSTM", "accuracy", "95% interval", "minus dense", "minus dense, by structure"),
            [
                (r["name"], percent(r["talkers"]), span(r["talkers_interval"]), gap(r["talkers_difference"]),
                 gap(r["talkers_difference_by_structure"]))
                for r in people
            ],
        )  # fmt: skip
        text += "\nThese intervals are over the ten talkers: people differ more than clips do.\n"
    if document["sweep"]:
        text += "\n## Rates by structure\n\n" + rates(document)
    return text + kcp_study(document)


def protocol(document: Mapping[str, Any]) -> str:
    """What was done, in words."""
    base = document["base"]
    return (
        f"AVLetters, {document['clips']} clips: 26 letters, 10 talkers, 3 repetitions. Whole clips of "
        f"{base['width']} x {base['height']} grey pixels, hidden {base['hidden']}, {base['epochs']} epochs, "
        "cosine schedule, Adam, gradients clipped, the mean of all outputs classified. Accuracy of the last "
        "epoch. Each network had the same five trials on the training repetitions alone (trained on 1, "
        "validated on 2): rates 0.001, 0.004 and 0.016, then dropout 0.6 with weight decay 0.1, and gain 1.7, "
        "at the best of these. The best trial's settings were trained on repetitions 1 and 2 and tested on 3. Inner is "
        "the best trial's accuracy; again the mean of three more runs with its settings on the training repetitions "
        "(another seed; trained on 2, validated on 1), which choose the best of the formats. "
        "Intervals are 95%, over clips and seeds, both drawn at random (two-way analysis of variance; how much seeds "
        "vary is pooled over all networks); a difference is taken answer by answer, on the same clips. "
        "Each interval is for its own comparison. By structure: W has a rate of its own. Chance is 3.8%."
    )


def said(found: Mapping[str, Any]) -> str:
    """The verdict in words."""
    if not found:
        return ""
    return (
        f"\nChosen on the training repetitions: among W of at least {LEAST_RATIO} times fewer parameters "
        f"{found['compressed']}; among dense {found['dense']}; among KCP {found['kcp']}. On the test clips "
        f"{found['compressed']} minus {found['dense']} is {gap(found['compressed minus dense'])}, {found['kcp']} minus "
        f"{found['compressed']} {gap(found['kcp minus compressed'])}, and {found['kcp']} minus {found['dense']} "
        f"{gap(found['kcp minus dense'])}. That three more runs choose, because one was too noisy, was decided when "
        "some test results were known already; by one run alone TT, rows x columns would have been chosen.\n"
    )


def line(row: Mapping[str, Any], base: Mapping[str, Any]) -> tuple[object, ...]:
    s = {**base, **row["settings"]}
    return (
        row["name"], percent(row["accuracy"]), span(row["interval"]), gap(row["difference"]),
        gap(row["difference_by_structure"]), row["seeds"], f"{row['params_w']:,}", f"{row['ratio_w']:,.0f}x",
        f"{row['params_model']:,}", f"{s['learning_rate']:g}", f"{s['dropout']:g}", f"{s['weight_decay']:g}",
        f"{s['input_gain']:g}", percent(row["inner"]), percent(row["again"]),
    )  # fmt: skip


def took(row: Mapping[str, Any], document: Mapping[str, Any]) -> tuple[str, str]:
    """Of a training step and of a clip, where they were measured."""
    times = document["times"] or {"step_ms": {}, "clip_ms": {}}
    return ms(times["step_ms"].get(row["name"])), ms(times["clip_ms"].get(row["name"]))


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
    return text + "\n\nInner split, 260 clips, one seed: an accuracy has a standard error of about 3.\n"


def kcp_study(document: Mapping[str, Any]) -> str:
    """What makes KCP weaker or stronger, and what a dense W learns."""
    text = "\n## What makes KCP weaker or stronger\n\n"
    text += "Inner split; the rate is the better of 0.004 and 0.016 with seed 0.\n"
    for question, lines in document["kcp"].items():
        if lines:
            text += f"\n{question}:\n\n" + table(
                ("format", "accuracy", "95% interval", "minus the first", "seeds", "parameters of W", "rate"),
                [
                    (r["label"], percent(r["accuracy"]), span(r["interval"]), gap(r["difference"]), r["seeds"],
                     f"{r['params_w'] or 0:,}", f"{r['rate']:g}")
                    for r in lines
                ],
            )  # fmt: skip
    learnt = document["learnt"]
    if learnt:
        text += "\nWhat a dense W learns (1,200 x 512, four gates): "
        text += "; ".join(
            f"{name}: effective rank {facts['effective rank']:.1f}, 90% of the energy in {facts['rank of 90%']} "
            "directions"
            for name, facts in learnt["matrices"].items()
        )
        text += ". The share of the energy of its change that the best fit of a format, shared by the gates, holds:\n\n"
        text += table(("format", "held"), [(f"`{key}`", f"{100 * held:.2f}%") for key, held in learnt["held"].items()])
    return text if any(document["kcp"].values()) or learnt else ""
