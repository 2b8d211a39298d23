"""The command line: `kronecell` and `python -m kronecell`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from kronecell import __version__
from kronecell.cli import (
    bench,
    compress,
    count,
    data,
    demo,
    doctor,
    evaluate,
    explore,
    export,
    paper,
    predict,
    report,
    sweep,
    train,
)
from kronecell.errors import KronecellError

COMMANDS: dict[str, typer.Typer | Callable[..., Any]] = {
    "demo": demo.demo,
    "train": train.train,
    "sweep": sweep.sweep,
    "predict": predict.predict,
    "evaluate": evaluate.evaluate,
    "export": export.export,
    "bench": bench.bench,
    "count": count.count,
    "formats": count.formats,
    "explore": explore.explore,
    "compress": compress.compress,
    "inspect": compress.inspect,
    "data": data.app,
    "report": report.report,
    "paper": paper.app,
    "doctor": doctor.doctor,
}


def _version(show: bool) -> None:
    if show:
        typer.echo(f"kronecell {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Compress recurrent networks: weight matrices stored, multiplied and trained as tensor networks."""


def build() -> typer.Typer:
    """The typer application over COMMANDS."""
    names = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(
        no_args_is_help=True, add_completion=False, rich_markup_mode=None, callback=_root, context_settings=names
    )
    for name, command in COMMANDS.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def main(arguments: list[str] | None = None) -> None:
    """Run; an expected error is one line on stderr and exit code 2, without a traceback."""
    try:
        code = build()(arguments, prog_name="kronecell", standalone_mode=False)
    except KronecellError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("kronecell: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:  # the reader of the pipe ended, as in `kronecell formats | head`
        sys.stderr.close()
        sys.exit(141)
    except Exception as error:
        message = getattr(error, "format_message", None)  # wrong usage, from whichever click typer ships
        if message is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(message())
            sys.exit(2)
        _fail(f"{message()} (see kronecell --help)")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int = 2) -> None:
    typer.echo(f"kronecell: error: {' '.join(message.split())}", err=True)
    sys.exit(code)
