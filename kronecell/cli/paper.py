"""`kronecell paper ...`: the paper's tables and curves, printed values beside the recomputed ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kronecell.cli.figures import figures, pyplot
from kronecell.cli.parallel import parallel
from kronecell.cli.tables import text_table
from kronecell.deploy.atomic import write_atomically

app = typer.Typer(no_args_is_help=True, help="The paper's tables and figures, recomputed.")
app.command()(figures)
app.command()(parallel)


@app.command()
def tables(
    dataset: Annotated[str | None, typer.Option(help="UCF11, YCF or UCF50; all when left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """All six comparison tables and the last table's parameters: printed, recomputed, errata, and as executed.

    Example: kronecell paper tables --dataset UCF11
    """
    from kronecell.paper import tables as paper

    rows, models, text = paper.tables(dataset), paper.last_table(dataset), paper.kt_rank_text(dataset)
    if as_json:
        typer.echo(json.dumps({"rows": rows, "last_table": models, "kt_rank_text": text}, indent=2))
        return
    for name in dict.fromkeys(row["dataset"] for row in rows):
        for shared in (False, True):
            part = [row for row in rows if row["dataset"] == name and row["shared"] == shared]
            typer.echo(f"\n{name}, {'weights shared by the gates' if shared else 'no sharing'}")
            typer.echo(text_table(_HEADER, [_line(row) for row in part]))
            _print_errata(part)
    typer.echo("\nLast table: parameters of the whole network (W shared + U + classifier)")
    lines = [
        (
            f"{row['dataset']} {row['method']}",
            f"{row['printed']['params_millions']}M",
            f"{row['recomputed']['params']:,}",
            f"{row['model_ratio']:,.1f}x",
            row["erratum"],
        )
        for row in models
    ]
    typer.echo(text_table(("network", "printed", "recomputed", "model ratio", "erratum"), lines, text=(0, 4)))
    wrong = [row for row in text if row["erratum"]]
    for row in wrong:
        typer.echo(
            f"text on the KT rank, {row['dataset']}: {row['printed']} MFLOPs for {row['format']}: {row['erratum']}"
        )
    typer.echo(_LEGEND.format(rows=paper.ROWS))


_LEGEND = """
printed      as in the paper; * marks an erratum
recomputed   by the paper's convention: HT's root as r^3, and with sharing only the steps of unshared factors per gate
executed     multiply-adds a machine does for the paper's order, with the gate index open
ours         our best order for {rows} rows, work without x excluded
model ratio  the whole network, U and classifier counted: uncompressed over compressed"""

_HEADER = (
    "format", "params printed", "recomputed", "ratio", "MFLOPs printed", "recomputed", "executed", "ours",
    "model ratio",
)  # fmt: skip


def _line(row: dict[str, Any]) -> Sequence[str]:
    printed, again, real = row["printed"], row["recomputed"], row["executed"]
    mark = {column: "*" if column in row["errata"] else "" for column in ("params", "mflops")}
    return (
        row["format"],
        f"{printed['params']:,}{mark['params']}",
        f"{again['params']:,}",
        f"{again['ratio']:,.0f}x",
        f"{printed['mflops']:,.1f}{mark['mflops']}",
        f"{again['mflops']:,.1f}",
        f"{real['mflops_paper_order']:,.1f}",
        f"{real['mflops_best_order']:,.1f}",
        f"{real['model_ratio']:,.1f}x",
    )


def _print_errata(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        for column, text in row["errata"].items():
            typer.echo(f"  * {row['format']}: {column} printed {row['printed'][column]:,}, should be {text}")
        if row["executed"]["params"] != row["recomputed"]["params"]:
            true = row["executed"]["params"]
            typer.echo(f"    {row['format']}: {true:,} parameters with the true root of r^2 (the paper counts r^3)")


@app.command()
def complexity(
    plot: Annotated[Path | None, typer.Option(help="Write the two curves to this file (.png, .svg or .pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """The complexity figure: parameters and multiply-adds of one W x against the rank (d=4, m=20, n=8, P=2, K=4).

    Example: kronecell paper complexity --plot complexity.png
    """
    from kronecell.paper.tables import complexity as curves

    data = curves()
    if plot is not None:
        plot_complexity(data, plot)
    if as_json:
        typer.echo(json.dumps(data, indent=2))
        return
    labels = [*data["curves"]]
    for what, title in (("params", "parameters"), ("macs", "multiply-adds of one W x")):
        lines = [
            (str(r), *(f"{data['curves'][label][what][i]:,}" for label in labels)) for i, r in enumerate(data["ranks"])
        ]
        typer.echo(f"\n{title} (d={data['d']}, m={data['m']}, n={data['n']}, P={data['P']}, K={data['K']})")
        typer.echo(text_table(("rank", *labels), lines))
    if plot is not None:
        typer.echo(f"\nwrote {plot}")


def plot_complexity(data: dict[str, Any], target: Path) -> None:
    """The two curves as a picture."""
    plt = pyplot(target)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    styles: dict[str, dict[str, Any]] = {
        "KCP": {"linewidth": 2.6},
        "KCP separable": {"linewidth": 2.6, "linestyle": "--"},
    }
    for axis, what, title in ((axes[0], "params", "Parameters"), (axes[1], "macs", "Multiply-adds of one W x")):
        for label, curve in data["curves"].items():
            if what == "params" and label == "KCP separable":
                continue  # the order of contraction does not change the parameters
            name = {"KCP": "KCP (Algorithm 2)", "KCP separable": "KCP (separable)"}.get(label, label)
            axis.plot(data["ranks"], curve[what], label=name if what == "macs" else label, **styles.get(label, {}))
        axis.set(title=title, xlabel="rank r = CA = CB", yscale="log", xlim=(data["ranks"][0], data["ranks"][-1]))
        axis.grid(alpha=0.3)
        axis.set_ylim(top=axis.get_ylim()[1] * 20)  # room for the legend above the curves
        axis.legend(fontsize=9, ncols=2, loc="upper left")
    dims = f"d={data['d']}, m={data['m']}, n={data['n']}, BT P={data['P']}, KCP K={data['K']}"
    figure.suptitle(f"Complexity against rank ({dims})", fontsize=11)
    write_atomically(target, lambda path: figure.savefig(path, dpi=150, format=target.suffix[1:]))
    plt.close(figure)
