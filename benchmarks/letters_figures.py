"""The figures of benchmarks.letters: accuracy beside the size of W, and accuracy by learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kronecell.deploy.atomic import write_atomically

COLOURS = {"KCP": "#0b62a8", "dense": "#444444"}


def _plot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "letters", "svg.fonttype": "none", "font.size": 9}
    import matplotlib.pyplot as plt

    return plt


def draw(target: Path, rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> None:
    """A line for each network: its accuracy with the interval, and beside it the parameters of its W.

    Side by side, because most formats have nearly the same size: as points of one plane they lie on each other.
    """
    plt = _plot()
    lines = sorted([(row["accuracy"], row, True) for row in rows] + [(row["accuracy"], row, False) for row in others],
                   key=lambda line: line[0])  # fmt: skip
    height = 1.1 + 0.27 * len(lines)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(7.2, height), sharey=True, layout="constrained", width_ratios=(2, 1)
    )
    for place, (accuracy, row, raw) in enumerate(lines):
        low, high = row["interval"]
        colour = next((c for key, c in COLOURS.items() if row["name"].startswith(key)), "#c4511d")
        colour = colour if raw else "#777777"
        left.errorbar(100 * accuracy, place, xerr=[[100 * (accuracy - low)], [100 * (high - accuracy)]], fmt="o",
                      color=colour, mfc=colour if raw else "white", capsize=3, markersize=5)  # fmt: skip
        right.plot(row["params_w"], place, "s", color=colour, mfc=colour if raw else "white", markersize=5)
        right.annotate(
            f"{row['params_w']:,}",
            (row["params_w"], place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
        )
    left.set_yticks(range(len(lines)), [row["name"] for _, row, _ in lines])
    left.set(xlabel="accuracy on the third repetition, %, with 95% interval\nhollow: not an LSTM over raw pixels")
    right.set(xscale="log", xlabel="parameters of W", xlim=(500, 2e7))
    left.grid(alpha=0.3)
    right.grid(alpha=0.3)
    right.tick_params(axis="y", length=0)
    for side in ("top", "right"):
        left.spines[side].set_visible(False)
        right.spines[side].set_visible(False)
    _save(plt, figure, target)


def draw_rates(target: Path, sweep: Sequence[Mapping[str, Any]]) -> None:
    """Accuracy by rate: uniform beside by structure, wide above narrow."""
    plt = _plot()
    kinds, names = ("uniform", "structure"), [*dict.fromkeys(point["name"] for point in sweep)]
    widths = sorted({point["hidden"] for point in sweep}, reverse=True)
    figure, axes = plt.subplots(len(widths), 2, figsize=(7.2, 6.4), sharey="row", sharex="col", layout="constrained",
                                squeeze=False)  # fmt: skip
    for row, hidden in zip(axes, widths, strict=True):
        for axis, kind in zip(row, kinds, strict=True):
            for number, name in enumerate(names):
                found = sorted(
                    (p["rate"], 100 * p["accuracy"])
                    for p in sweep
                    if (p["name"], p["hidden"], p["rates"]) == (name, hidden, kind)
                )
                if found:
                    mark = "o" if number == 0 else "s" if number < 7 else "^"
                    colour = "black" if number == 0 else f"C{(number - 1) % 6}"
                    wide = 2 if number == 0 else 1
                    axis.plot(
                        *zip(*found, strict=True), f"-{mark}", color=colour, label=name, markersize=4, linewidth=wide
                    )
            axis.set(xscale="log", title=f'rates = "{kind}", {hidden} units')
            axis.grid(alpha=0.3)
        row[0].set_ylabel("accuracy, inner split, %")
    for axis in axes[-1]:
        axis.set_xlabel("learning rate")
    figure.legend(*axes[0][1].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=7)
    _save(plt, figure, target)


def _save(plt: Any, figure: Any, target: Path) -> None:
    write_atomically(target, lambda path: figure.savefig(path, format="svg", metadata={"Date": None}))
    plt.close(figure)
