"""`kronecell predict`: the classes of clips, by a trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kronecell.cli.models import AsJson, Model, Quiet, Threads, open_classifier, say
from kronecell.cli.tables import text_table
from kronecell.errors import DataError


def predict(
    model: Model,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILES...", help="Videos, folders of pictures, .npy files, or folders of these."),
    ],
    top: Annotated[int, typer.Option("--top", "-k", min=1, help="How many classes to show for each clip.")] = 3,
    data: Annotated[Path | None, typer.Option("--data", "-d", help="Store with the classes of an old run.")] = None,
    threads: Threads = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Say what is to be seen in clips: the most probable classes with their probabilities.

    A clip that cannot be read is named on stderr, the others are answered, and the exit code is 1.

    Example: kronecell predict runs/mine/fold0-seed0 clip.mp4 other.mp4
    """
    import torch

    from kronecell.data.datasets import clips_in

    if threads:
        torch.set_num_threads(threads)
    classifier = open_classifier(model, data, quiet)
    clips = [clip for path in files for clip in clips_in(path)]
    answers, bad = [], []
    for clip in clips:
        try:
            answers.append(classifier.predict(clip))
        except DataError as error:
            bad.append({"file": str(clip), "error": str(error)})
            typer.echo(f"kronecell: {error}", err=True)
            continue
        if answers[-1].damage and not quiet:
            say(f"{answers[-1].name}: only its first {answers[-1].frames} frames: {answers[-1].damage}")
    if as_json:
        typer.echo(
            json.dumps({"predictions": [answer.as_dict(top) for answer in answers], "unreadable": bad}, indent=1)
        )
    elif answers:
        shown = min(top, len(classifier.class_names))
        header = ("clip", "class", "probability", *(("then",) if shown > 1 else ()))
        rows = []
        for answer in answers:
            (label, chance), *rest = answer.top(shown)
            others = ", ".join(f"{name} {p:.1%}" for name, p in rest)
            rows.append((answer.name, label, f"{chance:.1%}", *((others,) if shown > 1 else ())))
        typer.echo(text_table(header, rows, text=(0, 1, 3)))
    if bad:
        raise typer.Exit(1)
