"""`kronecell evaluate`: how good a trained model is on labelled clips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kronecell.cli.models import AsJson, Model, Quiet, Threads, open_classifier, say
from kronecell.cli.tables import text_table
from kronecell.errors import KronecellError

CLIPS = ("auto", "held-out", "all")


def evaluate(
    model: Model,
    data: Annotated[
        Path | None, typer.Option("--data", "-d", help="Labelled clips: a store, a folder or a CSV list.")
    ] = None,
    clips: Annotated[
        str, typer.Option(help="held-out: those the run did not train on. all: every clip. auto: held-out if known.")
    ] = "auto",
    confusion: Annotated[bool, typer.Option("--confusion", "-c", help="Print the confusion matrix.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", "-p", help="Write the confusion matrix as a picture (.png, .svg, .pdf).")
    ] = None,
    wrong: Annotated[bool, typer.Option("--wrong", "-w", help="List the clips that are answered wrongly.")] = False,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where a folder of videos is decoded to.")] = Path("runs"),
    threads: Threads = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Accuracy with its 95% interval, each class, and what is taken for what.

    On the store of the run, only the fold is taken that the run did not train on. Without --data that store is looked
    for beside the run.

    Example: kronecell evaluate runs/mine/fold0-seed0 --data my-store --confusion
    """
    import torch

    from kronecell.cli.figures import pyplot
    from kronecell.cli.train import find_store
    from kronecell.training.evaluation import evaluate_clips, held_out
    from kronecell.training.saved import find_store as find_own_store

    if clips not in CLIPS:
        raise KronecellError(f"--clips must be one of {', '.join(CLIPS)}, got {clips!r}")
    if plot is not None:
        pyplot(plot)  # says what is missing before the work, not after
    if threads:
        torch.set_num_threads(threads)
    classifier = open_classifier(model, data, quiet)
    p = classifier.preprocessing
    if p is None:
        raise KronecellError(f"{model} does not say how clips become frames; it was saved without preprocessing")
    if data is not None:
        store = find_store(data, out, p.width, p.height, None, not quiet, p.channels)
    else:
        store = find_own_store(classifier, model)
        if store is None:
            raise KronecellError(f"the store that {model} was trained on is not beside it; name the clips with --data")
    chosen = held_out(classifier, store) if clips != "all" else None
    if clips == "held-out" and chosen is None:
        raise KronecellError(f"{model} was not trained on {store.root}, so no fold of it is held out; --clips all")
    result = evaluate_clips(classifier, store, chosen)
    facts = {"model": str(model), "data": str(store.root), "held_out": chosen is not None, **result.as_dict()}
    picture = None if plot is None else _write_plot(plot, result)
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    typer.echo(_text(result, classifier, store, chosen is not None, clips))
    if confusion:
        typer.echo("\n" + confusion_text(result))
    if wrong:
        rows = [(a.name, a.label, a.answer, f"{a.probability:.1%}") for a in result.answers if a.label != a.answer]
        typer.echo("\n" + (text_table(("clip", "is", "answered", "probability"), rows, (0, 1, 2)) if rows else "none"))
    if picture is not None:
        typer.echo(f"wrote {picture}", err=True)
    for name, reason in result.unreadable.items():
        say(f"{name} was replaced by another clip: {reason}")


def _text(result: Any, classifier: Any, store: Any, is_held_out: bool, clips: str) -> str:
    low, high = result.interval
    fold = classifier.facts.get("fold")
    which = f"fold {fold}, which the run did not train on" if is_held_out else "all clips"
    lines = [
        f"accuracy {result.accuracy:.1%} (95% interval {low:.1%} to {high:.1%}) on {result.count} clips of "
        f"{result.groups} recordings: {store.root}, {which}"
    ]
    if is_held_out:
        lines.append("The weights are those of the epoch that was best on these very clips: a little flattering.")
    elif clips == "all" and classifier.facts.get("manifest_hash") == store.manifest_hash:
        lines.append("Most of these clips were trained on: this is not how the model does on new ones.")
    if result.groups < result.count:
        lines.append("Clips of one recording look alike, so the interval should be wider than it says.")
    rows = []
    for row in result.per_class():
        recall = "-" if row["recall"] is None else f"{row['recall']:.1%}"
        interval = "-" if row["interval"] is None else f"{row['interval'][0]:.0%} to {row['interval'][1]:.0%}"
        precision = "-" if row["precision"] is None else f"{row['precision']:.1%}"
        rows.append((row["class"], str(row["clips"]), str(row["correct"]), recall, interval, precision))
    header = ("class", "clips", "correct", "recall", "95% interval", "precision")
    return "\n".join([*lines, "", text_table(header, rows)])


def confusion_text(result: Any) -> str:
    """The confusion matrix as a table; columns are numbered, because names would not fit."""
    used = [i for i in range(len(result.classes)) if result.confusion[i].sum() or result.confusion[:, i].sum()]
    rows = []
    for i in used:
        cells = [str(result.confusion[i, j]) if result.confusion[i, j] else "." for j in used]
        rows.append((f"{i:>3} {result.classes[i]}", *cells))
    header = ("is \\ answered", *(str(j) for j in used))
    return text_table(header, rows)


def _write_plot(path: Path, result: Any) -> Path:
    """A map of the confusion matrix in fractions of each true class."""
    from kronecell.cli.figures import pyplot
    from kronecell.deploy.atomic import write_atomically

    plt = pyplot(path)
    counts = result.confusion
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    size = min(max(3.5, 0.42 * len(counts) + 1.5), 14)
    figure, axes = plt.subplots(figsize=(size + 0.8, size), layout="constrained")
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(counts)), result.classes, rotation=90)
    axes.set_yticks(range(len(counts)), result.classes)
    axes.set_xlabel("answered")
    axes.set_ylabel("is")
    low, high = result.interval
    axes.set_title(f"accuracy {result.accuracy:.1%} ({low:.1%} to {high:.1%}), {result.count} clips", fontsize=10)
    if len(counts) <= 30:
        for i, j in zip(*counts.nonzero(), strict=True):
            axes.text(j, i, int(counts[i, j]), ha="center", va="center", fontsize=8,
                      color="white" if shares[i, j] > 0.6 else "black")  # fmt: skip
    figure.colorbar(image, label="part of the clips of the class", shrink=0.8)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format=path.suffix[1:], dpi=150))
    plt.close(figure)
    return path
