"""`kronecell data`: look at a data set, decode it once for training, unpack an archive, or write the embedded set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kronecell.errors import KronecellError

app = typer.Typer(help="Video data: verify, prepare, extract, synthetic.", no_args_is_help=True)

LAYOUT = typer.Option("auto", help="auto, ucf11, ucf50 (also UCF101), ycf, avletters or folder.")
MANIFEST = typer.Option(None, help="Where to write the manifest; default NAME-manifest.json here.")
WORKERS = typer.Option(None, min=1, help="Decoding processes; the default is one per core.")
TIME_LIMIT = typer.Option(120.0, min=0.1, help="Seconds one file may take.")
FOLDS = typer.Option(5, min=2, help="Folds for cross validation; training uses them.")
FOLD_SEED = typer.Option(0, min=0, help="Seed of the folds.")
FOLD_METHOD = typer.Option("group", help="group, random (as the paper seems to), talker, repetition.")
AS_JSON = typer.Option(False, "--json", help="One JSON document on stdout, nothing else.")


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """An expected error is one line on stderr and exit code 2, also when this app is run by itself."""
    try:
        yield
    except KronecellError as error:
        typer.echo(f"kronecell: error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="Folder of clips, or a CSV list.")],
    layout: str = LAYOUT,
    manifest: Path | None = MANIFEST,
    workers: int | None = WORKERS,
    time_limit: float = TIME_LIMIT,
    folds: int = FOLDS,
    fold_seed: int = FOLD_SEED,
    fold_method: str = FOLD_METHOD,
    as_json: bool = AS_JSON,
) -> None:
    """Decode every video of a data set, count, and name the bad files.

    Writes a manifest: path, class, group, frames, size and sha256 of every file, and the folds.

    Example: kronecell data verify UCF11_updated_mpg
    """
    from kronecell import data
    from kronecell.data.manifest import write_manifest

    with _one_line_errors():
        dataset = data.find_dataset(path, layout)
        limits = data.Limits(time=time_limit)
        result = data.verify(dataset, workers, True, limits, folds, fold_seed, fold_method)
        target = manifest or Path(f"{dataset.name}-manifest.json")
        write_manifest(target, result.manifest)
    summary = {**result.summary(), "skipped": [*dataset.skipped], "manifest": str(target)}
    typer.echo(json.dumps(summary) if as_json else _text(summary))


@app.command()
def prepare(
    path: Annotated[Path, typer.Argument(help="Folder of clips, or a CSV list.")],
    out: Annotated[Path, typer.Argument(help="Folder of the store; made or updated.")],
    layout: str = LAYOUT,
    width: int = typer.Option(160, min=1, help="Width of the stored frames."),
    height: int = typer.Option(120, min=1, help="Height of the stored frames."),
    max_frames: int = typer.Option(120, min=1, help="Most frames kept of a clip; validation frames always are."),
    grey: bool = typer.Option(False, "--grey", "-g", help="One channel instead of three: a third of the size."),
    workers: int | None = WORKERS,
    time_limit: float = TIME_LIMIT,
    folds: int = FOLDS,
    fold_seed: int = FOLD_SEED,
    fold_method: str = FOLD_METHOD,
    prune: bool = typer.Option(False, help="Delete stored clips that are no longer needed."),
    as_json: bool = AS_JSON,
) -> None:
    """Decode a data set once into a store to train from. Interrupt it at any time; run it again to continue.

    Example: kronecell data prepare UCF11_updated_mpg ucf11-store
    """
    from kronecell import data

    with _one_line_errors():
        dataset = data.find_dataset(path, layout)
        limits = data.Limits(time=time_limit)
        store = data.prepare(
            dataset, out, width, height, workers, True, max_frames, limits, folds, fold_seed, fold_method, prune,
            channels=1 if grey else 3,
        )  # fmt: skip
    bad = [{"path": file.name, "reason": file.reason} for file in store.bad]
    facts = {"store": str(out), "clips": len(store), "classes": len(store.classes), "hash": store.manifest_hash}
    if as_json:
        typer.echo(json.dumps({**facts, "bad": bad, "skipped": dataset.skipped}))
    else:
        colour = ", grey" if grey else ""
        typer.echo(f"{out}: {len(store)} clips of {len(store.classes)} classes, {width} x {height}{colour}")
        _list("bad, left out", bad)
        for text in dataset.skipped:
            typer.echo(f"left out: {text}")


@app.command()
def extract(
    archive: Annotated[Path, typer.Argument(help="A zip, tar or rar file.")],
    target: Annotated[Path, typer.Argument(help="A new folder.")],
    as_json: bool = AS_JSON,
) -> None:
    """Unpack a data set's archive; refused if it would write outside the folder or fill the disk.

    Example: kronecell data extract UCF11_updated_mpg.rar UCF11
    """
    from kronecell import data

    with _one_line_errors():
        folder = data.extract(archive, target)
    typer.echo(json.dumps({"folder": str(folder)}) if as_json else f"{folder}: unpacked")


@app.command()
def synthetic(
    path: Annotated[Path, typer.Argument(help="A new folder.")],
    clips_per_class: int = typer.Option(25, min=1, help="Videos of each of the 11 motions."),
    groups: int = typer.Option(5, min=1, help="Groups of each motion."),
    frames: int = typer.Option(60, min=1, help="Frames of a video."),
    width: int = typer.Option(160, min=16, help="Width of the videos."),
    height: int = typer.Option(120, min=16, help="Height of the videos."),
    seed: int = typer.Option(0, min=0, help="Seed of everything that varies."),
    container: str = typer.Option("avi", help="avi (MPEG-4) or mpg (MPEG-1)."),
    as_json: bool = AS_JSON,
) -> None:
    """Write the embedded data set: 11 motions as real videos in UCF11's layout.

    Example: kronecell data synthetic motions && kronecell data prepare motions motions-store
    """
    from kronecell import data

    with _one_line_errors():
        root = data.write_synthetic(path, clips_per_class, groups, (width, height), frames, seed, container)
    count = clips_per_class * len(data.MOTIONS)
    typer.echo(json.dumps({"root": str(root), "clips": count}) if as_json else f"{root}: {count} videos of 11 motions")


def _text(summary: dict[str, Any]) -> str:
    """The summary as a table for people."""
    frames = summary["frames"]
    width = max(5, *(len(label) for label in summary["classes"]))
    lines = [f"{summary['name']} ({summary['layout']}): {summary['root']}", ""]
    lines.append(f"{'class':<{width}}  {'clips':>6}  {'groups':>6}  {'frames':>8}  {'bad':>4}")
    for label, row in summary["classes"].items():
        lines.append(f"{label:<{width}}  {row['clips']:>6}  {row['groups']:>6}  {row['frames']:>8}  {row['bad']:>4}")
    everything = summary["clips"], summary["groups"], frames["total"], len(summary["bad"])
    lines.append("{:<{width}}  {:>6}  {:>6}  {:>8}  {:>4}".format("all", *everything, width=width))
    lines.append("")
    lines.append(f"frames of a clip: least {frames['least']}, median {frames['median']}, most {frames['most']}")
    lines.append("frame sizes: " + ", ".join(f"{size} ({count})" for size, count in summary["sizes"].items()))
    for title, files in (("damaged, used up to the damage", summary["damaged"]), ("bad", summary["bad"])):
        lines.append(f"{title}: {len(files) or 'none'}")
        lines += [f"  {_printable(file)}" for file in files]
    lines += [f"left out: {text}" for text in summary["skipped"]]
    lines.append(f"manifest: {summary['manifest']}")
    return "\n".join(lines)


def _list(title: str, files: list[dict[str, str]]) -> None:
    typer.echo(f"{title}: {len(files) or 'none'}")
    for file in files:
        typer.echo(f"  {_printable(file)}")


def _printable(file: dict[str, str]) -> str:
    from kronecell.errors import printable

    name = printable(file["path"])
    return file["reason"] if name in file["reason"] else f"{name}: {file['reason']}"
