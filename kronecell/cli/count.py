"""`kronecell count` and `kronecell formats`: what a format costs, and which formats there are."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kronecell.cli.tables import text_table

UCF11 = "m=8x20x20x18,n=4x4x4x4"
EXAMPLES = {
    "dense": f"dense:{UCF11}",
    "lowrank": f"lowrank:{UCF11},r=4",
    "cp": f"cp:{UCF11},r=8",
    "tucker": f"tucker:{UCF11},r=4",
    "tt": f"tt:{UCF11},r=4",
    "tr": "tr:m=4x2x5x8x6x5x3x2,n=4x4x2x4x2,r=10x5x5x5x5x5x5x5x10x5x5x5x5",
    "bt": f"bt:{UCF11},r=4,P=2",
    "ht": f"ht:{UCF11},r=4",
    "kt": f"kt:{UCF11},K=4",
    "kcp": f"kcp:{UCF11},K=4,CA=4,CB=2",
}


def read_shared(shared: bool, unshared: str | None) -> bool | tuple[str, ...]:
    """The two options as one value: False, True (as the paper), or the names of the unshared factors."""
    return tuple(name.strip() for name in unshared.split(",") if name.strip()) if unshared else shared


def count(
    format: Annotated[str, typer.Argument(metavar="FORMAT", help="A format, e.g. kcp:m=8x20,n=4x4,K=4,CA=4,CB=2")],
    rows: Annotated[int, typer.Option(help="Rows of x: the optimal order and the peak depend on it.")] = 1,
    gates: Annotated[int, typer.Option(help="Matrices side by side: 4 for an LSTM, 3 for a GRU.")] = 1,
    shared: Annotated[bool, typer.Option("--shared", help="Gates share weights as in the paper.")] = False,
    unshared: Annotated[str | None, typer.Option(help="Gates share all factors but these, e.g. A1 or A1,B1.")] = None,
    order: Annotated[str | None, typer.Option(help="Show the plan of this order instead of all orders.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Parameters, compression ratio, multiply-adds per order and peak memory of a format.

    Example: kronecell count kcp:m=8x20x20x18,n=4x4x4x4,K=4,CA=4,CB=2 --gates 4 --rows 96
    """
    from kronecell.formats import parse
    from kronecell.formats.describe import describe

    fmt, sharing = parse(format), read_shared(shared, unshared)
    facts = describe(fmt, rows, gates, sharing, order)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    typer.echo(f"{facts['format']}   {fmt.M:,} x {fmt.N:,}" + (f", {gates} gates" if gates > 1 else ""))
    typer.echo(
        f"parameters {facts['params']:,}   dense {facts['dense_params']:,}   ratio {facts['compression_ratio']:,.1f}x"
    )
    typer.echo("factors    " + "  ".join(f"{name} {'x'.join(map(str, s))}" for name, s in facts["factors"].items()))
    if "sparse" in facts:
        values, indices = facts["sparse"]["values"], facts["sparse"]["index_bytes"]
        typer.echo(f"sparse     {values:,} entries beside the factors, {indices:,} bytes of indices")
    typer.echo("")
    if order:
        typer.echo(str(fmt.plan(order, rows, gates=gates, shared=sharing)))
        return
    header = ("order", "multiply-adds a row", "of dense", "once per update", f"peak elements, {rows:,} row(s)")
    lines = [
        (name, f"{o['macs']:,}", f"{o['macs'] / facts['dense_params']:.2%}", f"{o['hoisted_macs']:,}", f"{o['peak']:,}")
        for name, o in facts["orders"].items()
    ]
    typer.echo(text_table(header, lines))


def formats(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """The formats: equation, space and computation complexity, and a worked example each.

    Example: kronecell formats --json
    """
    from kronecell.formats import FORMATS, parse
    from kronecell.formats.paper_counting import paper_order

    facts: list[dict[str, Any]] = []
    for kind, cls in FORMATS.items():
        fmt = parse(EXAMPLES[kind])
        facts.append(
            {
                "kind": kind,
                "equation": cls.equation,
                "space": f"O({cls.space})",
                "computation": f"O({cls.computation})",
                "example": str(fmt),
                "example_params": fmt.num_params,
                "example_ratio": fmt.compression_ratio,
                "paper_order": paper_order(fmt) or next(iter(fmt.orders())),
                "example_macs": {name: fmt.macs(name) for name in [*fmt.orders(), "optimal"]},
            }
        )
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    typer.echo(
        "W is M x N with M = m^d and N = n^d; r, K, P are ranks. Complexities are the paper's where it has one.\n"
    )
    lines = [(f["kind"], f["equation"], f["space"], f["computation"]) for f in facts]
    typer.echo(text_table(("format", "equation", "space", "computation"), lines, text=range(4)))
    typer.echo("\nWorked examples, one gate of the paper's UCF11 layer (57,600 x 256 = 14,745,600 parameters):\n")
    examples = []
    for f in facts:
        macs, order = f["example_macs"], f["paper_order"]
        params, ratio = f"{f['example_params']:,}", f"{f['example_ratio']:,.0f}x"
        examples.append((f["example"], params, ratio, order, f"{macs[order]:,}", f"{macs['optimal']:,}"))
    header = ("example", "parameters", "ratio", "order", "multiply-adds", "by our best order")
    typer.echo(text_table(header, examples, text=(0, 3)))
