"""`kronecell report`: run directories as one offline page, a Markdown table or JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders that hold them, e.g. runs.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The HTML file.  [default: report.html]")] = None,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Kronecell report",
    as_json: Annotated[
        bool, typer.Option("--json", "-j", help="One JSON document on stdout; a page only with --out.")
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="The table on stdout; a page only with --out.")
    ] = False,
) -> None:
    """One self-contained page of all runs: curves, accuracy against cost, counts, plans, protocol.

    Runs that are still going on, were stopped, or cannot be read are named on the page.

    Example: kronecell report runs --out report.html
    """
    from kronecell.errors import KronecellError
    from kronecell.report import group_runs, load_runs, markdown, summary, write_report

    if as_json and as_markdown:
        raise KronecellError("--json and --markdown both write to stdout; choose one")
    if out is not None or not (as_json or as_markdown):
        target = out or Path("report.html")
        started = time.monotonic()

        def progress(text: str) -> None:
            if time.monotonic() - started > 2:
                print(f"kronecell: {text}", file=sys.stderr, flush=True)

        groups, broken = write_report(runs, target, title, progress=progress)
        typer.echo(f"wrote {target} ({target.stat().st_size / 1e6:.2f} MB)", err=as_json or as_markdown)
    else:
        loaded, broken = load_runs(runs)
        groups = group_runs(loaded)
    for b in broken:
        typer.echo(f"kronecell: broken run {b.path}: {b.reason}", err=True)
    if as_json:
        typer.echo(json.dumps(summary(groups, broken), indent=1))
    elif as_markdown:
        typer.echo(markdown(groups, broken))
