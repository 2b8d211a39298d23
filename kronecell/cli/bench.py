"""`kronecell bench`: latency and throughput on this machine, beside the dense network."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kronecell.cli.models import AsJson, Threads
from kronecell.cli.tables import text_table
from kronecell.errors import KronecellError

SECONDS = 0.3  # at least this long for each size of batch and each network
MOST = 200  # and at most this many calls


def bench(
    what: Annotated[str, typer.Argument(metavar="MODEL|FORMAT", help="A run, a saved model's folder, or a format.")],
    batches: Annotated[str, typer.Option("--batches", "-b", help="Sizes of batches, as 1,16.")] = "1,16",
    frames: Annotated[int, typer.Option("--frames", "-f", min=1, help="Time steps, for a format.")] = 6,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Time inference beside the dense network of the same sizes, interleaved; medians.

    A FORMAT is timed as the input weights of an LSTM of its sizes. Products of weights are computed beforehand
    (kronecell.freeze).

    Example: kronecell bench kcp:m=8x20x20x18,n=4x4x4x4,K=4,CA=4,CB=2 --batches 1,16
    """
    import torch

    import kronecell as kc
    from kronecell.training.environment import environment

    sizes = _sizes(batches)
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    ours, dense, shape, dtype = _networks(what, frames)
    rows = []
    for batch in sizes:
        example = torch.zeros(batch, *shape, dtype=dtype)
        frozen = kc.freeze(ours, rows=(batch * shape[0],))
        fast, slow = interleaved(partial(frozen, example), partial(dense, example))
        rows.append({"batch": batch, "ms": 1e3 * fast, "dense_ms": 1e3 * slow, "times_faster": slow / fast,
                     "clips_per_second": batch / fast, "dense_clips_per_second": batch / slow})  # fmt: skip
    count = {"parameters": _params(ours), "dense_parameters": _params(dense)}
    machine = environment()
    about = {key: machine[key] for key in ("processor", "cores", "threads", "compiled kernels")}
    if as_json:
        typer.echo(json.dumps({"what": what, "frames": shape[0], **count, "machine": about, "times": rows}, indent=1))
        return
    typer.echo(f"{what}: {count['parameters']:,} parameters, dense {count['dense_parameters']:,}")
    typer.echo(f"{about['processor']}, {about['threads']} thread(s); clips of {shape[0]} frames, inference\n")
    cells = [
        (str(r["batch"]), f"{r['ms']:.2f}", f"{r['dense_ms']:.2f}", f"{r['times_faster']:.2f}x",
         f"{r['clips_per_second']:,.0f}", f"{r['dense_clips_per_second']:,.0f}")
        for r in rows
    ]  # fmt: skip
    header = ("batch", "ms", "dense ms", "times faster", "clips/s", "dense clips/s")
    typer.echo(text_table(header, cells, text=()))


def interleaved(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[float, float]:
    """Median seconds of both, called in turn so that both see the same load of the machine."""
    import torch

    times: tuple[list[float], list[float]] = ([], [])
    with torch.inference_mode():
        for _ in range(2):  # plans are made and memory is touched
            first()
            second()
        ends = time.perf_counter() + 2 * SECONDS
        while len(times[0]) < 3 or (time.perf_counter() < ends and len(times[0]) < MOST):
            for function, found in zip((first, second), times, strict=True):
                started = time.perf_counter()
                function()
                found.append(time.perf_counter() - started)
    return statistics.median(times[0]), statistics.median(times[1])


def _networks(what: str, frames: int) -> tuple[Any, Any, tuple[int, int], Any]:
    """Ours, the dense network of the same sizes, the shape of a clip and the type of its numbers."""
    import torch

    import kronecell as kc
    from kronecell.training.classifier import VideoClassifier
    from kronecell.training.saved import load

    if not Path(what).exists() and ":" in what:
        fmt = kc.parse(what)
        ours: Any = kc.LSTM(fmt.M, fmt.N, batch_first=True, input_format=fmt).eval()
        dense: Any = torch.nn.LSTM(fmt.M, fmt.N, batch_first=True).eval()
        return ours, dense, (frames, fmt.M), torch.float32
    if not Path(what).is_dir():
        raise KronecellError(f"{what!r} is neither a folder with a model nor a format such as kcp:m=8x20,n=4x4,K=4,...")
    model = load(what).eval()
    if isinstance(model, VideoClassifier):
        rnn = model.rnn
        same: dict[str, Any] = {
            "normalise": model.normalise,
            "pixel_mean": model.pixel_mean,
            "input_gain": model.input_gain,
        }
        cell = "lstm" if isinstance(rnn, kc.LSTM) else "gru"
        dense = VideoClassifier(rnn.input_size, rnn.hidden_size, len(model.class_names), cell=cell, **same).eval()
        steps = (model.preprocessing.frames if model.preprocessing else 0) or frames  # 0: it reads whole clips
        return model, dense, (steps, rnn.input_size), torch.uint8
    if isinstance(model, (kc.LSTM, kc.GRU)):
        return model, model.to_dense().eval(), (frames, model.input_size), torch.float32
    raise KronecellError(f"{what} holds a {type(model).__name__}; bench times classifiers, LSTM and GRU")


def _params(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise KronecellError(f"--batches must be numbers such as 1,16, got {text!r}")
    return sizes
