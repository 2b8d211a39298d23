"""The command line: `kronecell` and `python -m kronecell`."""

from __future__ import annotations

import sys
import warnings
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
    experiments,
    explore,
    export,
    paper,
    predict,
    quantize,
    report,
    sweep,
    train,
)
from kronecell.errors import KronecellError, on_one_line

# Panels of `kronecell --help`, in the order of what a newcomer does.
PANELS = {
    "Start": ("demo", "doctor", "explore"),
    "Train": ("data", "experiments", "train", "sweep", "report"),
    "Use what you trained": ("predict", "evaluate", "export", "bench"),
    "Compress a trained model": ("inspect", "compress", "quantize"),
    "Count": ("count", "formats", "paper"),
}
COMMANDS: dict[str, typer.Typer | Callable[..., Any]] = {
    "demo": demo.demo,
    "train": train.train,
    "sweep": sweep.sweep,
    "experiments": experiments.app,
    "predict": predict.predict,
    "evaluate": evaluate.evaluate,
    "export": export.export,
    "bench": bench.bench,
    "count": count.count,
    "formats": count.formats,
    "explore": explore.explore,
    "compress": compress.compress,
    "inspect": compress.inspect,
    "quantize": quantize.quantize,
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
    app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", callback=_root, context_settings=names)
    for panel, commands in PANELS.items():
        for name in commands:
            command = COMMANDS[name]
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name, rich_help_panel=panel)
            else:
                app.command(name, rich_help_panel=panel)(command)
    return app


def main(arguments: list[str] | None = None) -> None:
    """Run; an expected error is one line on stderr and exit code 2, without a traceback."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            code = build()(arguments, prog_name="kronecell", standalone_mode=False)
    except KronecellError as error:
        if getattr(error, "quiet", False):  # another process of the same training says it
            sys.exit(2)
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("kronecell: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:  # the reader of the pipe ended, as in `kronecell formats | head`
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:  # a name that no file can have, a disk that fails
        _fail(": ".join(str(part) for part in (error.filename, error.strerror or error) if part))
    except MemoryError:
        _fail("there is not enough memory for this")
    except Exception as error:
        message = getattr(error, "format_message", None)  # wrong usage, from whichever click typer ships
        if message is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(message())
            sys.exit(2)
        command = getattr(getattr(error, "ctx", None), "command_path", "kronecell")
        _fail(f"{message()} (see {command} --help)")
    sys.exit(code if isinstance(code, int) else 0)


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """One line, without the line of source that Python adds."""
    typer.echo(f"kronecell: warning: {on_one_line(str(message), KronecellError.LONGEST)}", err=True)


def _fail(message: str, code: int = 2) -> None:
    typer.echo(f"kronecell: error: {on_one_line(message, KronecellError.LONGEST)}", err=True)
    sys.exit(code)
