"""Read run directories. A missing or damaged file is reported for its run and does not stop the rest."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kronecell.errors import KronecellError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILES = ("config.toml", "status.json", "metrics.jsonl", "result.json")
STATES = ("running", "finished", "failed", "interrupted")
NAMED = re.compile(r"fold(\d+)-seed(\d+)$")
DEPTH = 4  # folders below a given one that are searched
MOST_LINES = 100_000  # epochs read of one run


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


@dataclass(frozen=True)
class Broken:
    """A directory that looks like a run and cannot be read as one."""

    path: Path
    reason: str


def find_runs(paths: Iterable[Path | str]) -> list[Path]:
    """The run directories among and below the given folders, each once, in order."""
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            what = "is not a folder" if path.exists() else "does not exist"
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
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KronecellError("config.toml is missing") from None
    except (OSError, ValueError) as error:
        raise KronecellError(f"config.toml cannot be read: {_short(error)}") from None
    if not isinstance(config.get("format"), str):
        raise KronecellError("config.toml names no format")
    return config


def _object(path: Path, problems: list[str]) -> dict[str, Any]:
    """A JSON object; {} when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {_short(error)}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} is not a JSON object")
        return {}
    return value


def _metrics(path: Path, state: str, problems: list[str]) -> tuple[Mapping[str, Any], ...]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[:MOST_LINES]
    except FileNotFoundError:
        return ()
    except OSError as error:
        problems.append(f"metrics.jsonl cannot be read: {_short(error)}")
        return ()
    rows, bad = [], []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and number_of(row.get("epoch")) is not None:
            rows.append(row)
        elif line.strip() and not (number == len(lines) and state == "running"):  # a line may be half written
            bad.append(number)
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


def _short(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200]
