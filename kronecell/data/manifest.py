"""The manifest: what a data set holds, file by file (path, class, group, frames, size, sha256), as JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kronecell.data.datasets import Dataset
from kronecell.deploy.atomic import write_atomically
from kronecell.errors import DataError, printable

FORMAT = "kronecell manifest 1"


@dataclass(frozen=True)
class BadFile:
    """A file that is left out, by its path below the data set's root, and why."""

    name: str
    reason: str


def build_manifest(
    dataset: Dataset, answers: dict[int, dict[str, Any]], settings: dict[str, int] | None = None
) -> dict[str, Any]:
    """The manifest of a data set from what the workers found in each clip, in the order of the clips."""
    good, bad = [], []
    for position, clip in enumerate(dataset.clips):
        facts = {"path": clip.name, "class": clip.label, "group": clip.group}
        answer = answers[position]
        if "ok" in answer:
            good.append({**facts, **answer["ok"]})
        else:
            bad.append({**facts, "reason": answer["error"]})
    return {
        "format": FORMAT,
        "name": dataset.name,
        "root": str(dataset.root.resolve()),
        "layout": dataset.layout,
        "classes": list(dataset.classes),
        "settings": settings,
        "folds": None,
        "clips": good,
        "bad": bad,
    }


def manifest_hash(manifest: dict[str, Any]) -> str:
    """SHA-256 of what a training run depends on: classes, clips and settings; not of where the videos are."""
    content = [manifest["classes"], manifest["clips"], manifest["settings"]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Write in one piece. JSON escapes keep file names that are not UTF-8."""
    text = json.dumps(manifest, indent=1) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text))


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest, or say why it is not one."""
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{printable(path)}: cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise DataError(
            f"{printable(path)}: is not JSON; make it again with kronecell data prepare or verify"
        ) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{printable(path)}: is not a '{FORMAT}'; make it again with kronecell data prepare or verify")
    return manifest
