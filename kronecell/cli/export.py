"""`kronecell export`: a trained model as a file for other programs, or as C."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kronecell.cli.models import AsJson, Model, Quiet, open_classifier, open_module, say
from kronecell.errors import KronecellError

TARGETS = ("onnx", "c")


def export(
    model: Model,
    place: Annotated[Path | None, typer.Argument(metavar="[OUT]", help="The file of ONNX, the folder of C.")] = None,
    to: Annotated[str, typer.Option("--to", "-t", help="onnx or c.")] = "onnx",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The same as OUT.  [default: the experiment's name, here]")
    ] = None,
    dense: Annotated[
        bool, typer.Option("--dense", help="ONNX: dense weights in LSTM or GRU nodes, a large file.")
    ] = False,
    name: Annotated[
        str, typer.Option("--name", "-n", help="C: the name of the files and of all functions.")
    ] = "network",
    prefer: Annotated[
        str, typer.Option("--prefer", "-p", help="C: what products are ordered for: size, speed or balance.")
    ] = "balance",
    flash: Annotated[
        str | None, typer.Option("--flash", help="C: most bytes of arrays and code, such as 256K.")
    ] = None,
    ram: Annotated[str | None, typer.Option("--ram", help="C: most bytes of state, beside input and output.")] = None,
    report: Annotated[bool, typer.Option("--report", "-r", help="C: say what it takes, and write nothing.")] = False,
    data: Annotated[Path | None, typer.Option("--data", "-d", help="Store with the classes of an old run.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write a trained model for ONNX Runtime, or as C for any processor, and compare its answers with the model's.

    ONNX. Input: bytes (segments, frames, pixels). Output: scores (segments, classes); the probabilities of a clip are
    the mean of the segments' softmax. FILE.json beside it holds the classes and the sizes of the frames.

    C. OUT/NAME.h and OUT/NAME.c, C99 without a library. MODEL may be any LSTM, GRU, cell or linear layer that kc.save
    wrote.

    Example: kronecell export runs/mine/fold0-seed0 --to onnx --out mine.onnx

    Example: kronecell export runs/mine/fold0-seed0 board --to c --flash 256K --ram 64K
    """
    if to not in TARGETS:
        raise KronecellError(f"--to must be one of {', '.join(TARGETS)}, got {to!r}")
    if place is not None and out is not None:
        raise KronecellError("OUT and --out name the same thing: give one of them")
    out = place or out
    if dense and to == "c":
        raise KronecellError("--dense belongs to --to onnx")
    if to == "c":
        _export_c(
            model, out, name, prefer, _bytes(flash, "--flash"), _bytes(ram, "--ram"), report, data, as_json, quiet
        )
        return
    if report or flash or ram or (name, prefer) != ("network", "balance"):
        raise KronecellError("--report, --flash, --ram, --name and --prefer belong to --to c")
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


def _export_c(
    model: Path,
    out: Path | None,
    name: str,
    prefer: str,
    flash: int | None,
    ram: int | None,
    report: bool,
    data: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    from kronecell.deploy.c_source.export import export_c, report_c

    module = open_module(model, data, quiet)
    if report:
        found = report_c(module, name, prefer=prefer, flash=flash, ram=ram)
        typer.echo(json.dumps(found.record(), indent=1) if as_json else str(found))
        return
    result = export_c(module, out or Path(name), name, prefer=prefer, flash=flash, ram=ram)
    if as_json:
        check = None if result.check is None else vars(result.check)
        files = {"source": str(result.source), "header": str(result.header)}
        typer.echo(json.dumps(files | {"check": check} | result.report.record(), indent=1))
        return
    typer.echo(str(result))
    p = getattr(module, "preprocessing", None)
    if p is not None and not quiet:
        say(f"frames: {p} bytes in C order; {p.segments} segments of {p.frames} frames are a clip")


def _bytes(text: str | None, option: str) -> int | None:
    """A number of bytes, such as 4096, 256K or 1M."""
    if text is None:
        return None
    units = {"": 1, "K": 2**10, "M": 2**20}
    found = re.fullmatch(r"([0-9]{1,12}) ?([KM]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise KronecellError(f"{option} must be a number of bytes such as 65536, 64K or 1M, got {text!r}")
    return int(found[1]) * units[found[2].upper()]


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
