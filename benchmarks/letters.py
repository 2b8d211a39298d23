"""Which format learns what: lip reading (AVLetters: 26 letters, 10 talkers, 3 repetitions) from raw pixels.

    python -m benchmarks.letters --data ../shared/data/avletters --out runs/letters --minutes 60

1. `tests`: every network gets the same five trials on the training repetitions alone (trained on 1, validated on 2):
   three rates, then more regularisation and a larger gain at the best of them. With the best trial's settings it is
   trained on repetitions 1 and 2 and tested on 3, with five seeds. Which format is called the best is decided by three
   more runs with these settings on the training repetitions: another seed, and both seeds trained on 2 and validated
   on 1. One run on 260 clips decides too little.
2. `rates`: one rate for all against rates by structure, at two hidden sizes, on the inner split.
3. `talkers`: the same settings on people that were never seen, 5 folds.
4. `besides`: what else one would do with the same clips (ridge regression, PCA, a CNN).
5. `kcp`: what makes KCP weaker or stronger, on the inner split (benchmarks.letters_kcp).
6. `rotation1`, `rotation2`, `rotation3`: each repetition is tested once, with the whole search and the choice of the
   best compressed and the best dense network on the two others (benchmarks.letters_rotation).
7. `times`: what a clip and a training step take, in turn in one run (benchmarks.letters_times); for a quiet machine.

Accuracies are those of the last epoch. Run the same command again to go on: what is finished, in `--out` or in the
results, is read and not repeated. `--minutes` ends the work after that time between two runs; the table has what is
whole and says so. `--parts` does some of them: two processes may work on different ones once all trials are done.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import letters_baselines as baselines
from benchmarks import letters_kcp, letters_rotation, letters_times
from benchmarks.letters_answers import DENSE
from benchmarks.letters_data import REPETITIONS, TEST, quick_data, stores, talkers_of
from benchmarks.letters_records import Record, Records, in_results
from benchmarks.letters_table import BY_STRUCTURE, write_results
from benchmarks.results import RESULTS
from kronecell.data import Store
from kronecell.training.environment import environment
from kronecell.training.evaluation import evaluate_clips
from kronecell.training.experiment import Experiment
from kronecell.training.loop import Diverged
from kronecell.training.run import make_experiment, run, run_folder
from kronecell.training.saved import load
from kronecell.training.splits import fold_of_each_clip

MODES = "m=12x10x10,n=4x4x8"  # of 40 x 30 grey pixels and 128 hidden units
SHARED = {
    "KCP (4,4,2), pair": f"kcp:{MODES},K=4,CA=4,CB=2",
    "KCP (4,4,2), all": f"kcp:{MODES},K=4,CA=4,CB=2,tie=all",
    "KCP (8,2,2), all": f"kcp:{MODES},K=8,CA=2,CB=2,tie=all",
    "TT, rank 4": f"tt:{MODES},r=4",
    "TR, rank 5": f"tr:{MODES},r=5",
    "BT, rank 3, P = 2": f"bt:{MODES},r=3,P=2",
    "HT, rank 4": f"ht:{MODES},r=4",
    "CP, rank 6": f"cp:{MODES},r=6",
    "Tucker, rank 4": f"tucker:{MODES},r=4",
    "low rank 1": "lowrank:m=1200,n=128,r=1",
    "TT, rows x columns": "tt:m=30x40,n=8x16,r=1",  # added when the study of KCP, on the inner split, had found it
    "KCP (4,2,1), rows x columns": "kcp:m=30x40,n=8x16,K=4,CA=2,CB=1,tie=all",
}
OWN = {"KCP (16,4,2), all, own": f"kcp:{MODES},K=16,CA=4,CB=2,tie=all", "low rank 4, own": "lowrank:m=1200,n=128,r=4"}
UNIFORM: dict[str, dict[str, Any]] = {
    DENSE: {"format": "dense"},
    **{name: {"format": text, "shared": True} for name, text in SHARED.items()},
    **{name: {"format": text} for name, text in OWN.items()},
}
SWEEP = (DENSE, *SHARED)  # in the study of rates
ALSO = (DENSE, "KCP (4,4,2), all", "TT, rank 4", "HT, rank 4")  # tested with rates by structure, too
FORMATS = UNIFORM | {name + BY_STRUCTURE: {**UNIFORM[name], "rates": "structure"} for name in ALSO}
# What decides comes first: the best on the inner split, and both kinds of dense.
FIRST = (DENSE + BY_STRUCTURE, "KCP (4,4,2), all", DENSE, "TT, rank 4", "HT, rank 4", "KCP (4,2,1), rows x columns",
         "KCP (8,2,2), all", "TT, rank 4" + BY_STRUCTURE, "TT, rows x columns")  # fmt: skip
RATES = (1e-3, 4e-3, 1.6e-2)
LOWER, HIGHER = 2.5e-4, 6.4e-2  # rates beside those of the search, for the study of rates
NARROW = 32  # the second hidden size there, and its modes
NARROW_MODES = {"n=4x4x8": "n=4x4x2", "n=8x16": "n=8x4", "n=128": "n=32"}
BASE: dict[str, Any] = {
    "dataset": "avletters", "width": 40, "height": 30, "channels": 1, "frames": 0, "hidden": 128, "epochs": 30,
    "batch_size": 16, "normalise": "clip", "readout": "mean", "input_gain": 0.57, "dropout": 0.3, "weight_decay": 0.01,
    "clip_norm": 1.0, "schedule": "cosine", "workers": 0, "checkpoint_seconds": 3600.0,
}  # fmt: skip
VARIANTS: tuple[dict[str, Any], ...] = ({"dropout": 0.6, "weight_decay": 0.1}, {"input_gain": 1.7})
AGAIN = ((1, 1), (0, 0), (0, 1))  # fold of the inner split, seed
TALKER_FOLDS = 5
KEPT = ("params_w", "params_model", "ratio_w", "format")  # of a run's result
Piece = Callable[[], object]


@dataclass(frozen=True)
class Study:
    """What is run, on which stores, and until when."""

    out: Path
    inners: Mapping[int, Store]  # by the repetition that is tested: the two others
    whole: Store
    deadline: float
    formats: Mapping[str, Mapping[str, Any]]
    base: Mapping[str, Any]
    rates: Sequence[float]
    seeds: int
    records: Records
    test: int = TEST  # the repetition that is tested

    @property
    def inner(self) -> Store:
        """What the search and every choice may see."""
        return self.inners[self.test]

    def place(self, text: str) -> str:
        """The name of a run: that of the usual protocol, or with the repetition that is tested."""
        return text if self.test == TEST else f"tested{self.test}-{text}"

    def in_time(self) -> bool:
        return time.monotonic() < self.deadline


def slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")


def experiment_of(study: Study, place: str, settings: Mapping[str, Any], split: str) -> Experiment:
    """The experiment of a run; `split` is inner, repetition or talker."""
    folds = {"inner": 2, "repetition": 3, "talker": TALKER_FOLDS}[split]
    method = "talker" if split == "talker" else "repetition"
    given = {"fold_method": method, "folds": folds, "fold_seed": 0, "name": place, "eval_every": study.base["epochs"]}
    return make_experiment({**study.base, **given, **settings}, "letters")


def one_run(study: Study, place: str, settings: Mapping[str, Any], split: str, fold: int, seed: int) -> Record:
    """A finished run with the answer for every clip of its fold; trained now if it is not there."""
    key = f"{place}-fold{fold}-seed{seed}"
    known = study.records.get(key, settings)
    if known is not None:
        return known
    store = study.inner if split == "inner" else study.whole
    e = experiment_of(study, place, settings, split)
    try:
        result = run(e, store, study.out, fold, seed, show=False)
    except Diverged as error:
        record: Record = {"accuracy": 0.0, "diverged": str(error)[:200]}
    else:
        record = {"accuracy": result["top1_last"], **{name: result[name] for name in KEPT}}
        held_out = [i for i, f in enumerate(fold_of_each_clip(e, store)) if f == fold]
        answers = evaluate_clips(load(run_folder(study.out, e, fold, seed)), store, held_out).answers
        right = ["1" if one.answer == one.label else "0" for one in sorted(answers, key=lambda a: a.name)]
        record |= {"clips": len(answers), "right": "".join(right)}
    record |= {"settings": dict(settings), "fold": fold, "seed": seed}
    print(f"{place} fold {fold} seed {seed}: {record['accuracy']:.1%}", file=sys.stderr, flush=True)
    return study.records.put(key, record)


def trials(study: Study, train: Callable[[dict[str, Any], str], Record]) -> list[Record]:
    """The five trials of one network: rates, then the variants at the best rate."""
    found = [train({"learning_rate": rate}, f"rate{rate:g}") for rate in study.rates]
    best = max(found, key=lambda trial: trial["accuracy"])["settings"]["learning_rate"]
    for number, variant in enumerate(VARIANTS):
        found.append(train({"learning_rate": best, **variant}, f"variant{number}"))
    return found


def best_of(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of the best trial on the inner split; of equals the first."""
    return dict(max(found, key=lambda trial: trial["accuracy"])["settings"])


def search(study: Study, name: str) -> list[Record]:
    """Trials of a format."""
    own = study.formats[name]
    return trials(
        study, lambda s, tag: one_run(study, study.place(f"inner-{slug(name)}-{tag}"), {**own, **s}, "inner", 1, 0)
    )


def again(study: Study, name: str) -> list[Record]:
    """The best trial's settings on the training repetitions, where they were not chosen."""
    best = best_of(search(study, name))
    return [one_run(study, study.place(f"again-{slug(name)}"), best, "inner", fold, seed) for fold, seed in AGAIN]


def tested(study: Study, name: str, seed: int) -> Record:
    place = study.place(f"test-{slug(name)}")
    return one_run(study, place, best_of(search(study, name)), "repetition", study.test - 1, seed)


def talkers(study: Study, name: str, fold: int) -> Record:
    return one_run(study, f"talker-{slug(name)}", best_of(search(study, name)), "talker", fold, 0)


# The work, in the order of its importance, each piece of it resumable ---------------------------------------------


def tests(study: Study) -> Iterator[Piece]:
    """Trials and tests: first of the networks that decide."""
    first = [name for name in FIRST if name in study.formats]
    for names in (first, [name for name in study.formats if name not in first]):
        yield from (lambda name=name: search(study, name) for name in names)
        yield from (lambda name=name: again(study, name) for name in names)
        for seed in range(study.seeds):
            yield from (lambda name=name, seed=seed: tested(study, name, seed) for name in names)


def unseen(study: Study) -> Iterator[Piece]:
    """Talkers that were never seen, for the networks that decide."""
    for name in (name for name in FIRST if name in study.formats):
        yield from (lambda name=name, fold=fold: talkers(study, name, fold) for fold in range(TALKER_FOLDS))


def besides(study: Study) -> Iterator[Piece]:
    yield from baselines.rounds(study, trials, best_of)


def sweep_settings(study: Study) -> Iterator[tuple[str, str, int, float, dict[str, Any], str]]:
    """(format, rates, hidden, rate, settings, place) of the study of rates; trials of the search are not run twice."""
    wide = int(study.base["hidden"])
    for name in SWEEP:
        own = study.formats.get(name)
        if own is None:
            continue
        for hidden in (wide, NARROW):
            text = str(own["format"])
            if hidden == NARROW:
                for before, after in NARROW_MODES.items():
                    text = text.replace(before, after)
            for kind in ("uniform", "structure"):
                for rate in (LOWER, *study.rates, HIGHER):
                    settings = {**own, "format": text, "hidden": hidden, "rates": kind, "learning_rate": rate}
                    place = f"sweep-{slug(name)}-{kind}-{hidden}-{rate:g}"
                    full = name if kind == "uniform" else name + BY_STRUCTURE
                    if hidden == wide and rate in study.rates and full in study.formats:
                        place = f"inner-{slug(full)}-rate{rate:g}"
                        settings = {**study.formats[full], "learning_rate": rate}
                    yield name, kind, hidden, rate, settings, place


def sweep(study: Study) -> Iterator[Piece]:
    for *_, settings, place in sweep_settings(study):
        yield lambda settings=settings, place=place: one_run(study, place, settings, "inner", 1, 0)


def kcp(study: Study) -> Iterator[Piece]:
    for settings, place, seed in letters_kcp.runs(study):
        yield lambda settings=settings, place=place, seed=seed: one_run(study, place, settings, "inner", 1, seed)
    yield lambda: letters_kcp.learnt(study)


def rotation(repetition: int, study: Study) -> Iterator[Piece]:
    yield from letters_rotation.rounds(replace(study, test=repetition), search, again, tested)


def times(study: Study) -> Iterator[Piece]:
    yield lambda: letters_times.measured(study, lambda own: experiment_of(study, "times", own, "inner"))


PARTS: dict[str, Callable[[Study], Iterator[Piece]]] = {
    "tests": tests, "rates": sweep, "talkers": unseen, "besides": besides, "kcp": kcp,
    **{f"rotation{repetition}": partial(rotation, repetition) for repetition in REPETITIONS},
    "times": times,
}  # fmt: skip


# Results --------------------------------------------------------------------------------------------------------


def whole_again(study: Study, name: str) -> list[Record]:
    """What `again` has made, if that is whole."""
    found = study.records.of(study.place(f"again-{slug(name)}"))
    return found if len(found) == len(AGAIN) else []


def known_tests(study: Study, name: str) -> list[Record]:
    """By seed."""
    return study.records.of(study.place(f"test-{slug(name)}"))


def collect(study: Study) -> dict[str, Any]:
    """Everything that is whole."""
    rows = []
    for name in study.formats:
        tried = [r for key, r in study.records.known.items() if key.startswith(f"inner-{slug(name)}-rate")]
        tried += [r for key, r in study.records.known.items() if key.startswith(f"inner-{slug(name)}-variant")]
        if len(tried) < len(study.rates) + len(VARIANTS):
            continue
        others = study.records.of(f"talker-{slug(name)}")
        others = others if len(others) == TALKER_FOLDS else []
        row = {"name": name, "trials": search(study, name), "again": whole_again(study, name)}
        rows.append(row | {"test": known_tests(study, name)[: study.seeds], "talkers": others})
    points = []
    for name, kind, hidden, rate, settings, place in sweep_settings(study):
        record = study.records.get(f"{place}-fold1-seed0", settings)
        if record is not None:
            point = {"name": name, "rates": kind, "hidden": hidden, "rate": rate}
            points.append(point | {"accuracy": record["accuracy"]})
    e = experiment_of(study, "talkers", {}, "talker")
    people = talkers_of(study.whole, fold_of_each_clip(e, study.whole))
    found = {"rows": rows, "baselines": baselines.collect(study), "sweep": points, "people": people}
    turns = {repetition: replace(study, test=repetition) for repetition in REPETITIONS}
    return found | {
        "kcp": letters_kcp.collect(study),
        "rotation": letters_rotation.collect(turns, whole_again, known_tests),
        "times": study.records.known.get(letters_times.KEY),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of AVLetters, letter/Talker_repetition")
    parser.add_argument("--out", type=Path, default=Path("runs/letters"), help="runs; the same again to go on")
    parser.add_argument("--minutes", type=float, default=60.0, help="no run is begun after this time")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parts", nargs="*", choices=[*PARTS], default=[*PARTS], help="what is run; none: no training")
    parser.add_argument("--quick", action="store_true", help="noise instead of letters, two formats: a test, no result")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    deadline = time.monotonic() + 60 * arguments.minutes
    base = BASE | ({"epochs": 1} if arguments.quick else {})
    known = in_results(arguments.results / "letters.json", base, arguments.quick)
    records = Records(arguments.out / "records", known)
    if arguments.quick:
        formats = {name: FORMATS[name] for name in (DENSE, "KCP (4,4,2), all")}
        inners, whole = quick_data(arguments.out)
        study = Study(arguments.out, inners, whole, float("inf"), formats, base, RATES[:1], 1, records)
    elif arguments.data is None:
        parser.error("--data is needed: the folder of AVLetters")
    else:
        inners, whole = stores(arguments.data, arguments.out, BASE["width"], BASE["height"])
        study = Study(arguments.out, inners, whole, deadline, FORMATS, base, RATES, arguments.seeds, records)
    for piece in (piece for part in arguments.parts for piece in PARTS[part](study)):
        if not study.in_time():
            print("time is up; the same command goes on", file=sys.stderr)
            break
        piece()
    arguments.results.mkdir(parents=True, exist_ok=True)
    facts = {"environment": environment(), "base": base, "clips": len(study.whole), **collect(study)}
    write_results(arguments.results, facts, arguments.quick, Records(records.folder, records.known).known)


if __name__ == "__main__":
    main()
