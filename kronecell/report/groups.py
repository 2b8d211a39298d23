"""Runs of one experiment over folds and seeds, as one: means and spreads, curves, counts, the paper's column."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kronecell.errors import KronecellError
from kronecell.formats import Format, Shared, parse
from kronecell.formats.paper_counting import paper_params
from kronecell.paper.printed import TABLES, Printed
from kronecell.paper.tables import paper_format
from kronecell.report.load import Run, number_of
from kronecell.training.intervals import interval
from kronecell.training.paper_settings import CLIPS, SETTINGS

CURVES = ("top1", "loss", "train_accuracy")
GATES = {"lstm": 4, "gru": 3}
DENSE = "dense"


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation (None for one value), extremes and number of some values."""

    mean: float
    deviation: float | None
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Iterable[float | None]) -> Spread | None:
        """None when there is no value."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        deviation = statistics.stdev(known) if len(known) > 1 else None
        return Spread(statistics.fmean(known), deviation, min(known), max(known), len(known))


@dataclass(frozen=True)
class Group:
    """All runs of one experiment in one folder."""

    label: str
    runs: tuple[Run, ...]
    format_text: str
    format: Format | None  # None: a plain matrix, or a text that is no format (`problem` says so)
    shared: Shared
    dataset: str
    gates: int
    hidden: int
    width: int
    rows: int  # rows of x in a training step
    problem: str = ""
    printed: Printed | None = None
    same_data: bool = False  # whether the printed accuracy is of this data set, too
    breakdown: Mapping[str, int] = field(default_factory=dict)

    @property
    def finished(self) -> list[Run]:
        """Runs with a result."""
        return [run for run in self.runs if run.finished]

    def spread(self, key: str) -> Spread | None:
        """Of a figure of the results; "accuracy" is that of the last epoch."""
        return Spread.of(_figure(run, key) for run in self.finished)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the accuracy, over clips and seeds; None where the number of clips is not known."""
        return self.interval_of("accuracy")

    def interval_of(self, key: str) -> tuple[float, float] | None:
        """That of "accuracy" or of "avg"; an accuracy that was selected, such as "top1", has none that holds."""
        scores = {
            (run.fold or 0, run.seed or 0): (value, run.tested)
            for run in self.finished
            if (value := _figure(run, key)) is not None
        }
        return interval(scores) if scores and all(clips for _, clips in scores.values()) else None

    @property
    def stopped(self) -> list[Run]:
        """Finished runs that ended before their last epoch."""
        return [run for run in self.finished if run.stopped]

    @property
    def threads(self) -> set[int]:
        """Numbers of threads that times were measured with."""
        return {int(n) for run in self.finished if (n := number_of(run.environment.get("threads"))) is not None}

    def value(self, key: str) -> float | None:
        """A figure that does not depend on fold and seed, from any finished run."""
        return next((v for run in self.finished if (v := number_of(run.result.get(key))) is not None), None)

    def curve(self, key: str) -> list[dict[str, float]]:
        """Per epoch: mean, low and high over the runs that have it, their number, the mean seconds until then."""
        table: dict[int, list[tuple[float, float]]] = {}
        for run in self.runs:
            passed = 0.0
            for row in run.metrics:
                passed += number_of(row.get("seconds")) or 0.0
                value = number_of(row.get(key))
                if value is not None:
                    table.setdefault(int(row["epoch"]), []).append((value, passed))
        points = []
        for epoch in sorted(table):
            values = [value for value, _ in table[epoch]]
            points.append(
                {
                    "epoch": epoch + 1,
                    "seconds": round(statistics.fmean(seconds for _, seconds in table[epoch]), 3),
                    "mean": statistics.fmean(values),
                    "low": min(values),
                    "high": max(values),
                    "count": len(values),
                }
            )
        return points


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs by experiment and folder, in order of the first run of each."""
    table: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        config = run.config
        key = (run.path.parent, run.name, config["format"], str(config.get("shared")), config.get("cell"))
        table.setdefault(key, []).append(run)
    names = [plain_name(key[1], key[2]) for key in table]
    groups = []
    for (parent, name, text, *_), members in table.items():
        name = plain_name(name, text)
        label = name if names.count(name) == 1 else f"{name} ({parent.parent.name or parent.name})"
        groups.append(_group(label, members))
    labels: dict[str, int] = {}
    unique = []
    for group in groups:  # still the same name: the settings differ, so number them
        labels[group.label] = labels.get(group.label, 0) + 1
        count = labels[group.label]
        unique.append(group if count == 1 else Group(**{**group.__dict__, "label": f"{group.label} #{count}"}))
    return unique


def plain_name(name: str, format_text: str) -> str:
    """The name of an experiment with "dense" for what the paper calls "ori"."""
    start, dash, end = name.rpartition("-")
    return f"{start}{dash}dense" if format_text == DENSE and end.lower() == "ori" else name


def _group(label: str, runs: Sequence[Run]) -> Group:
    config = runs[0].config

    def number(key: str, default: int) -> int:
        value = number_of(config.get(key))
        return default if value is None else max(1, int(value))

    text, shared = config["format"], _shared(config.get("shared"))
    fmt, problem = None, ""
    if text != DENSE:
        try:
            fmt = parse(text)
        except KronecellError as error:
            problem = str(error)
    hidden = number("hidden", fmt.N if fmt else 256)
    width = fmt.M if fmt else number("width", 160) * number("height", 120) * number("channels", 3)
    gates = GATES.get(str(config.get("cell", "lstm")), 4)
    frames = next((int(n) for run in runs if (n := number_of(run.result.get("frames")))), number("frames", 6))
    rows = frames * number("batch_size", 16)
    dataset = str(config.get("dataset") or "")
    group = Group(
        label, tuple(runs), text, fmt, shared, dataset, gates, hidden, width, rows, problem, *_printed(
            dataset if _is_papers(dataset, runs) else "", fmt, text, shared, gates, hidden, width
        ),
    )  # fmt: skip
    return Group(**{**group.__dict__, "breakdown": _breakdown(group)})


def _figure(run: Run, key: str) -> float | None:
    return run.accuracy if key == "accuracy" else number_of(run.result.get(key))


def _shared(value: object) -> Shared:
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value):
        return tuple(value)
    return False


def _is_papers(dataset: str, runs: Sequence[Run]) -> bool:
    """Whether the runs were trained on the paper's data set of this name: by what they counted, not by the name.

    (The names of the classes were compared when the run began; a data set without them has another name since then.)
    """
    known = next((name for name in SETTINGS if name.lower() == dataset.lower()), None)
    if known is None or not any(run.finished for run in runs):  # only a result counts clips and classes
        return False
    least, most = CLIPS[known]
    for run in runs:
        clips = run.result.get("clips")
        count = number_of(clips.get("all")) if isinstance(clips, dict) else None
        if run.finished and (count is None or not least <= count <= most):
            return False
        if run.finished and number_of(run.result.get("classes")) != SETTINGS[known].classes:
            return False
    return True


def _printed(
    dataset: str, fmt: Format | None, text: str, shared: Shared, gates: int, hidden: int, width: int
) -> tuple[Printed | None, bool]:
    """The paper's column for the same layer, first of the same data set; and whether the data set is the same."""
    if gates != GATES["lstm"] or not isinstance(shared, bool):
        return None, False
    for same_data in (True, False):
        for row in TABLES:
            if same_data != (row.dataset.lower() == dataset.lower()):
                continue
            if row.format == "Ori":
                plain = paper_format(row.dataset, "Ori")
                if text == DENSE and (width, hidden) == (plain.M, plain.N):
                    return row, same_data
            elif fmt is not None and row.shared == shared and paper_format(row.dataset, row.format) == fmt:
                return row, same_data
    return None, False


def printed_params(group: Group) -> tuple[int, int] | None:
    """(printed, by the paper's convention) parameters of W, where the paper has the layer."""
    row = group.printed
    if row is None:
        return None
    fmt = paper_format(row.dataset, row.format)
    return row.params, paper_params(fmt, group.gates, row.shared and row.format != "Ori")


def _breakdown(group: Group) -> dict[str, int]:
    """Parameters of W, U, biases and classifier; "other" is what the result counts beyond these."""
    if group.format is not None:
        try:
            w = group.format.network(group.gates, group.shared).num_params
        except KronecellError:
            return {}
    elif group.problem:
        return {}
    else:
        w = group.gates * group.width * group.hidden
    parts = {"W": w, "U": group.gates * group.hidden**2, "bias": 2 * group.gates * group.hidden}
    classes = group.value("classes") or number_of(group.runs[0].config.get("classes"))
    if classes:
        parts["classifier"] = int(classes) * (group.hidden + 1)
    total = group.value("params_model")
    if total is not None and "classifier" in parts and int(total) != sum(parts.values()):
        parts["other"] = int(total) - sum(parts.values())
    return parts
