"""`kronecell demo`: make the embedded video set, train the dense LSTM and the compressed ones, compare."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kronecell.cli.tables import text_table

# The same for every model: at most this many epochs and this many seconds of training steps. The compressed ones run
# out of epochs first, the dense one out of time.
EPOCHS = 34
SECONDS = 35.0
SIZE = (80, 60)  # a quarter of the paper's pixels, so that six networks can be trained in minutes
CLIPS = 40  # of each motion
MODES = "m=8x10x10x18,n=4x4x4x4"  # the paper's modes for UCF11, with 20 x 20 halved to 10 x 10; its ranks
LABELS = ("KCP(4,4,2)", "TR", "TT", "HT", "BT", "dense")
FORMATS = {
    "KCP(4,4,2)": f"kcp:{MODES},K=4,CA=4,CB=2",
    "TR": "tr:m=4x5x8x6x5x3,n=4x4x2x4x2,r=10x5x5x5x5x5x10x5x5x5x5",
    "TT": f"tt:{MODES},r=4",
    "HT": f"ht:{MODES},r=4",
    "BT": f"bt:{MODES},r=4,P=2",
    "dense": "dense",
}
QUICK_SIZE = (32, 24)
QUICK_MODES = "m=6x8x6x8,n=2x2x2x2"
QUICK = {
    "KCP(4,4,2)": f"kcp:{QUICK_MODES},K=4,CA=4,CB=2",
    "TR": f"tr:{QUICK_MODES},r=4",
    "TT": f"tt:{QUICK_MODES},r=4",
    "HT": f"ht:{QUICK_MODES},r=4",
    "BT": f"bt:{QUICK_MODES},r=2,P=2",
    "dense": "dense",
}
HEADER = (
    "LSTM", "accuracy (95%)", "parameters of W", "ratio of W", "ratio of model", "multiply-adds a clip",
    "paper's order", "step", "latency, batch 1", "epochs", "training",
)  # fmt: skip


def demo(
    out: Annotated[Path, typer.Option(help="Where data, runs and the page go.")] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Tiny frames and two epochs: a test, not a result.")] = False,
    seconds: Annotated[float, typer.Option(min=1, help="Most seconds of training steps of each model.")] = SECONDS,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and batches.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The results as one JSON document on stdout.")] = False,
) -> None:
    """Eleven motions on video: the dense LSTM and five compressed ones, trained side by side in a few minutes.

    Example: kronecell demo
    """
    from kronecell.data import find_dataset, prepare, write_synthetic
    from kronecell.report import write_report
    from kronecell.training.run import run, run_folder

    started = time.monotonic()
    width, height = QUICK_SIZE if quick else SIZE
    amount = {"clips_per_class": 4, "groups": 2, "frames": 12} if quick else {"clips_per_class": CLIPS}
    out.mkdir(parents=True, exist_ok=True)  # a place that cannot be written is said before anything else
    _say("1. Making the data: 11 motions as real video files, no single frame of which tells the class")
    name = "motions-quick" if quick else "motions"
    videos = write_synthetic(out / name, size=(width, height), **amount)  # type: ignore[arg-type]
    store = prepare(find_dataset(videos), out / f"{name}-store", width, height)
    experiments = {label: _experiment(label, quick, seconds) for label in LABELS}
    folds = experiments["dense"].folds
    _say(
        f"2. Training {len(LABELS)} LSTMs on {len(store)} clips, one of {folds} folds held out with all its groups; "
        f"each gets at most {experiments['dense'].epochs} epochs and {seconds:g} s of training steps"
    )
    results = {}
    for number, (label, experiment) in enumerate(experiments.items(), 1):
        result = run(experiment, store, out, fold=0, seed=seed)
        results[label] = result
        _say(
            f"   {number}/{len(LABELS)} {label}: {_accuracy(result)} after {_epochs(result, experiment.epochs)} "
            f"epochs, {result['seconds']:.0f} s; {time.monotonic() - started:.0f} s so far"
        )
    rows = [_row(label, results[label], experiments[label].epochs) for label in ("dense", *LABELS[:-1])]
    page = out / "report.html"
    notes = _notes(results, experiments["dense"], len(store.classes), quick)
    folders = [run_folder(out, experiments[label], 0, seed) for label in ("dense", *LABELS[:-1])]
    write_report(folders, page, "Kronecell demo: eleven motions on video", notes)
    if as_json:
        typer.echo(json.dumps({"results": results, "page": str(page)}))
        return
    typer.echo("\n" + text_table(HEADER, rows))
    typer.echo("\n" + "\n".join(notes))
    typer.echo(f"\nPage: {page}   Runs: {out}   All: {time.monotonic() - started:.0f} s")
    typer.echo(f"Next: kronecell evaluate {folders[1]} --confusion")
    typer.echo(f"      kronecell predict {folders[1]} {videos / 'up'}")


def _experiment(label: str, quick: bool, seconds: float) -> Any:
    from kronecell.training.run import make_experiment

    dense = label == "dense"
    settings: dict[str, Any] = {
        "name": label.split("(")[0].lower() + ("-quick" if quick else ""),
        "dataset": "motions",
        "paper": "Ori" if dense else label,
        "format": FORMATS[label],
        "width": SIZE[0],
        "height": SIZE[1],
        "shared": not dense,
        "folds": 5,
        "fold_method": "group",
        "epochs": EPOCHS,
        "max_seconds": float(seconds),
        "schedule": "cosine",
        "clip_norm": 1.0,
        # Adam moves every weight by about the learning rate; 57,600 of them add up where a few factors do not.
        "learning_rate": 1e-3 if dense else 5e-3 if label == "TR" else 1e-2,
        "pixel_mean": 0.3,
        "input_gain": 0.3 if dense else 3.0,  # dense was tried with both and gets the better one
        "eval_every": EPOCHS // 2,
        "checkpoint_seconds": 3600.0,
    }
    experiment = make_experiment(settings, "demo")
    if quick:
        width, height = QUICK_SIZE
        experiment = replace(
            experiment, format=QUICK[label], width=width, height=height, hidden=16, folds=2, epochs=2, eval_every=1
        )
    return experiment


def _accuracy(result: dict[str, Any]) -> str:
    low, high = result["interval"]
    return f"{result['top1_last']:.1%} ({100 * low:.0f} to {100 * high:.0f})"


def _epochs(result: dict[str, Any], planned: int) -> str:
    return f"{result['epochs']} of {planned}" if result["stopped"] else f"{result['epochs']}"


def _row(label: str, result: dict[str, Any], planned: int) -> tuple[str, ...]:
    return (
        label,
        _accuracy(result),
        f"{result['params_w']:,}",
        f"{result['ratio_w']:,.0f}x",
        f"{result['ratio_model']:,.1f}x",
        f"{result['macs_executed'] / 1e6:,.1f}M",
        f"{result['macs_paper'] / 1e6:,.1f}M",
        f"{result['step_ms']:.0f} ms",
        f"{result['latency_ms']:.1f} ms",
        _epochs(result, planned) + (", stopped" if result["stopped"] else ""),
        f"{result['seconds']:.0f} s",
    )


def _notes(results: dict[str, dict[str, Any]], budget: Any, classes: int, quick: bool) -> list[str]:
    from kronecell.training.protocol import counted

    dense = results["dense"]
    cut = [label for label, result in results.items() if result["stopped"]]
    ranks = "small" if quick else "the paper's"
    hollow = "Hollow points did not finish. " if cut else ""
    return [
        f"Accuracy at the last epoch on {dense['clips']['valid']} videos of groups the model never saw, mean over 10 "
        f"segments, with its 95% interval; chance is {1 / classes:.0%}. Networks whose intervals overlap widely have "
        f"not been told apart. {hollow}".strip(),
        f"Frames of {budget.width} x {budget.height}, {ranks} ranks, weights shared by the gates. The ratio of W is "
        "the kind of figure the paper gives; that of the model also counts what stays dense: U and the classifier.",
        f"Same budget for all: {budget.epochs} epochs or {budget.max_seconds:g} s of training steps, whichever ends "
        f"first. Stopped by the time: {', '.join(cut) or 'none'}; dense made "
        f"{counted(dense['steps'], 'step')} in {counted(dense['epochs'], 'epoch')}"
        + (" and had not converged (--seconds gives more)." if dense["stopped"] else "."),
        "Two epochs on tiny frames: this shows that everything works, and nothing else. Without --quick it learns."
        if quick
        else "One fold, one seed, rates and gains chosen on this very fold: a demonstration. benchmarks/results has "
        "measurements.",
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
