"""Run directories in the layout of kronecell.training.run, written without training: what the report reads."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from kronecell.formats import parse
from kronecell.formats.paper_counting import paper_macs, paper_order
from kronecell.paper.tables import mflops, paper_format

FORMATS = ("Ori", "TT", "BT", "TR", "HT", "KCP(4,4,2)", "KCP(4,2,2)")
HIDDEN, CLASSES, GATES = 256, 11, 4


def write_run(
    out: Path,
    name: str,
    label: str = "TT",
    fold: int = 0,
    seed: int = 0,
    state: str = "finished",
    epochs: int = 40,
    dataset: str = "UCF11",
    shared: bool = False,
    stopped: str = "",
) -> Path:
    """One run directory; `label` is a column of the paper's tables."""
    folder = out / name / f"fold{fold}-seed{seed}"
    folder.mkdir(parents=True)
    fmt = paper_format("UCF11", label)
    text = "dense" if label == "Ori" else str(fmt)
    shared = shared and label != "Ori"
    settings: dict[str, Any] = {
        "name": name, "dataset": dataset, "paper": label, "format": text, "shared": shared, "cell": "lstm",
        "hidden": HIDDEN, "classes": 0, "width": 160, "height": 120, "frames": 6, "batch_size": 16, "epochs": epochs,
    }  # fmt: skip
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    (folder / "config.toml").write_text(lines)
    environment = {"python": "3.11", "torch": "2.13", "threads": 2, "processor": "test"}
    (folder / "environment.json").write_text(json.dumps(environment))
    done = epochs if state == "finished" and not stopped else epochs // 2
    number = FORMATS.index(label) if label in FORMATS else 3
    level = 0.7 + 0.035 * number + 0.01 * fold - 0.007 * seed
    metrics = []
    for epoch in range(done):
        share = 1 - math.exp(-4 * (epoch + 1) / epochs)
        top1 = round(level * share + 0.02 * math.sin(2.1 * epoch + fold), 4)
        metrics.append(
            {
                "epoch": epoch, "loss": 2.4 * (1.02 - share) + 0.03 * math.cos(epoch + seed), "train_accuracy": share,
                "top1": top1, "seconds": 1.0 + 0.3 * number, "clips_per_second": 200.0,
            }
        )  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    status = {
        "state": state,
        "epoch": done,
        "epochs": epochs,
        "message": "" if state != "failed" else "the loss is nan",
    }
    (folder / "status.json").write_text(json.dumps(status))
    if state == "finished":
        (folder / "result.json").write_text(
            json.dumps(_result(settings, metrics, fold, seed, label) | {"stopped": stopped})
        )
    return folder


def _result(
    settings: dict[str, Any], metrics: list[dict[str, Any]], fold: int, seed: int, label: str
) -> dict[str, Any]:
    dense = GATES * 57600 * HIDDEN
    rest = GATES * HIDDEN**2 + 2 * GATES * HIDDEN + CLASSES * (HIDDEN + 1)
    shared = settings["shared"]
    fmt = paper_format("UCF11", label)
    w = dense if label == "Ori" else parse(settings["format"]).network(GATES, shared).num_params
    plan = fmt.plan("optimal", 96, gates=GATES, shared=shared)
    return {
        "experiment": settings["name"], "format": settings["format"], "shared": shared, "dataset": settings["dataset"],
        "top1": max(row["top1"] for row in metrics), "avg": metrics[-1]["top1"], "avg_over": 10,
        "top1_last": metrics[-1]["top1"], "clips": {"train": 1280, "valid": 320, "all": 1600},
        "params_w": w, "params_model": w + rest, "ratio_w": dense / w, "ratio_model": (dense + rest) / (w + rest),
        "macs_paper": 1e6 * mflops(paper_macs(fmt, GATES, shared), GATES, HIDDEN, CLASSES),
        "macs_executed": 1e6 * mflops(plan.macs, GATES, HIDDEN, CLASSES), "macs_hoisted": plan.hoisted_macs,
        "step_ms": 40.0 + fold, "latency_ms": 5.0 + plan.macs / 4e6, "seconds": 60.0, "epochs": len(metrics),
        "classes": CLASSES, "manifest_hash": "0123456789abcdef" * 4, "fold": fold, "seed": seed,
        "deviations": ["epochs 40 instead of 400", f"order {paper_order(fmt) or 'default'}"],
    }  # fmt: skip


def write_study(out: Path, folds: int = 3, seeds: int = 1, dataset: str = "UCF11", shared: bool = False) -> Path:
    """Every format of the paper's UCF11 table on several folds and seeds."""
    for label in FORMATS:
        name = "ucf11-" + "".join(c for c in label.lower() if c.isalnum())
        for fold in range(folds):
            for seed in range(seeds):
                write_run(out, name, label, fold, seed, dataset=dataset, shared=shared)
    return out


def write_mixed(out: Path) -> Path:
    """One finished run, one running, one failed, one broken, and one whose name is a script."""
    write_run(out, "finished", "KCP(4,4,2)")
    running = write_run(out, "running", "TT", state="running")
    with (running / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 20, "lo')  # a line that is being written
    write_run(out, "failed", "HT", state="failed")
    broken = write_run(out, "broken", "BT")
    (broken / "result.json").write_text("{")
    evil = write_run(out, "evil", "TR")
    name = "<script>window.evil=1</script><img src=x onerror=window.evil=2>"
    config = (evil / "config.toml").read_text().replace('"evil"', json.dumps(name))
    (evil / "config.toml").write_text(config)
    return out
