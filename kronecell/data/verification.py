"""Decode every file of a data set and report its content: counts, frame statistics, bad files with reasons."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from kronecell.data.datasets import Dataset
from kronecell.data.folds import folds_record
from kronecell.data.manifest import build_manifest
from kronecell.data.progress import track
from kronecell.data.video import DEFAULT_LIMITS, Limits
from kronecell.data.workers import run_jobs


@dataclass(frozen=True)
class Verification:
    """The manifest of a data set, and its summary as plain numbers."""

    manifest: dict[str, Any]

    def summary(self) -> dict[str, Any]:
        """Clips, groups, frames and bad files: for all and for each class; ready for JSON."""
        clips, bad = self.manifest["clips"], self.manifest["bad"]
        frames = sorted(clip["frames"] for clip in clips)
        by_class = {}
        for label in self.manifest["classes"]:
            mine = [clip for clip in clips if clip["class"] == label]
            by_class[label] = {
                "clips": len(mine),
                "groups": len({clip["group"] for clip in mine}),
                "frames": sum(clip["frames"] for clip in mine),
                "bad": sum(1 for file in bad if file["class"] == label),
            }
        sizes = Counter(f"{clip['width']}x{clip['height']}" for clip in clips)
        return {
            "name": self.manifest["name"],
            "root": self.manifest["root"],
            "layout": self.manifest["layout"],
            "clips": len(clips),
            "groups": len({clip["group"] for clip in clips}),
            "bytes": sum(clip["size"] for clip in clips),
            "frames": {
                "total": sum(frames),
                "least": frames[0] if frames else 0,
                "median": frames[len(frames) // 2] if frames else 0,
                "most": frames[-1] if frames else 0,
            },
            "sizes": dict(sizes.most_common()),
            "classes": by_class,
            "damaged": [{"path": clip["path"], "reason": clip["damage"]} for clip in clips if clip["damage"]],
            "bad": [{"path": file["path"], "reason": file["reason"]} for file in bad],
        }


def verify(
    dataset: Dataset,
    workers: int | None = None,
    progress: bool = True,
    limits: Limits = DEFAULT_LIMITS,
    folds: int = 5,
    fold_seed: int = 0,
    fold_method: str = "group",
) -> Verification:
    """Decode all files in parallel; a bad file is a line of the result, never an error."""
    jobs = [{"task": "inspect", "path": str(clip.path)} for clip in dataset.clips]
    answers: dict[int, dict[str, Any]] = {}
    for position, answer in track(run_jobs(jobs, workers, limits), len(jobs), "verifying", progress):
        answers[position] = answer
    manifest = build_manifest(dataset, answers)
    good = [clip for position, clip in enumerate(dataset.clips) if "ok" in answers[position]]
    manifest["folds"] = folds_record(good, folds, fold_seed, fold_method)
    return Verification(manifest)
