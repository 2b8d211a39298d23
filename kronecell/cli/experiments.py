"""`kronecell experiments`: the experiments that come with the package, and a copy of one to edit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kronecell.cli.models import AsJson
from kronecell.cli.tables import text_table
from kronecell.errors import KronecellError

app = typer.Typer(help="The experiments that come with the package: list, copy, settings.", invoke_without_command=True)


@app.callback()
def list_by_default(context: typer.Context) -> None:
    """The experiments that come with the package: list, copy, settings."""
    if context.invoked_subcommand is None:
        list_all("*")


@app.command(name="list")
def list_all(
    pattern: Annotated[str, typer.Argument(help="Only names that match, such as `ucf11-*`.")] = "*",
    as_json: AsJson = False,
) -> None:
    """List the packaged experiments: format, frames, hidden size, epochs.

    Example: kronecell experiments list 'surveillance-*'
    """
    from kronecell.training.experiment import list_experiments, load_experiment

    found = {name: load_experiment(name) for name in list_experiments(pattern)}
    if not found:
        raise KronecellError(f"no packaged experiment matches {pattern!r}")
    if as_json:
        facts = [
            {"name": name, "format": e.format, "shared": e.shared, "epochs": e.epochs} for name, e in found.items()
        ]
        typer.echo(json.dumps(facts, indent=1))
        return
    rows = [
        (name, e.dataset, f"{e.width}x{e.height}", str(e.hidden), str(e.epochs), "yes" if e.shared else "", e.format)
        for name, e in found.items()
    ]
    typer.echo(text_table(("name", "data", "frames", "hidden", "epochs", "shared", "format"), rows, text=(0, 1, 5, 6)))


@app.command()
def copy(
    name: Annotated[str, typer.Argument(help="A packaged experiment.")],
    target: Annotated[Path | None, typer.Argument(help="The TOML file.  [default: NAME.toml]")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write an experiment with all its settings to a file of your own; `kronecell train FILE` runs it.

    Example: kronecell experiments copy surveillance-kcp mine.toml
    """
    from kronecell.deploy.atomic import write_atomically
    from kronecell.training.experiment import load_experiment

    file = target or Path(f"{name}.toml")
    if file.exists() and not force:
        raise KronecellError(f"{file} is there already; give another name, or --force")
    e = load_experiment(name, {"classes": 0, "name": file.stem, "paper": ""})
    recipe = "" if e.format == "dense" else f"# format = {json.dumps(e.recipe())} fits frames of any size\n"
    text = f"# {name} as a start for your own; any line that is left out takes its default.\n{recipe}{e.to_toml()}"
    write_atomically(file, lambda temporary: temporary.write_text(text))
    typer.echo(f"wrote {file}; edit it, then: kronecell train {file} --data FOLDER")


@app.command()
def settings(as_json: AsJson = False) -> None:
    """Every setting of an experiment: its default, what it means, when to change it.

    Example: kronecell experiments settings
    """
    from kronecell.training.experiment import describe_settings

    rows = describe_settings()
    if as_json:
        typer.echo(json.dumps([dict(zip(("name", "default", "meaning", "change"), row, strict=True)) for row in rows]))
        return
    typer.echo(text_table(("setting", "default", "meaning", "change it"), rows, text=(0, 1, 2, 3)))
