"""`kronecell compress`: a file of weights made smaller. `kronecell inspect`: what a file holds, what could be saved."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kronecell.cli.tables import text_table
from kronecell.errors import DataError, KronecellError

SILENT = 2.0  # seconds before the first line and between lines
REPORT = "compression.json"
TRAINING = "training"  # of OUT: checkpoints
CALIBRATION = 8  # batches of training clips

Source = Annotated[
    Path, typer.Argument(help="A run, a saved model's folder, a safetensors file, or a .pt with --allow-pickle.")
]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Read a .pt (weights only, in a separate process).")]
Embedding = Annotated[
    list[str] | None, typer.Option("--embedding", help="A matrix whose rows are looked up, by name; repeatable.")
]
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
    size: Annotated[
        float | None, typer.Option(help="Bytes of the whole model, or their part if below 1: formats and integers.")
    ] = None,
    bits: Annotated[
        str | None, typer.Option(help="3 to 8: integers for weights; with --size those to choose from, such as 8,4.")
    ] = None,
    error: Annotated[float | None, typer.Option(help="Relative error no matched matrix may exceed.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help=".npy with inputs (..., width) of the layers of that input width.")
    ] = None,
    train: Annotated[
        Path | None,
        typer.Option(help="Labelled clips (a store, a folder or a CSV list) to train a classifier on afterwards."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="With --train: steps of each stage.")] = 500,
    stages: Annotated[int, typer.Option(min=1, help="With --train: stages in which the size is reached.")] = 1,
    lr: Annotated[float, typer.Option(help="With --train: learning rate of dense weights.")] = 1e-3,
    embedding: Embedding = None,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Compress the LSTM, GRU and Linear weights of a trained model and report what was lost.

    A trained run becomes a smaller classifier: `kronecell predict` and `evaluate` take the folder. What is compressed
    already is left alone unless a rule names it. With --train, its run is the teacher, the fold that it held out is the
    validation, and the same command goes on after an interruption.

    Example: kronecell compress model.safetensors small --rule rnn=kcp:K=4,CA=4,CB=2

    Example: kronecell compress runs/mine/fold0-seed0 small --size 0.14 --train my-store --steps 500
    """
    from kronecell.compress.model import compress as compress_model
    from kronecell.compress.statefile import read_model
    from kronecell.deploy.atomic import write_atomically
    from kronecell.deploy.modules import save

    model = read_model(source, allow_pickle, embedding or ())
    rules = dict(_rule(text) for text in rule) if rule else None
    amount, allowed = (None if value is None else int(value) if value >= 1 else value for value in (budget, size))
    inputs = None if calibration is None else _calibration(calibration, model, rules)
    training: dict[str, Any] = {}
    if train is not None:
        given = {"steps": steps, "lr": lr, "folder": out / TRAINING}
        training = _training(model, source, train, seed) | {"stages": stages, "training": given}
        inputs = training.pop("calibration") if inputs is None else inputs
    small, report = compress_model(
        model,
        rules,
        budget=amount,
        size=allowed,
        bits=_bits(bits),
        error=error,
        calibration=inputs,
        seed=seed,
        progress=_Progress(),
        **training,
    )
    save(small, out)
    if train is not None:
        shutil.rmtree(out / TRAINING, ignore_errors=True)  # checkpoints; the folder is the model now
    text = report.to_json() + "\n"
    write_atomically(out / REPORT, lambda temporary: temporary.write_text(text))
    typer.echo(text.rstrip() if as_json else f"{report}\nwritten to {out}; kc.load({str(out)!r}, into=model) reads it")


def inspect(
    source: Source,
    ratio: Annotated[
        float | None, typer.Option(help="Also list the size of every format at this compression ratio.")
    ] = None,
    embedding: Embedding = None,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:
    """List the matrices of a file: their part of the bytes, their spectrum, and what 2x, 4x and 8x would cost.

    The cost is the relative error of the best low rank, with one In for all gates or one for each, and of integers with
    8, 6 and 4 bits, which need 4, 5 and 8 times fewer bytes. With calibration data, compress does better.

    Example: kronecell inspect model.safetensors
    """
    from kronecell.compress.matrices import matrices_of, skipped
    from kronecell.compress.statefile import read_model
    from kronecell.nn.quantize import bytes_of

    if ratio is not None and ratio <= 1:
        raise KronecellError(f"--ratio must be above 1, got {ratio}")
    model = read_model(source, allow_pickle, embedding or ())
    progress, size = _Progress(), bytes_of(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    records = []
    for matrix in matrices_of(model):
        progress(f"{matrix.name}: its spectrum")
        records.append(_inspected(matrix, size) | ({"options": _options(matrix, ratio)} if ratio else {}))
    left = skipped(model)
    if as_json:
        typer.echo(json.dumps({"params": total, "bytes": size, "matrices": records, "skipped": left}, indent=1))
        return
    if not records:
        typer.echo(f"{source}: {total:,} parameters, no LSTM, GRU, Linear or Embedding inside")
        return
    names = ("matrix", "layer", "dirs x gates x M x N", "parameters", "of bytes", "rank 90%", "rank 99%")
    head = (*names, *(f"{by}x" for by in RATIOS), *(f"{bits} bits" for bits in SHOWN_BITS))
    rows: list[tuple[str, ...]] = []
    for entry in records:
        shape = "x".join(map(str, entry["shape"]))
        cells = (entry["name"], entry["kind"], shape, f"{entry['params']:,}", f"{entry['part_of_bytes']:.1%}")
        ranks = (str(entry["rank_90"]), str(entry["rank_99"]))
        errors = (*entry["error_of_low_rank"].values(), *entry["error_of_bits"].values())
        rows.append((*cells, *ranks, *("" if error is None else f"{error:.3f}" for error in errors)))
        for option in entry.get("options", ()):
            sizes = (f"{option['params']:,}", f"{option['ratio']:,.1f}x")
            rows.append(("", "", option["format"], *sizes, *("",) * (len(head) - 5)))
    typer.echo(text_table(head, rows, (0, 1, 2)))
    known = sum(entry["bytes"] for entry in records)
    typer.echo(f"{total:,} parameters, {size:,} bytes, {known / max(size, 1):.1%} of them in these matrices")
    if left:
        typer.echo(f"skipped: {', '.join(left)}")


RATIOS, SHOWN_BITS = (2, 4, 8), (8, 6, 4)


def _inspected(matrix: Any, size: int) -> dict[str, Any]:
    """One matrix and what it would cost to store less of it."""
    from kronecell.compress.candidates import num_params, rounding_loss, sharings
    from kronecell.compress.spectrum import spectrum_of
    from kronecell.formats import LowRank

    spectrum = spectrum_of(matrix)
    most = min(matrix.M, matrix.N)
    errors: dict[str, float | None] = {}
    for by in RATIOS:
        found = []
        for shared in sharings(matrix):
            one = num_params(matrix, LowRank((matrix.M,), (matrix.N,), r=1), shared)
            rank = min(int(matrix.params / by / one), most)
            if rank >= 1:
                found.append(spectrum.loss(rank, shared or matrix.gates == 1) ** 0.5)
        errors[f"{by}x"] = None if matrix.is_compressed else min(found, default=None)
    bits = {str(n): None if matrix.is_compressed else rounding_loss(matrix, n, None)[0] ** 0.5 for n in SHOWN_BITS}
    return {
        "name": matrix.name,
        "kind": "compressed" if matrix.is_compressed else type(matrix.owner).__name__,
        "shape": [matrix.copies, matrix.gates, matrix.M, matrix.N],
        "params": matrix.stored_params,
        "bytes": matrix.stored_bytes,
        "part_of_bytes": matrix.stored_bytes / max(size, 1),
        "rank_90": spectrum.rank_for(0.9, True),
        "rank_99": spectrum.rank_for(0.99, True),
        "error_of_low_rank": errors,
        "error_of_bits": bits,
    }


def _options(matrix: Any, ratio: float) -> list[dict[str, Any]]:
    """Every kind of format at about this ratio."""
    from kronecell.compress.suggest import KINDS, largest_within, mode_choices

    if matrix.is_compressed:
        return []
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
    return options


def _training(model: Any, source: Path, data: Path, seed: int) -> dict[str, Any]:
    """Arguments of kc.compress for a classifier of videos and its clips."""
    import torch
    import torch.nn.functional as F

    from kronecell.cli.train import find_store
    from kronecell.training.batches import clips_for
    from kronecell.training.classifier import VideoClassifier
    from kronecell.training.saved import find_run

    p = getattr(model, "preprocessing", None)
    if not isinstance(model, VideoClassifier) or p is None:
        raise KronecellError(
            f"--train is for a run or the folder of a classifier of videos, which {source} is not; in Python, "
            "kc.compress(model, train=batches, loss=...) trains any model"
        )
    store = find_store(data, Path("runs"), p.width, p.height, None, True, p.channels)
    clips, held = clips_for(model, store, find_run(source) or source, seed)
    torch.manual_seed(seed)
    some = [inputs for (inputs, _), _ in zip(clips, range(CALIBRATION), strict=False)]
    return {"train": clips, "valid": held, "loss": F.cross_entropy, "calibration": some}


def _bits(text: str | None) -> int | list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise KronecellError(f"cannot read --bits {text!r}; expected a number from 3 to 8, or several such as 8,4")
    numbers = [int(part) for part in parts]
    return numbers[0] if len(numbers) == 1 else numbers


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
        first = matrix.part in ("weight", "weight_ih") and matrix.layer == 0 and not matrix.is_table
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
