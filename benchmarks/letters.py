"""Which format learns what: lip reading (AVLetters: 26 letters, 10 talkers, 3 repetitions) from raw pixels.

    python -m benchmarks.letters --data ../shared/data/avletters --out runs/letters --minutes 60

1. Every network gets the same five trials on the training repetitions alone (trained on 1, validated on 2): three
   rates, then more regularisation and a larger gain at the best of them. The best trial's settings are kept.
2. With these it is trained on repetitions 1 and 2 and tested on 3, with several seeds; and on other talkers (5 folds).
3. Rates by structure: the same rates again, `rates = "structure"`, at two hidden sizes, on the inner split.

Accuracies are those of the last epoch. Run the same command again to go on: what is finished is read, not repeated.
`--minutes` ends the work after that time between two runs; the table has what is whole and says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import letters_baselines as baselines
from benchmarks.letters_data import quick_data, stores
from benchmarks.letters_table import write_results
from benchmarks.results import RESULTS
from kronecell.data import Store
from kronecell.deploy.atomic import write_atomically
from kronecell.training.environment import environment
from kronecell.training.evaluation import evaluate_clips
from kronecell.training.loop import Diverged
from kronecell.training.run import make_experiment, run, run_folder
from kronecell.training.saved import load

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
}
OWN = {"KCP (16,4,2), all, own": f"kcp:{MODES},K=16,CA=4,CB=2,tie=all", "low rank 4, own": "lowrank:m=1200,n=128,r=4"}
DENSE = "dense"
FORMATS: dict[str, dict[str, Any]] = {
    DENSE: {"format": "dense"},
    **{name: {"format": text, "shared": True} for name, text in SHARED.items()},
    **{name: {"format": text} for name, text in OWN.items()},
}
LATER = ("KCP (16,4,2), all, own", "CP, rank 6", "Tucker, rank 4")  # begun when all else is done
FIRST = (DENSE, "KCP (4,4,2), all", "TT, rank 4", "low rank 4, own")  # on talkers that were never seen
RATES = (1e-3, 4e-3, 1.6e-2)
SWEEP = (DENSE, "KCP (4,4,2), all", "TT, rank 4")
LOWER, HIGHER = 2.5e-4, 6.4e-2  # rates beside those of the search, for the study of rates
NARROW = {"hidden": 32, "modes": ("n=4x4x8", "n=4x4x2"), "rows": ("n=128", "n=32")}
BASE: dict[str, Any] = {
    "dataset": "avletters", "width": 40, "height": 30, "channels": 1, "frames": 0, "hidden": 128, "epochs": 30,
    "batch_size": 16, "normalise": "clip", "readout": "mean", "input_gain": 0.57, "dropout": 0.3, "weight_decay": 0.01,
    "clip_norm": 1.0, "schedule": "cosine", "workers": 0, "checkpoint_seconds": 3600.0,
}  # fmt: skip
VARIANTS: tuple[dict[str, Any], ...] = ({"dropout": 0.6, "weight_decay": 0.1}, {"input_gain": 1.7})
TALKER_FOLDS = 5


@dataclass(frozen=True)
class Study:
    """What is run, on which stores, and until when."""

    out: Path
    inner: Store
    whole: Store
    deadline: float
    formats: Mapping[str, Mapping[str, Any]]
    base: Mapping[str, Any]
    rates: Sequence[float]
    seeds: int

    def in_time(self) -> bool:
        return time.monotonic() < self.deadline


def slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")


def one_run(study: Study, place: str, settings: Mapping[str, Any], split: str, fold: int, seed: int) -> dict[str, Any]:
    """A finished run with the answer for every clip of its fold; trained now if it is not there."""
    store = study.inner if split == "inner" else study.whole
    method = {"fold_method": "talker" if split == "talker" else "repetition"}
    method |= {"folds": TALKER_FOLDS if split == "talker" else 2 if split == "inner" else 3, "fold_seed": 0}  # type: ignore[dict-item]
    epochs = settings.get("epochs", study.base["epochs"])
    e = make_experiment({**study.base, **method, **settings, "name": place, "eval_every": epochs}, "letters")
    file = run_folder(study.out, e, fold, seed) / "answers.json"
    if file.is_file():
        return dict(json.loads(file.read_text()))
    try:
        result = run(e, store, study.out, fold, seed, show=False)
    except Diverged as error:
        record: dict[str, Any] = {"accuracy": 0.0, "diverged": str(error)[:200]}
    else:
        answers = evaluate_clips(load(file.parent), store, held_out_of(store, e, fold)).answers
        right = "".join(
            "1" if answer.answer == answer.label else "0" for answer in sorted(answers, key=lambda a: a.name)
        )
        names = (
            "params_w",
            "params_model",
            "ratio_w",
            "ratio_model",
            "step_ms",
            "latency_ms",
            "seconds",
            "macs_executed",
        )
        record = {"accuracy": result["top1_last"], "right": right, "clips": len(answers)}
        record |= {name: result[name] for name in names} | {"format": result["format"]}
    record |= {"settings": dict(settings), "fold": fold, "seed": seed}
    text = json.dumps(record) + "\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, lambda path: path.write_text(text))
    print(f"{place} fold {fold} seed {seed}: {record['accuracy']:.1%}", file=sys.stderr, flush=True)
    return record


def held_out_of(store: Store, experiment: Any, fold: int) -> list[int]:
    from kronecell.training.splits import fold_of_each_clip

    return [i for i, f in enumerate(fold_of_each_clip(experiment, store)) if f == fold]


def trials(study: Study, name: str, train: Callable[[dict[str, Any], str], dict[str, Any]]) -> list[dict[str, Any]]:
    """The five trials of one network: rates, then the variants at the best rate."""
    found = [train({"learning_rate": rate}, f"rate{rate:g}") for rate in study.rates]
    best = max(found, key=lambda trial: trial["accuracy"])["settings"]["learning_rate"]
    for number, variant in enumerate(VARIANTS):
        found.append(train({"learning_rate": best, **variant}, f"variant{number}"))
    return found


def best_of(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of the best trial on the inner split; of equals the first."""
    return dict(max(found, key=lambda trial: trial["accuracy"])["settings"])


def search(study: Study, name: str) -> list[dict[str, Any]]:
    """Trials of a format."""
    own = study.formats[name]
    return trials(study, name, lambda s, tag: one_run(study, f"inner-{slug(name)}-{tag}", {**own, **s}, "inner", 1, 0))


def rounds(study: Study) -> Iterator[Callable[[], object]]:
    """All work in the order of its importance, each piece of it resumable."""
    names = [name for name in study.formats if name not in LATER]
    later = [name for name in study.formats if name in LATER]
    for name in names:
        yield lambda name=name: search(study, name)
    yield from tests(study, names, 0)
    yield from baselines.rounds(study, trials, best_of, 0, (baselines.RIDGE,))
    yield from sweep_pieces(study, True)
    for name in SWEEP:
        if name in study.formats:
            yield lambda name=name: tested_by_structure(study, name, 0)
    yield from baselines.rounds(study, trials, best_of, 0, (baselines.CNN,))
    yield from tests(study, names, 1)
    yield from baselines.rounds(study, trials, best_of, 0)
    for name in FIRST:
        yield from talker_pieces(study, name)
    yield from sweep_pieces(study, False)
    for name in later:
        yield lambda name=name: search(study, name)
    yield from tests(study, later, 0)
    yield from tests(study, later, 1)
    for seed in range(1, study.seeds):
        yield from tests(study, [*study.formats], seed)
        yield from baselines.rounds(study, trials, best_of, seed)
    for name in study.formats:
        yield from talker_pieces(study, name)


def tests(study: Study, names: Sequence[str], seed: int) -> Iterator[Callable[[], object]]:
    if seed < study.seeds:
        yield from (lambda name=name: tested(study, name, seed) for name in names)


def talker_pieces(study: Study, name: str) -> Iterator[Callable[[], object]]:
    if name in study.formats:
        yield from (lambda fold=fold: talkers(study, name, fold) for fold in range(TALKER_FOLDS))


def tested(study: Study, name: str, seed: int) -> dict[str, Any]:
    return one_run(study, f"test-{slug(name)}", {**best_of(search(study, name)), "paper": ""}, "repetition", 2, seed)


def tested_by_structure(study: Study, name: str, seed: int) -> dict[str, Any]:
    """With rates by structure, at the best rate of the study of rates."""
    wide = int(study.base["hidden"])
    places = [piece for piece in sweep_settings(study) if piece[:3] == (name, "structure", wide)]
    found = [one_run(study, place, settings, "inner", 1, 0) for *_, settings, place in places]
    return one_run(study, f"structure-{slug(name)}", best_of(found), "repetition", 2, seed)


def talkers(study: Study, name: str, fold: int) -> dict[str, Any]:
    return one_run(study, f"talker-{slug(name)}", {**best_of(search(study, name)), "paper": ""}, "talker", fold, 0)


def sweep_settings(study: Study) -> Iterator[tuple[str, str, int, float, dict[str, Any], str]]:
    """(format, rates, hidden, rate, settings, place) of the study of rates."""
    for name in SWEEP:
        own = study.formats.get(name)
        if own is None:
            continue
        for hidden in (int(study.base["hidden"]), int(NARROW["hidden"])):  # type: ignore[call-overload]
            text = str(own["format"])
            if hidden != study.base["hidden"]:
                for wide, narrow in (NARROW["modes"], NARROW["rows"]):  # type: ignore[misc]
                    text = text.replace(wide, narrow)
            for kind in ("uniform", "structure"):
                for rate in (LOWER, *study.rates) if kind == "uniform" else (*study.rates, HIGHER):
                    settings = {**own, "format": text, "hidden": hidden, "rates": kind, "learning_rate": rate}
                    place = f"sweep-{slug(name)}-{kind}-{hidden}-{rate:g}"
                    if (
                        kind == "uniform" and hidden == study.base["hidden"] and rate != LOWER
                    ):  # a trial of the search: not run twice
                        settings, place = {**own, "learning_rate": rate}, f"inner-{slug(name)}-rate{rate:g}"
                    yield name, kind, hidden, rate, settings, place


def sweep_pieces(study: Study, wide: bool) -> Iterator[Callable[[], object]]:
    for _, _, hidden, _, settings, place in sweep_settings(study):
        if wide != (hidden == study.base["hidden"]):
            continue
        yield lambda settings=settings, place=place: one_run(study, place, settings, "inner", 1, 0)


# Results --------------------------------------------------------------------------------------------------------


def finished(study: Study, place: str) -> list[dict[str, Any]]:
    """The runs of a place that have their answers."""
    return [json.loads(path.read_text()) for path in sorted((study.out / place).glob("*/answers.json"))]


def collect(study: Study) -> dict[str, Any]:
    """Everything that is whole."""
    rows = []
    for name in study.formats:
        tried = [r for p in study.out.glob(f"inner-{slug(name)}-*") for r in finished(study, p.name)]
        if len(tried) < len(study.rates) + len(VARIANTS):
            continue
        found = search(study, name)  # all of it is there
        test = finished(study, f"test-{slug(name)}")
        others = finished(study, f"talker-{slug(name)}")
        rows.append(
            {"name": name, "trials": found, "test": test, "talkers": others if len(others) == TALKER_FOLDS else []}
        )
    sweep = []
    for name, kind, hidden, rate, _, place in sweep_settings(study):
        sweep += [
            {"name": name, "rates": kind, "hidden": hidden, "rate": rate, "accuracy": record["accuracy"]}
            for record in finished(study, place)
        ]
    structure = [{"name": name, "test": finished(study, f"structure-{slug(name)}")} for name in SWEEP]
    structure = [row for row in structure if row["test"]]
    return {"rows": rows, "baselines": baselines.collect(study), "sweep": sweep, "structure": structure}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of AVLetters, letter/Talker_repetition")
    parser.add_argument("--out", type=Path, default=Path("runs/letters"), help="runs; the same again to go on")
    parser.add_argument("--minutes", type=float, default=60.0, help="no run is begun after this time")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--summary", action="store_true", help="only write the results of what is finished")
    parser.add_argument("--quick", action="store_true", help="noise instead of letters, two formats: a test, no result")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    deadline = time.monotonic() + 60 * arguments.minutes
    if arguments.quick:
        study = quick_study(arguments.out)
    elif arguments.data is None:
        parser.error("--data is needed: the folder of AVLetters")
    else:
        inner, whole = stores(arguments.data, arguments.out, BASE["width"], BASE["height"])
        study = Study(arguments.out, inner, whole, deadline, FORMATS, BASE, RATES, arguments.seeds)
    if not arguments.summary:
        for piece in rounds(study):
            if not study.in_time():
                print("time is up; the same command goes on", file=sys.stderr)
                break
            piece()
    arguments.results.mkdir(parents=True, exist_ok=True)
    facts = {"environment": environment(), "base": dict(study.base), "clips": len(study.whole), **collect(study)}
    write_results(arguments.results, facts, arguments.quick)


def quick_study(out: Path) -> Study:
    """Everything once, on a few clips of noise."""
    inner, whole = quick_data(out)
    formats = {name: FORMATS[name] for name in (DENSE, "KCP (4,4,2), all")}
    base = BASE | {"epochs": 1}
    return Study(out, inner, whole, float("inf"), formats, base, RATES[:1], 1)


if __name__ == "__main__":
    main()
