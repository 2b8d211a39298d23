"""`kronecell explore`: the local page."""

from __future__ import annotations

import json
import webbrowser
from typing import Annotated

import typer


def explore(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of 127.0.0.1; 0 takes a free one.")] = 8765,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as JSON.")] = False,
) -> None:
    """A page on this machine: type sizes, format and ranks, see parameters, multiply-adds, latency and the drawing.

    Example: kronecell explore --port 0 --no-browser
    """
    from kronecell.report.explore import Server

    with Server(port) as server:
        typer.echo(json.dumps({"url": server.url}) if as_json else f"{server.url}   (Ctrl-C ends it)")
        if browser:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("kronecell: ended", err=True)
