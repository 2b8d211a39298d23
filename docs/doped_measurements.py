"""What benchmarks/results/doped.json and doped_speed.json say of doped formats, for docs/doped.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from measurements import read, table

NAMES = {"lowrank": "low rank", "doped lowrank": "doped low rank", "hybrid lowrank": "hybrid low rank"}
COLUMNS = ("lowrank", "pruned", "doped lowrank")
STRUCTURES = ("lowrank", "kp", "tt", "kcp", "tr")
KINDS = {"kp": "Kronecker products (KT, TT of two modes)", "tt": "TT", "kcp": "KCP", "tr": "TR", "lowrank": "low rank"}


def doped_ratios(task: str) -> str:
    """Loss beside dense by ratio: low rank, pruned, doped, and doped beside low rank."""
    found = _rows(task)
    lines = []
    for ratio in (5, 10, 20, 40):
        for mode in ("integers", "float32"):
            cells = [found.get((name, mode, ratio)) for name in COLUMNS]
            if all(cell is not None for cell in cells):
                doped = cells[-1]
                assert doped is not None
                parts = [_triple(task, cell["beside dense"]) for cell in cells if cell is not None]
                beside = [_triple(task, doped[f"beside {other}"]) for other in ("lowrank", "pruned")]
                lines.append([f"{ratio}x", mode, *parts, *beside, f"{doped['seeds']}"])
    head = ("fewer bytes", "values", *(NAMES.get(name, name) for name in COLUMNS), "doped beside low rank",
            "doped beside pruned", "seeds")  # fmt: skip
    return table(head, lines, texts=2)


def doped_structures(task: str) -> str:
    """Every structure alone and doped, at ten times fewer bytes."""
    found, lines = _rows(task), []
    for kind in STRUCTURES:
        for mode in ("integers", "float32"):
            alone, doped = found.get((kind, mode, 10)), found.get((f"doped {kind}", mode, 10))
            if alone is not None and doped is not None:
                lines.append(
                    [KINDS[kind], mode, *(_triple(task, row["beside dense"]) for row in (alone, doped)),
                     f"{doped['share']:.0%}", f"{doped['seeds']}"]
                )  # fmt: skip
    head = ("structure", "values", "alone", "doped", "bytes of S", "seeds")
    return table(head, lines, texts=2)


def doped_dense(task: str) -> str:
    """The dense network with fewer bits, in one sentence."""
    found = _rows(task)
    parts = [
        f"{bits} bits, {row['fewer']:.1f} times fewer bytes: {_triple(task, row['beside dense'])}"
        for bits in (8, 6, 5, 4, 3)
        if (row := found.get(("dense", f"{bits} bits", 1))) is not None
    ]
    return "; ".join(parts)


def doped_times() -> str:
    """Against nn.LSTM, and over the structure alone."""
    data = read("doped_speed")
    if data is None:
        return "No measurement is in `benchmarks/results` yet; `python -m benchmarks.doped_speed` makes one."
    rows = {(row["hidden"], row["name"], row["steps"]): row for row in data["rows"]}
    lines = []
    for (hidden, name, steps), row in rows.items():
        structure, _, doping = name.rpartition(" / ")
        if structure and steps > 1:
            single = rows[hidden, name, 1]
            lines.append(
                [f"{structure}, {hidden} units", doping, f"{row['of_dense']:.1f}x", f"{row['of_int8']:.1f}x",
                 f"{row['over_structure']:.2f}", f"{single['over_structure']:.2f}"]
            )  # fmt: skip
    head = ("W and U", "S", "as fast as nn.LSTM", "as torch's int8", "time over the structure", "of a single step")
    return table(head, lines, texts=2)


def _rows(task: str) -> dict[tuple[str, str, float], dict[str, Any]]:
    data = read("doped") or {"table": []}
    return {(row["variant"], row["mode"], row["ratio"]): row for row in data["table"] if row["task"] == task}


def _triple(task: str, triple: Sequence[float] | None) -> str:
    if triple is None:
        return ""
    end = "" if task.startswith("digits") else "%"
    return f"{triple[0]:+.1f}{end} ({triple[1]:+.1f} to {triple[2]:+.1f})"
