"""`kronecell demo`: a tour of the counts, for the layer the paper starts from."""

from __future__ import annotations

import typer

from kronecell.commands.tables import text_table
from kronecell.paper import paper_format


def demo() -> None:
    """What each format makes of the paper's UCF11 layer: 57,600 inputs, four gates of 256.

    Example: kronecell demo
    """
    header = ("format", "parameters", "ratio", "multiply-adds, paper's order", "our best order", "of dense")
    lines = []
    dense = 4 * 57600 * 256
    for label in ("Ori", "TT", "BT", "TR", "HT", "KCP(4,4,2)", "KCP(4,2,2)"):
        fmt = paper_format("UCF11", label)
        params = fmt.network(4).num_params
        theirs = fmt.plan("algorithm2" if label.startswith("KCP") else None, gates=4).macs
        ours = fmt.plan("optimal", 96, gates=4).macs
        lines.append(
            (label, f"{params:,}", f"{dense / params:,.0f}x", f"{theirs:,}", f"{ours:,}", f"{ours / dense:.2%}")
        )
    typer.echo("An LSTM on 160 x 120 video: the input weights of its four gates, 57,600 x 256 each.\n")
    typer.echo(text_table(header, lines))
    typer.echo("\nThe plan behind the KCP(4,4,2) figure:\n")
    typer.echo(str(paper_format("UCF11", "KCP(4,4,2)").plan("separable", 96, gates=4)))
