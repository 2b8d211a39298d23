"""`kronecell compress`: a file of weights made smaller. `kronecell inspect`: what a file holds, what could be saved."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kronecell.cli.tables import text_table
from kronecell.errors import DataError, KronecellError

SILENT = 2.0  # seconds before the first line and between lines
REPORT = "compression.json"

Source = Annotated[
    Path, typer.Argument(help="A run, a saved model's folder, a safetensors file, or a .pt with --allow-pickle.")
]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Read a .pt (weights only, in a separate process).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def compress(
    source: Source,
    out: Annotated[Path, typer.Argument(help="Folder for the compressed model and its report.")],
    rule: Annotated[
        list[str] | None,
        typer.Option(help="NAME=RECIPE, e.g. rnn=kcp:K=4,CA=4,CB=2 or 'rnn.weight_hh_l*=lowrank:r=8'; repeatable."),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Parameters of the matched matrices, or their part if below 1.")
    ] = None,
    error: Annotated[float | None, typer.Option(help="Relative error no matched matrix may exceed.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help=".npy with inputs (..., width) of the layers of that input width.")
    ] = None,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Compress the LSTM, GRU and Linear weights of a trained model and report what was lost.

    A trained run becomes a smaller classifier: `kronecell predict` and `evaluate` take the folder. What is compressed
    already is left alone unless a rule names it.

    Example: kronecell compress model.safetensors small --rule rnn=kcp:K=4,CA=4,CB=2
    """
    from kronecell.compress.model import compress as compress_model
    from kronecell.compress.statefile import read_model
    from kronecell.deploy.atomic import write_atomically
    from kronecell.deploy.modules import save

    model = read_model(source, allow_pickle)
    rules = dict(_rule(text) for text in rule) if rule else None
    amount = None if budget is None else int(budget) if budget >= 1 else budget
    inputs = None if calibration is None else _calibration(calibration, model, rules)
    small, report = compress_model(
        model, rules, budget=amount, error=error, calibration=inputs, seed=seed, progress=_Progress()
    )
    save(small, out)
    text = report.to_json() + "\n"
    write_atomically(out / REPORT, lambda temporary: temporary.write_text(text))
    typer.echo(text.rstrip() if as_json else f"{report}\nwritten to {out}")


def inspect(
    source: Source,
    ratio: Annotated[float, typer.Option(help="Compression ratio for which the formats are sized.")] = 10.0,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:
    """List the layers of a file, their sizes, and what each format would give (sizes only; nothing is fitted).

    Example: kronecell inspect model.safetensors --ratio 20
    """
    from kronecell.compress.matrices import dense_modules, matrices_of
    from kronecell.compress.statefile import read_model

    if ratio <= 1:
        raise KronecellError(f"--ratio must be above 1, got {ratio}")
    model, _ = dense_modules(read_model(source, allow_pickle), None)
    matrices = matrices_of(model)
    records, stored = [_record(matrix, ratio) for matrix in matrices], _stored(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    if as_json:
        typer.echo(json.dumps({"params": total, "matrices": records, "compressed": stored}, indent=1))
        return
    if not records and not stored:
        typer.echo(f"{source}: {total:,} parameters, no LSTM, GRU or Linear inside")
        return
    rows = []
    for entry in stored:
        size = "x".join(map(str, entry["shape"]))
        ratio_now = f"{entry['dense_params'] / entry['params']:,.1f}"
        rows.append((entry["name"], "compressed", size, f"{entry['params']:,}", ratio_now, entry["format"]))
    for entry in records:
        size = "x".join(map(str, entry["shape"]))
        rows.append((entry["name"], entry["kind"], size, f"{entry['params']:,}", "", ""))
        rows += [("", "", "", f"{o['params']:,}", f"{o['ratio']:,.1f}", o["format"]) for o in entry["options"]]
    typer.echo(
        text_table(("matrix", "layer", "dirs x gates x M x N", "parameters", "ratio", "format"), rows, (0, 1, 5))
    )
    known = sum(m.params for m in matrices) + sum(entry["params"] for entry in stored)
    typer.echo(f"{total:,} parameters in all, {known:,} of them in these matrices")


def _stored(model: Any) -> list[dict[str, Any]]:
    """The matrices that are compressed already."""
    from kronecell.nn.linear import TensorLinear

    found = []
    for name, layer in model.named_modules():
        if isinstance(layer, TensorLinear):
            params = sum(p.numel() for key, p in layer.named_parameters() if key != "bias")
            fmt = layer.format
            shape = [1, layer.gates, fmt.M, fmt.N]
            found.append({"name": name or "weight", "shape": shape, "params": params, "format": str(fmt),
                          "dense_params": layer.gates * fmt.M * fmt.N})  # fmt: skip
    return found


def _record(matrix: Any, ratio: float) -> dict[str, Any]:
    """A matrix and every kind of format at about this ratio."""
    from kronecell.compress.suggest import KINDS, largest_within, mode_choices

    limit = int(matrix.M * matrix.N / ratio)
    options = []
    for kind in KINDS:
        choices = (
            largest_within(kind, m, n, lambda f: f.num_params <= limit)
            for m, n in mode_choices(kind, matrix.M, matrix.N)
        )
        best = max((fmt for fmt in choices if fmt is not None), key=lambda fmt: fmt.num_params, default=None)
        if best is not None:
            params = matrix.copies * best.network(matrix.gates).num_params
            options.append({"format": str(best), "params": params, "ratio": matrix.params / params})
    return {
        "name": matrix.name,
        "kind": type(matrix.owner).__name__,
        "shape": [matrix.copies, matrix.gates, matrix.M, matrix.N],
        "params": matrix.params,
        "options": options,
    }


def _rule(text: str) -> tuple[str, str]:
    name, separator, recipe = text.partition("=")
    if not separator or not name.strip() or not recipe.strip():
        raise KronecellError(f"cannot read rule {text!r}; expected NAME=RECIPE, such as rnn=kcp:K=4,CA=4,CB=2")
    return name.strip(), recipe.strip()


def _calibration(path: Path, model: Any, rules: dict[str, str] | None) -> dict[str, Any]:
    """The array as inputs of every matched module whose input has its width."""
    import numpy as np
    import torch

    from kronecell.compress.matrices import matrices_of

    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read calibration data {path}: {error}") from None
    if array.dtype.kind not in "fiu" or array.ndim < 2:
        raise DataError(f"{path}: expected numbers of shape (rows, width) or (batch, time, width), got {array.shape}")
    tensor = torch.from_numpy(np.ascontiguousarray(array)).float()
    found = {}
    for matrix in matrices_of(model):
        first = matrix.part in ("weight", "weight_ih") and matrix.layer == 0
        matched = rules is None or any(
            other.matched_by(p) for p in rules for other in matrices_of(model) if other.module == matrix.module
        )
        if first and matched and tensor.shape[-1] == matrix.M:
            found[matrix.module] = tensor
    if not found:
        widths = sorted({matrix.M for matrix in matrices_of(model) if matrix.layer == 0 and matrix.part != "weight_hh"})
        raise DataError(f"{path} has width {tensor.shape[-1]}; the matched layers take {', '.join(map(str, widths))}")
    return found


class _Progress:
    """Plain lines on stderr every few seconds; none while the work is quick."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self.last >= SILENT:
            print(text, file=sys.stderr, flush=True)
            self.last = now
