"""What the commands that use a trained model share: how it is named, opened, and what is said about it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kronecell.errors import KronecellError

Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A run directory (runs/NAME/fold0-seed0) or a saved model's folder.")
]
AsJson = Annotated[bool, typer.Option("--json", "-j", help="One JSON document on stdout, nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on stderr.")]
Threads = Annotated[int, typer.Option("--threads", min=0, help="Threads of torch; 0 leaves its own choice.")]


def open_classifier(path: Path, data: Path | None = None, quiet: bool = False) -> Any:
    """The classifier in a run directory or a folder of `kc.save`, in eval mode."""
    from kronecell.training.classifier import VideoClassifier
    from kronecell.training.records import read_status
    from kronecell.training.saved import find_run, load, load_run

    if not path.exists():
        raise KronecellError(f"no model at {path}: give a run directory, such as runs/NAME/fold0-seed0")
    if (path / "manifest.json").is_file():
        raise KronecellError(f"{path} is a store of clips, not a model; give a run directory")
    run = find_run(path) if path.is_dir() else None
    if run is not None:
        is_store = data is not None and (data / "manifest.json").is_file()
        model = load_run(run, data if is_store else None)
        status = {} if quiet else read_status(run)
        if status.get("state", "finished") != "finished":
            how_far = f"after {status.get('epoch', 0):,} of {status.get('epochs', 0):,} epochs"
            say(f"{run}: its training is {status['state']} {how_far}; these are the weights of the best epoch so far")
    else:
        model = load(path).eval()
    if not isinstance(model, VideoClassifier):
        raise KronecellError(f"{path} holds a {type(model).__name__}, not a classifier of videos")
    if not model.named and not quiet:
        say(f"{path} has no names of classes (release 0.1 did not save them); --data STORE supplies them")
    return model


def open_module(path: Path, data: Path | None = None, quiet: bool = False) -> Any:
    """The classifier of a run, or whatever module a folder of `kc.save` holds, in eval mode."""
    from kronecell.training.saved import find_run, load

    if not path.is_dir() or find_run(path) is not None or (path / "manifest.json").is_file():
        return open_classifier(path, data, quiet)
    return load(path).eval()


def say(text: str) -> None:
    """A note on stderr."""
    print(f"kronecell: {text}", file=sys.stderr, flush=True)
