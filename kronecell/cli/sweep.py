"""`kronecell sweep`: many runs of `kronecell train`, each in a separate process, here or on other machines."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kronecell.cli.models import AsJson, say
from kronecell.cli.tables import text_table
from kronecell.cli.train import OUT, SET, Data, open_data
from kronecell.errors import KronecellError

HERE = "here"
MANY = 20  # runs that are started without a question


@dataclass
class Job:
    """One run: its name, its command and its result."""

    experiment: str
    fold: int
    seed: int
    command: list[str]
    node: str = HERE
    state: str = "waiting"
    accuracy: float | None = None
    message: str = ""


def sweep(
    pattern: Annotated[
        str, typer.Argument(help="Experiments or TOML files, as a pattern in quotes: `ucf11-*` or `mine/*.toml`.")
    ],
    data: Data,
    folds: Annotated[str, typer.Option(help="Folds to validate on: 0,1,2 or all.")] = "all",
    seeds: Annotated[str, typer.Option(help="Seeds: 0,1,2.")] = "0",
    epochs: Annotated[int | None, typer.Option("--epochs", "-e", help="Short for --set epochs=N.")] = None,
    overrides: list[str] | None = SET,
    out: Path = OUT,
    jobs: Annotated[int, typer.Option("--jobs", "-n", min=1, help="Runs at the same time on each node.")] = 1,
    threads: Annotated[int, typer.Option(min=0, help="Threads of torch in each run; 0: cores divided by jobs.")] = 0,
    nodes: Annotated[str, typer.Option(help="Machines that see the same files, as a,b,c; empty is this one.")] = "",
    launcher: Annotated[str, typer.Option(help="How a command is run on a node; the command is appended.")] = (
        "ssh -o BatchMode=yes {node}"
    ),
    dry_run: Annotated[bool, typer.Option(help="Print the commands and do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help=f"Do not ask before more than {MANY} runs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run all experiments that match, on all folds and seeds; what is finished is skipped, the rest continued.

    Example: kronecell sweep 'ucf11-kcp*' --data ucf11-store --seeds 0,1,2 --jobs 2
    """
    from kronecell.data import open_store
    from kronecell.training.experiment import list_experiments, load_experiment, parse_overrides
    from kronecell.training.splits import settle_folds

    settings = parse_overrides(overrides or [])
    own = sorted(str(path) for path in Path().glob(pattern) if path.suffix == ".toml") if "*" in pattern else []
    names = [pattern] if Path(pattern).is_file() else own or list_experiments(pattern)
    if not names:
        raise KronecellError(f"no experiment matches {pattern!r}; `kronecell experiments` lists them")
    if epochs is not None:
        settings["epochs"] = epochs
    chosen = {name: load_experiment(name, settings) for name in names}  # all are checked before one starts
    extra = [word for assignment in overrides or [] for word in ("--set", assignment)]
    extra += [] if epochs is None else ["--epochs", str(epochs)]
    share = threads or max(1, (os.cpu_count() or 1) // jobs)
    source = data
    one_size = len({(e.width, e.height, e.channels) for e in chosen.values()}) == 1
    if one_size and not dry_run:  # decoded once here, not by every run
        for e in chosen.values():  # every experiment's number of classes is checked, the first prepares
            source = open_data(data, out, e, show=not as_json).root
    store = open_store(source) if (source / "manifest.json").is_file() else None
    queue = []
    for name, e in chosen.items():
        count = settle_folds(e, store).folds
        for fold, seed in itertools.product(_numbers(folds, count, "folds"), _numbers(seeds, None, "seeds")):
            where = ["--data", str(source), "--out", str(out), "--fold", str(fold), "--seed", str(seed)]
            command = [sys.executable, "-m", "kronecell", "train", name, *where, *extra]
            queue.append(Job(e.name, fold, seed, [*command, "--threads", str(share), "--json"]))
    if dry_run:
        lines = [shlex.join(job.command) for job in queue]
        typer.echo(json.dumps(lines) if as_json else "\n".join(lines))
        return
    _ask(queue, yes)
    places = [node for node in nodes.split(",") if node] or [HERE]
    run_queue(queue, [node for node in places for _ in range(jobs)], launcher)
    typer.echo(json.dumps([_facts(job) for job in queue]) if as_json else _table(queue))
    if any(job.state != "finished" for job in queue):
        raise typer.Exit(1)


def _ask(queue: Sequence[Job], yes: bool) -> None:
    """Many runs take days; a pattern that matched more than was meant should not start them."""
    if yes or len(queue) <= MANY:
        return
    text = f"{len(queue)} runs of {len({job.experiment for job in queue})} experiments"
    if not sys.stdin.isatty():
        raise KronecellError(f"{text}: --yes starts that many; --dry-run shows them")
    if not typer.confirm(f"{text}; start them?", err=True):
        raise typer.Exit(1)


def run_queue(queue: Sequence[Job], places: Sequence[str], launcher: str) -> None:
    """Run all jobs, one at a time on each place.

    A run that fails in training does not stop the rest; one that is refused (exit code 2: the data or the settings)
    does, because the rest would be refused like it.
    """
    waiting, running = [*queue], dict[int, tuple[Job, subprocess.Popen[str]]]()
    free, done = [*range(len(places))], 0
    old = signal.signal(signal.SIGTERM, _interrupt)
    try:
        while waiting or running:
            while waiting and free:
                job, slot = waiting.pop(0), free.pop(0)
                job.node, job.state = places[slot], "running"
                running[slot] = job, _start(job, launcher)
            time.sleep(0.1)
            for slot, (job, process) in [*running.items()]:
                if process.poll() is not None:
                    _collect(job, process)
                    done += 1
                    if process.returncode == 2 and waiting:
                        say(f"the other {len(waiting)} runs are not started: {_title(job)} was refused")
                        for other in waiting:
                            other.state, other.message = "not started", "an earlier run was refused"
                        waiting.clear()
                    text = f"accuracy {job.accuracy:.1%}" if job.accuracy is not None else job.message
                    print(f"[{done}/{len(queue)}] {_title(job)} on {job.node}: {text}", file=sys.stderr, flush=True)
                    del running[slot]
                    free.append(slot)
    finally:  # when interrupted, every run saves its checkpoint and ends
        signal.signal(signal.SIGTERM, old)
        for _, process in running.values():
            process.send_signal(signal.SIGTERM)
        for job, process in running.values():
            _collect(job, process)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _start(job: Job, launcher: str) -> subprocess.Popen[str]:
    command = job.command
    if job.node != HERE:
        line = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(job.command)}"
        command = [*(word.replace("{node}", job.node) for word in shlex.split(launcher)), line]
    try:
        # A session of its own: Ctrl-C reaches only this process, which then ends the runs in order.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},  # runs share the cores: waiting threads must not spin
        )
    except OSError as error:
        raise KronecellError(f"cannot start {command[0]!r}: {error.strerror or error}") from None


def _collect(job: Job, process: subprocess.Popen[str]) -> None:
    out, err = process.communicate()
    try:
        result = json.loads(out)
        job.accuracy = result.get("top1_last", result["avg"])
        job.state = "finished"
    except (ValueError, KeyError, TypeError):
        job.state = "interrupted" if process.returncode == 143 else "failed"
        lines = err.strip().splitlines()
        job.message = lines[-1] if lines else f"exit code {process.returncode}"


def _numbers(text: str, count: int | None, what: str) -> list[int]:
    if text == "all" and count is not None:
        return [*range(count)]
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise KronecellError(f"--{what} must be numbers such as 0,1,2, got {text!r}") from None


def _title(job: Job) -> str:
    return f"{job.experiment} fold {job.fold} seed {job.seed}"


def _facts(job: Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in ("experiment", "fold", "seed", "node", "state", "accuracy", "message")}


def _table(queue: Sequence[Job]) -> str:
    """Mean and spread of each experiment over its folds and seeds, then what did not finish."""
    import statistics

    rows = []
    for name in dict.fromkeys(job.experiment for job in queue):
        scores = [job.accuracy for job in queue if job.experiment == name and job.accuracy is not None]
        mean = f"{statistics.fmean(scores):.1%}" if scores else "-"
        spread = f"{statistics.stdev(scores):.1%}" if len(scores) > 1 else "-"
        rows.append((name, f"{len(scores)}/{sum(job.experiment == name for job in queue)}", mean, spread))
    lines = [text_table(("experiment", "finished", "mean accuracy, last epoch", "standard deviation"), rows)]
    lines += [f"{_title(job)}: {job.state}: {job.message}" for job in queue if job.state != "finished"]
    return "\n".join(lines)
