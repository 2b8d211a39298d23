"""The manifest: what a data set holds, file by file (path, class, group, frames, size, sha256), as JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kronecell.data.datasets import Dataset
from kronecell.deploy import records
from kronecell.deploy.atomic import write_atomically
from kronecell.errors import DataError, printable

FORMAT = "kronecell manifest 1"
AGAIN = "make it again with kronecell data prepare or verify"
MOST_BYTES, MOST_VALUES = 256 << 20, 10_000_000  # some 600,000 clips

_SIZE = records.whole(1, 1 << 16)
_COUNT = records.whole(0)
_CLIP = records.table(
    {
        **dict.fromkeys(("path", "class", "group"), records.text()),
        "frames": records.whole(1),
        **dict.fromkeys(("width", "height", "size"), _COUNT),
        "damage": records.optional(records.text(100_000)),
        "sha256": records.text(64, "[0-9a-f]{64}"),
    },
    # Of a store; a name without a folder, because it is opened below the store.
    {"file": records.text(60, "[0-9a-f]{40}[.]clip"), "crc32": records.whole(0, 2**32 - 1)},
)
_SETTINGS = records.table(
    {"width": _SIZE, "height": _SIZE},
    {"max_frames": records.whole(1), "version": _COUNT, "channels": records.whole(1, 4)},
)
_FOLDS = records.table(
    {"k": records.whole(2), "seed": records.whole(-(2**53)), "method": records.text(40), "fold": records.many(_COUNT)}
)
SCHEMA = records.table(
    {
        "format": records.text(40),
        **dict.fromkeys(("name", "root", "layout"), records.text()),
        "classes": records.many(records.text()),
        "settings": records.optional(_SETTINGS),
        "folds": records.optional(_FOLDS),
        "clips": records.many(_CLIP),
        "bad": records.many(records.table({"path": records.text(), "reason": records.text(100_000)})),
    }
)


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
    manifest = records.read_json(path, records.anything, DataError, AGAIN, MOST_BYTES, MOST_VALUES)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{printable(path)}: is not a '{FORMAT}'; {AGAIN}")
    checked: dict[str, Any] = records.checked(manifest, _manifest, DataError, printable(path), AGAIN)
    return checked


def _manifest(value: dict[str, Any], place: str) -> None:
    """Types and ranges, then classes, clips and folds against each other."""
    SCHEMA(value, place)
    classes, clips, folds = value["classes"], value["clips"], value["folds"]
    if len({*classes}) != len(classes):
        raise records.Wrong("a class is named twice")
    unknown = {clip["class"] for clip in clips} - {*classes}
    if unknown:
        raise records.Wrong(f"a clip is of the class {min(unknown)[:60]!r}, which is not among the classes")
    if folds is None:
        return
    if len(folds["fold"]) != len(clips):
        raise records.Wrong(f"folds of {len(folds['fold'])} clips, but there are {len(clips)}")
    if folds["fold"] and max(folds["fold"]) >= folds["k"]:
        raise records.Wrong(f"a clip is in fold {max(folds['fold'])} of {folds['k']}")
