"""`kronecell paper parallel`: serial against parallel multiplication, as in the paper's simulation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kronecell.cli.tables import text_table
from kronecell.deploy.atomic import write_atomically
from kronecell.errors import KronecellError


def parallel(
    dataset: Annotated[str, typer.Option(help="UCF11, UCF50 or both.")] = "both",
    ranks: Annotated[str, typer.Option(help="CP ranks C = CA = CB, as 2,4,8.")] = "2,4,8,16,32,48,64,80,100",
    repeats: Annotated[int, typer.Option(min=1, help="Products per figure; the median is given.")] = 3,
    plot: Annotated[Path | None, typer.Option(help="Write the curves to this file (.png, .svg or .pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Time of one W x in KCP format against the CP rank: serial, threads, processes, and our single batched call.

    Example: kronecell paper parallel --dataset UCF11 --ranks 2,8,32
    """
    from kronecell.paper.branch_study import WAYS, K, study

    chosen = read_ranks(ranks)
    names = [*K] if dataset == "both" else [dataset.upper()]
    if plot is not None:
        check_kind(plot)
    results = [s for name in names for s in study(name, chosen, repeats, _say)]
    if plot is not None and results:
        plot_parallel(results, plot)
    if as_json:
        typer.echo(json.dumps([{"dataset": s.dataset, "K": K[s.dataset], "C": s.C, **s.seconds} for s in results]))
        return
    for name in names:
        rows = [(str(s.C), *(f"{1e3 * s.seconds[w]:,.2f}" for w in WAYS)) for s in results if s.dataset == name]
        typer.echo(f"\n{name}, K = {K[name]}: milliseconds of one W x, one thread in each worker")
        typer.echo(text_table(("C", *WAYS), rows, text=()))
    if plot is not None:
        typer.echo(f"\nwrote {plot}")


def read_ranks(text: str) -> list[int]:
    """The numbers in "2,4,8"."""
    try:
        chosen = [int(word) for word in text.split(",")]
    except ValueError:
        raise KronecellError(f"--ranks must be numbers such as 2,4,8, got {text!r}") from None
    if min(chosen) < 1:
        raise KronecellError(f"--ranks must be at least 1, got {text!r}")
    return chosen


def check_kind(target: Path) -> None:
    kinds = (".png", ".svg", ".pdf")
    if target.suffix not in kinds:
        raise KronecellError(f"cannot plot to {target.name!r}: expected a file ending in {', '.join(kinds)}")


def plot_parallel(results: list[Any], target: Path) -> None:
    """The curves as a picture."""
    try:
        import matplotlib
    except ImportError:
        raise KronecellError("plots need matplotlib; install it with: pip install 'kronecell[report]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [*dict.fromkeys(s.dataset for s in results)]
    figure, axes = plt.subplots(1, len(names), figsize=(5.5 * len(names), 4.2), layout="constrained", squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        part = [s for s in results if s.dataset == name]
        for way in part[0].seconds:
            axis.plot([s.C for s in part], [1e3 * s.seconds[way] for s in part], marker="o", label=way)
        axis.set(title=f"{name} shapes", xlabel="CP rank C", ylabel="milliseconds of one W x", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=9)
    figure.suptitle("Branches of KCP one after the other and at once", fontsize=11)
    write_atomically(target, lambda path: figure.savefig(path, dpi=150, format=target.suffix[1:]))
    plt.close(figure)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
