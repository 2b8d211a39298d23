"""Finished runs of benchmarks.letters: a file each while they are made, and all of them in letters.json.

A run is known by its key, such as test-dense-fold2-seed0. What letters.json holds is not trained again, so a clean
checkout goes on where the results end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kronecell.deploy.atomic import write_atomically

Record = dict[str, Any]


class Records:
    """Records by key; those in `folder` before those that are given."""

    def __init__(self, folder: Path, known: Mapping[str, Record]) -> None:
        self.folder = folder
        self.known = dict(known)
        for path in sorted(folder.glob("*.json")):
            self.known[path.stem] = json.loads(path.read_text())

    def get(self, key: str, settings: Mapping[str, Any]) -> Record | None:
        """A finished run; None if there is none with these settings."""
        path = self.folder / f"{key}.json"  # perhaps of another process
        if key not in self.known and path.is_file():
            self.known[key] = json.loads(path.read_text())
        found = self.known.get(key)
        return found if found is not None and found["settings"] == dict(settings) else None

    def put(self, key: str, record: Record) -> Record:
        """Keep a finished run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record) + "\n"
        write_atomically(self.folder / f"{key}.json", lambda path: path.write_text(text))
        self.known[key] = record
        return record

    def of(self, place: str) -> list[Record]:
        """The runs of a place, by fold and seed."""
        keys = [key for key in self.known if key.startswith(f"{place}-fold")]
        return [self.known[key] for key in sorted(keys)]


def in_results(path: Path, base: Mapping[str, Any], quick: bool) -> dict[str, Record]:
    """The runs of a results file that was made with the same settings; none without one."""
    if not path.is_file():
        return {}
    document = json.loads(path.read_text())
    if document.get("base") != dict(base) or document.get("quick") != quick:
        return {}
    return dict(document.get("runs", {}))


def to_json(document: Mapping[str, Any]) -> str:
    """The results file: a line for each run, everything else a line for each of its parts."""
    lines = []
    for name, value in document.items():
        if isinstance(value, Mapping) and name == "runs":
            inside = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value[key])}" for key in sorted(value))
            lines.append(f' "{name}": {{\n{inside}\n }}')
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            inside = ",\n".join("  " + json.dumps(entry) for entry in value)
            lines.append(f' "{name}": [\n{inside}\n ]')
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
