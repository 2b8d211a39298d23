"""Every repetition of benchmarks.letters tested once: the best compressed network against the best dense one.

260 clips cannot tell networks apart that differ by two points; 780 can. For each repetition everything is done anew on
the two others: five trials of every network, three more runs with the best settings, and the choice by the mean of
these three, of one network among those whose W is at least 300 times smaller and of one among the dense. Both are then
trained on the two repetitions with ten seeds and tested on the third. The rule, and the number of seeds, were settled
before any of these runs, when results of the usual protocol (test on repetition 3) were known.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.letters_answers import DENSE, LEAST_RATIO, answers_of, difference, gap, percent
from benchmarks.letters_records import Record
from benchmarks.results import table
from kronecell.training.intervals import Variance

SEEDS = 10
KINDS = ("compressed", "dense")
Runs = Callable[[Any, str], list[Record]]


def rounds(
    study: Any, search: Runs, again: Runs, tested: Callable[[Any, str, int], Record]
) -> Iterator[Callable[[], object]]:
    """The pieces of work for the repetition that `study` tests."""
    names = [name for names in candidates(study).values() for name in names]
    for work in (search, again):
        yield from (lambda name=name, work=work: work(study, name) for name in names)
    for seed in range(min(2 * study.seeds, SEEDS)):
        for kind in KINDS:
            yield lambda kind=kind, seed=seed: tested(study, best_of_kind(study, kind, again)["name"], seed)


def candidates(study: Any) -> dict[str, list[str]]:
    """The networks of both kinds; how many numbers a W has is known from any of its runs."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name, own in study.formats.items():
        if own["format"] == DENSE:
            found["dense"].append(name)
            continue
        ratios = [
            record["ratio_w"] for record in study.records.known.values()
            if "ratio_w" in record and all(record["settings"].get(key) == own.get(key) for key in ("format", "shared"))
        ]  # fmt: skip
        if ratios and ratios[0] >= LEAST_RATIO:
            found["compressed"].append(name)
    return found


def best_of_kind(study: Any, kind: str, again: Runs) -> dict[str, Any]:
    """The network of this kind that is best on the two repetitions; trains what is missing."""
    scores = {name: statistics.fmean(r["accuracy"] for r in again(study, name)) for name in candidates(study)[kind]}
    name = max(scores, key=lambda name: scores[name])
    return {"name": name, "again": scores[name]}


# Results --------------------------------------------------------------------------------------------------------


def collect(turns: Mapping[int, Any], again: Runs, test: Runs) -> list[dict[str, Any]]:
    """For each repetition that is whole: what was chosen, and the runs of both. `again` and `test` train nothing."""
    found = []
    for repetition, study in turns.items():
        names = candidates(study)
        if all(names.values()) and all(again(study, name) for kind in KINDS for name in names[kind]):
            best = {kind: best_of_kind(study, kind, again) for kind in KINDS}
            runs = {kind: test(study, best[kind]["name"])[: min(2 * study.seeds, SEEDS)] for kind in KINDS}
            if all(len(some) == min(2 * study.seeds, SEEDS) for some in runs.values()):
                found.append({"repetition": repetition, **{kind: best[kind] | {"test": runs[kind]} for kind in KINDS}})
    return found


def summarised(turns: Sequence[Mapping[str, Any]], noise: Variance | None) -> dict[str, Any]:
    """Differences on the clips of each repetition, and on all that were tested."""
    if not turns:
        return {}
    rows = []
    for turn in turns:
        ours, theirs = (turn[kind]["test"] for kind in KINDS)
        row = {"repetition": turn["repetition"], "seeds": len(ours), "difference": difference(ours, theirs, noise)}
        for kind in KINDS:
            some = turn[kind]["test"]
            row[kind] = {
                "name": turn[kind]["name"], "again": turn[kind]["again"], "params_w": some[0]["params_w"],
                "accuracy": statistics.fmean(run["accuracy"] for run in some),
            }  # fmt: skip
        rows.append(row)
    # A seed of one repetition has nothing to do with the same seed of another: their variances add up by themselves.
    every = [[run for turn in turns for run in turn[kind]["test"]] for kind in KINDS]
    share = None if noise is None else (noise[0] / len(turns), noise[1])
    return {"rows": rows, "difference": difference(*every, share), "clips": len(answers_of(*every))}


def page(found: Mapping[str, Any]) -> str:
    """The table and the sentence of letters.md."""
    if not found:
        return ""
    text = "\n## Each repetition tested once\n\n" + " ".join((__doc__ or "").split("\n\n", 1)[1].split()) + "\n\n"
    text += table(
        ("tested", "best compressed", "weights of W", "again", "accuracy", "best dense", "again", "accuracy", "seeds",
         "compressed minus dense"),
        [
            (row["repetition"], row["compressed"]["name"], f"{row['compressed']['params_w']:,}",
             *(percent(row["compressed"][key]) for key in ("again", "accuracy")), row["dense"]["name"],
             *(percent(row["dense"][key]) for key in ("again", "accuracy")), row["seeds"], gap(row["difference"]))
            for row in found["rows"]
        ],
    )  # fmt: skip
    return text + f"\nOver all {found['clips']} clips, compressed minus dense is {gap(found['difference'])} points.\n"
