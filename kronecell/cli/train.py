"""`kronecell train`: one experiment on one fold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kronecell.cli.models import AsJson, Quiet, Threads, say
from kronecell.errors import KronecellError

Data = Annotated[
    Path,
    typer.Option("--data", "-d", help="A store made by `kronecell data prepare`, a folder of clips, or a CSV list."),
]
SET = typer.Option(
    None, "--set", "-s", help="A setting over those of the experiment file, as key=value; may be repeated."
)
OUT = typer.Option(Path("runs"), "--out", "-o", help="Where run directories are made.")


def _list(show: bool) -> None:
    if show:
        from kronecell.training.experiment import list_experiments

        typer.echo("\n".join(list_experiments()))
        raise typer.Exit


def train(
    experiment: Annotated[
        str, typer.Argument(help="A packaged experiment (see `kronecell experiments`), or the path of a TOML file.")
    ],
    data: Data,
    fold: Annotated[int, typer.Option("--fold", "-f", help="The fold to validate on, from 0.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, batches and dropout.")] = 0,
    epochs: Annotated[int | None, typer.Option("--epochs", "-e", help="Short for --set epochs=N.")] = None,
    overrides: list[str] | None = SET,
    out: Path = OUT,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Threads = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
    names: Annotated[bool, typer.Option("--list", callback=_list, is_eager=True, help="List the experiments.")] = False,
) -> None:
    """Train one experiment on one fold; run it again to continue what was interrupted.

    Several processes: torchrun --nproc-per-node 2 -m kronecell train ...

    Example: kronecell train ucf11-kcp442 --data ucf11-store --fold 0 --seed 0
    """
    import torch

    from kronecell.training.distributed import torchrun_world
    from kronecell.training.loop import Interrupted
    from kronecell.training.run import load_experiment, parse_overrides, run, run_folder

    settings = parse_overrides(overrides or [])
    if epochs is not None:
        settings["epochs"] = epochs
    chosen = load_experiment(experiment, settings)
    if threads:
        torch.set_num_threads(threads)
    with torchrun_world(device) as world:
        store = open_data(data, out, chosen, world, show=not quiet, fold=fold)
        try:
            result = run(chosen, store, out, fold, seed, world=world, show=not quiet)
        except Interrupted:
            if world.is_main:
                folder = run_folder(out, chosen, fold, seed)
                typer.echo(
                    f"kronecell: stopped by a signal, checkpoint saved in {folder}; run again to go on", err=True
                )
            raise typer.Exit(143) from None
        if world.is_main:
            typer.echo(json.dumps(result) if as_json else summary(result, run_folder(out, chosen, fold, seed)))


def open_data(data: Path, out: Path, chosen: Any, world: Any = None, show: bool = True, fold: int = 0) -> Any:
    """The store for an experiment; the number of classes and the fold are checked before anything is decoded."""
    from kronecell.training.splits import check_fold, settle_folds

    if not (data / "manifest.json").is_file():  # a store may have other folds
        check_fold(fold, settle_folds(chosen, None).folds)
    return find_store(data, out, chosen.width, chosen.height, world, show, chosen.channels, chosen.classes)


def find_store(
    data: Path,
    out: Path,
    width: int,
    height: int,
    world: Any = None,
    show: bool = True,
    channels: int = 3,
    classes: int = 0,
) -> Any:
    """The store at `data`, or one made of the clips there, kept below `out` for the next run."""
    from kronecell.data import find_dataset, open_store, prepare
    from kronecell.training.distributed import World

    world = world or World()
    if (data / "manifest.json").is_file():
        return open_store(data)
    if not data.exists():
        raise KronecellError(
            f"no data at {data}: give a store (kronecell data prepare), a folder of videos or a CSV list"
        )
    dataset = find_dataset(data)
    if classes not in (0, len(dataset.classes)):
        raise KronecellError(
            f"{data}: has {len(dataset.classes)} classes ({', '.join(dataset.classes[:8])}"
            f"{' ...' if len(dataset.classes) > 8 else ''}), the experiment expects {classes}; "
            f"--set classes=0 takes what the data has"
        )
    target = out / "stores" / f"{dataset.name}-{width}x{height}{'-grey' if channels == 1 else ''}"
    if world.is_main:
        if show:
            for text in dataset.skipped:
                say(f"left out: {text}")
        store = prepare(dataset, target, width, height, progress=show, channels=channels)
        if show and store.bad:
            shown = "; ".join(f"{file.name}: {file.reason}" for file in store.bad[:3])
            say(f"left out: {len(store.bad)} of {len(dataset.clips)} clips cannot be read, such as {shown}")
    world.wait()
    return open_store(target)


def accuracy_words(result: dict[str, Any]) -> str:
    """The accuracy of a finished run with its interval, and whether it was stopped before its last epoch."""
    last = result.get("top1_last", result["avg"])  # of 0.1: not in every result
    known = result.get("interval")
    words = f"accuracy {last:.1%} at the last epoch"
    words += f" (95% interval {known[0]:.1%} to {known[1]:.1%})" if known else ""
    reason = {"time": "its time budget", "patience": "its patience (early_stop)"}.get(result.get("stopped", ""))
    return words + (f", stopped in epoch {result['epochs']} by {reason}" if reason else "")


def summary(result: dict[str, Any], folder: Path) -> str:
    """A finished run for people."""
    from kronecell.training.paper_settings import SETTINGS
    from kronecell.training.protocol import counted

    def fewer(ratio: float) -> str:
        return "" if ratio == 1 else f" ({ratio:,.{0 if ratio >= 100 else 1}f}x fewer)"

    lines = [
        f"{result['experiment']}, fold {result['fold']}, seed {result['seed']}: {accuracy_words(result)}",
        f"best epoch {result['top1']:.1%}, chosen on these very clips; "
        f"mean of the last {counted(result['avg_over'], 'epoch')} {result['avg']:.1%}",
        f"W {result['params_w']:,} parameters{fewer(result['ratio_w'])}, whole model "
        f"{result['params_model']:,}{fewer(result['ratio_model'])}",
        f"multiply-adds per clip {result['macs_executed']:,} (paper's order {result['macs_paper']:,}), "
        f"step {result['step_ms']:.1f} ms, latency of one clip {result['latency_ms']:.1f} ms",
        f"run directory: {folder}   (try: kronecell evaluate {folder}, kronecell predict {folder} CLIP)",
    ]
    if result["dataset"] in SETTINGS:  # elsewhere there is nothing to compare with
        lines += ["differs from the paper's protocol:", *(f"  - {text}" for text in result["deviations"])]
    return "\n".join(lines)
