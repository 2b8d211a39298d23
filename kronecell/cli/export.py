"""`kronecell export`: a trained model as a file for other programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kronecell.cli.models import AsJson, Model, Quiet, open_classifier, say
from kronecell.errors import KronecellError

TARGETS = ("onnx",)


def export(
    model: Model,
    to: Annotated[str, typer.Option("--to", "-t", help="onnx.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file.  [default: the experiment's name, here]")
    ] = None,
    dense: Annotated[bool, typer.Option("--dense", help="Dense weights in LSTM or GRU nodes: a large file.")] = False,
    data: Annotated[Path | None, typer.Option("--data", "-d", help="Store with the classes of an old run.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write a trained model for ONNX Runtime, and compare the file's answers with the model's.

    Input: bytes (segments, frames, pixels). Output: scores (segments, classes); the probabilities of a clip are the
    mean of the segments' softmax. FILE.json beside it holds the classes and the sizes of the frames.

    Example: kronecell export runs/mine/fold0-seed0 --to onnx --out mine.onnx
    """
    if to not in TARGETS:
        raise KronecellError(f"--to must be one of {', '.join(TARGETS)}, got {to!r}")
    classifier = open_classifier(model, data, quiet)
    target = out or Path(f"{classifier.facts.get('experiment') or 'model'}.onnx")
    result, sidecar = write_onnx(classifier, target, dense)
    facts = {"file": str(result.path), "bytes": result.size, "description": str(sidecar)}
    facts |= {"largest_relative_difference": result.difference, "operators": result.operators}
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    typer.echo(f"wrote {result.path} ({result.size:,} bytes) and {sidecar}")
    typer.echo(f"checked in ONNX Runtime: largest relative difference {result.difference:.1e}")
    if not quiet and classifier.preprocessing is not None:
        p = classifier.preprocessing
        say(f"input: bytes (segments, {p.frames}, {p.input_size}), frames of {p} in C order")


def write_onnx(classifier: Any, target: Path, dense: bool = False) -> tuple[Any, Path]:
    """The file, and beside it a JSON file with what a caller needs to make its input and to read its output."""
    import contextlib
    import io
    import logging

    import torch

    from kronecell.deploy.atomic import write_atomically
    from kronecell.deploy.onnx import export_onnx

    p = classifier.preprocessing
    frames, segments = (p.frames, p.segments) if p is not None else (6, 10)
    if frames == 0:
        raise KronecellError(
            "this classifier reads whole clips of any length, and an ONNX file a fixed number of frames; train with "
            "frames=6 or another number to export it"
        )
    example = torch.zeros(segments, frames, classifier.rnn.input_size, dtype=torch.uint8)
    # torch's exporter logs a line for each operator of torchvision where that is not installed, and, when it fails, its
    # whole graph; the error that it raises says what a person can use.
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            result = export_onnx(classifier, target, example, densify=dense)
    finally:
        logging.disable(before)
    record = {
        "classes": classifier.class_names,
        "preprocessing": None if p is None else {**asdict(p), "type": "uint8", "order": "height, width, channel"},
        "answer": "mean over segments of softmax(scores)",
        **classifier.facts,
    }
    sidecar = target.with_name(target.name + ".json")
    text = json.dumps(record, indent=1) + "\n"
    write_atomically(sidecar, lambda temporary: temporary.write_text(text))
    return result, sidecar
