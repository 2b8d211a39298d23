"""Read run directories. A missing or damaged file is reported for its run and does not stop the rest."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kronecell.deploy.records import (
    is_there,
    named,
    number,
    parse_json,
    read_bytes,
    read_json,
    read_toml,
    table,
    unchecked,
)
from kronecell.errors import KronecellError, printable

FILES = ("config.toml", "status.json", "metrics.jsonl", "result.json")
STATES = ("running", "finished", "failed", "interrupted")
NAMED = re.compile(r"fold(\d+)-seed(\d+)$")
DEPTH = 4  # folders below a given one that are searched
MOST_LINES = 100_000  # epochs read of one run
MOST_METRICS = 64 << 20
METRICS = table({"epoch": number()}, rest=unchecked)


@dataclass(frozen=True)
class Run:
    """One run directory as far as it can be read; `problems` says what could not."""

    path: Path
    name: str
    fold: int | None
    seed: int | None
    state: str
    message: str
    epoch: int
    epochs: int
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    metrics: tuple[Mapping[str, Any], ...]
    result: Mapping[str, Any]
    problems: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether it has a result."""
        return self.state == "finished" and bool(self.result)

    @property
    def accuracy(self) -> float | None:
        """That of the last epoch, which nothing was selected by."""
        last = number_of(self.result.get("top1_last"))
        scores = [value for row in self.metrics if (value := number_of(row.get("top1"))) is not None]
        return last if last is not None else scores[-1] if scores else None

    @property
    def tested(self) -> int:
        """Clips that the accuracy was measured on; 0 where the result does not say."""
        clips = self.result.get("clips")
        known = {key: number_of(clips.get(key)) for key in ("valid", "all", "train")} if isinstance(clips, dict) else {}
        if known.get("valid") is None and None not in (known.get("all"), known.get("train")):
            return max(0, int(known["all"] - known["train"]))  # type: ignore[operator]
        return int(known.get("valid") or 0)

    @property
    def stopped(self) -> str:
        """Why it ended before its last epoch: "time", "patience", or "" for a run that did not."""
        if not self.result:
            return ""
        if isinstance(self.result.get("stopped"), str):
            return str(self.result["stopped"])
        limit, spent = number_of(self.config.get("max_seconds")), number_of(self.result.get("seconds"))
        return "time" if limit and spent is not None and spent >= limit else ""

    @property
    def outcome(self) -> str:
        """Its state; "stopped" for a finished run that ended before its last epoch."""
        return "stopped" if self.finished and self.stopped else self.state


@dataclass(frozen=True)
class Broken:
    """A directory that looks like a run and cannot be read as one."""

    path: Path
    reason: str


def find_runs(paths: Iterable[Path | str]) -> list[Path]:
    """The run directories among and below the given folders, each once, in order."""
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if not os.path.isdir(path):  # unlike Path.is_dir, False for a name that no folder can have
            what = "is not a folder" if is_there(path) else "does not exist"
            raise KronecellError(f"{path} {what}; expected run directories such as runs/NAME/fold0-seed0, or runs")
        found |= dict.fromkeys(_below(path, DEPTH))
    if not found:
        raise KronecellError(
            f"no run directory in {', '.join(map(str, paths))}; `kronecell train` or `kronecell demo` makes them"
        )
    return [*found]


def _below(folder: Path, depth: int) -> Iterable[Path]:
    if NAMED.search(folder.name) or any((folder / name).is_file() for name in FILES[:1] + FILES[2:]):
        yield folder
    elif depth:
        try:
            children = sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
        except OSError:
            return
        for child in children:
            yield from _below(child, depth - 1)


def load_runs(paths: Iterable[Path | str]) -> tuple[list[Run], list[Broken]]:
    """All runs below the paths, and those that are broken."""
    runs, broken = [], []
    for path in find_runs([*paths]):
        try:
            runs.append(load_run(path))
        except KronecellError as error:
            broken.append(Broken(path, str(error)))
    return runs, broken


def load_run(path: Path) -> Run:
    """One run; a KronecellError says why it cannot be one."""
    config = _config(path / "config.toml")
    problems: list[str] = []
    status = _object(path / "status.json", problems)
    result = _object(path / "result.json", problems)
    state = status.get("state")
    if state not in STATES:
        if "status.json" not in " ".join(problems):
            problems.append("status.json is missing" if not status else f"status.json has the state {state!r}")
        state = "finished" if result else "interrupted"
    if state == "finished" and not result:
        raise KronecellError("says that it is finished, but result.json is missing or damaged")
    metrics = _metrics(path / "metrics.jsonl", state, problems)
    match = NAMED.search(path.name)
    name = config.get("name")
    return Run(
        path,
        name if isinstance(name, str) and name else path.parent.name,
        _integer(result.get("fold"), int(match[1]) if match else None),
        _integer(result.get("seed"), int(match[2]) if match else None),
        state,
        str(status.get("message") or ""),
        _integer(status.get("epoch"), len(metrics)) or 0,
        _integer(status.get("epochs"), 0) or 0,
        config,
        _object(path / "environment.json", problems),
        metrics,
        result,
        tuple(problems),
    )


def _config(path: Path) -> dict[str, Any]:
    if not is_there(path):
        raise KronecellError("config.toml is missing")
    try:
        config = read_toml(path, KronecellError)
    except KronecellError as error:
        raise KronecellError(_short(error, path)) from None
    if not isinstance(config.get("format"), str):
        raise KronecellError("config.toml names no format")
    return config


def _object(path: Path, problems: list[str]) -> dict[str, Any]:
    """A JSON object; {} when there is none."""
    if not is_there(path):
        return {}
    try:
        value: dict[str, Any] = read_json(path, named(unchecked), KronecellError, finite=False)
    except KronecellError as error:
        problems.append(_short(error, path))
        return {}
    return value


def _metrics(path: Path, state: str, problems: list[str]) -> tuple[Mapping[str, Any], ...]:
    if not is_there(path):
        return ()
    try:
        lines = read_bytes(path, KronecellError, MOST_METRICS).splitlines()[:MOST_LINES]
    except KronecellError as error:
        problems.append(_short(error, path))
        return ()
    rows, bad = [], []
    for position, line in enumerate(lines, 1):
        try:
            rows.append(parse_json(line, METRICS, KronecellError, f"line {position}", finite=False))
        except KronecellError:
            if line.strip() and not (position == len(lines) and state == "running"):  # a line may be half written
                bad.append(position)
    if bad:
        shown = ", ".join(map(str, bad[:5])) + (" ..." if len(bad) > 5 else "")
        problems.append(f"metrics.jsonl: {len(bad)} line(s) cannot be read ({shown})")
    return tuple(rows)


def number_of(value: object) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _integer(value: object, default: int | None) -> int | None:
    number = number_of(value)
    return default if number is None else int(number)


def _short(error: KronecellError, path: Path) -> str:
    """The reason with the file's name instead of its path: the page and the list name the run."""
    reason = str(error).removeprefix(f"{printable(path)}: ").removeprefix("cannot be read: ")
    return f"{path.name} cannot be read: {reason}"[:200]
