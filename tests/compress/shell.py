"""The commands `kronecell compress` and `kronecell inspect`, as a shell runs them."""

from __future__ import annotations

from typing import Any

from typer import Typer
from typer.testing import CliRunner

from kronecell.cli.compress import compress, inspect


def run(*arguments: str) -> Any:
    """The exit code and what was printed; a fault that is no refusal is raised."""
    app = Typer()
    app.command("compress")(compress)
    app.command("inspect")(inspect)
    done = CliRunner().invoke(app, [*arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done
