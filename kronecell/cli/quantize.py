"""`kronecell quantize`: a trained model with integers as weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kronecell.cli.models import AsJson, Model, Quiet
from kronecell.errors import KronecellError


def quantize(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Folder for the quantized model.")],
    bits: Annotated[int, typer.Option("--bits", "-b", help="Bits of a weight, 3 to 8.")] = 8,
    group: Annotated[
        str, typer.Option("--group", "-g", help="row: a scale for each output; a number of columns; or auto.")
    ] = "auto",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Store the weights of a trained model as integers: a smaller file, nearly the same answers.

    What is a format already gets smaller factors. `kronecell predict`, `evaluate` and `export` take the folder.

    Example: kronecell quantize runs/mine/fold0-seed0 small --bits 8
    """
    import kronecell as kc

    if not model.is_dir():
        raise KronecellError(f"no model at {model}: give a run directory or the folder of a saved model")
    small: Any = kc.quantize(kc.load(model).eval(), bits=bits, group=_group(group))
    kc.save(small, out)
    size = sum(path.stat().st_size for path in out.iterdir())
    if as_json:
        report = [vars(row) for row in small.quantization.matrices]
        typer.echo(json.dumps({"out": str(out), "bytes": size, "matrices": report}, indent=1))
        return
    typer.echo(str(small.quantization))
    typer.echo(f"written to {out}, {size:,} bytes")


def _group(text: str) -> int | str | None:
    if text == "auto":
        return None
    return int(text) if text.isdigit() else text
