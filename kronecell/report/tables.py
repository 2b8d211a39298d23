"""The comparison table: one row per experiment, for HTML, Markdown and JSON alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kronecell.report.groups import Group, Spread, printed_params
from kronecell.report.load import Broken, Run, number_of

FIGURES = (
    "accuracy", "top1", "avg", "params_w", "params_model", "ratio_w", "ratio_model", "macs_paper", "macs_executed",
    "macs_hoisted", "step_ms", "latency_ms", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """What is shown, and the number it is sorted by."""

    text: str
    order: float | str | None = None


EMPTY = Cell("")
EPOCHS, AVERAGE, FORMAT = "epochs", "mean accuracy of the last epochs", "format of W"
LATENCY, STEP = "latency, ms", "training step, ms"


@dataclass(frozen=True)
class Column:
    """A title, an explanation, and how a group fills it."""

    title: str
    hint: str
    cell: Callable[[Group], Cell]
    paper: bool = False  # a column of printed values
    text: bool = False
    detail: bool = False  # of the page's second table: the first one fits a window without scrolling


def accuracy(group: Group) -> Cell:
    """That of the last epoch with its 95% interval, 87.1% (83.0 to 90.4); without a result, why there is none."""
    found = _with_interval("accuracy")(group)
    states = dict.fromkeys(run.state for run in group.runs if not run.finished)
    return found if found.text or not states else Cell(f"none, {' and '.join(states)}")


def percents(value: float, known: tuple[float, float] | None) -> str:
    """An accuracy and its interval: 87.1% (83.0 to 90.4)."""
    words = "" if known is None else f" ({100 * known[0]:.1f} to {100 * known[1]:.1f})"
    return f"{100 * value:.1f}%{words}"


def _with_interval(key: str) -> Callable[[Group], Cell]:
    def cell(group: Group) -> Cell:
        spread = group.spread(key)
        return EMPTY if spread is None else Cell(percents(spread.mean, group.interval_of(key)), spread.mean)

    return cell


def percent(spread: Spread | None) -> Cell:
    """A mean in percent."""
    return EMPTY if spread is None else Cell(f"{100 * spread.mean:.1f}%", spread.mean)


def rounded(value: float, digits: int = 1) -> str:
    """Three significant digits for what is small, else so many after the point: a small model has figures, too."""
    return f"{value:.3g}" if abs(value) < 10 else f"{value:,.{digits}f}"


def _params_w(group: Group) -> Cell:
    value = group.value("params_w")
    value = group.breakdown.get("W") if value is None else value  # known before a run has a result
    return EMPTY if value is None else Cell(f"{value:,.0f}", value)


def _times(key: str, digits: int) -> Callable[[Group], Cell]:
    def cell(group: Group) -> Cell:
        value = group.value(key)
        return EMPTY if value is None else Cell(f"{rounded(value, digits)}x", value)

    return cell


def _millions(key: str) -> Callable[[Group], Cell]:
    def cell(group: Group) -> Cell:
        value = group.value(key)
        return EMPTY if value is None else Cell(rounded(value / 1e6), value)

    return cell


def _mean(key: str, digits: int) -> Callable[[Group], Cell]:
    def cell(group: Group) -> Cell:
        spread = group.spread(key)
        return EMPTY if spread is None else Cell(rounded(spread.mean, digits), spread.mean)

    return cell


def _printed(read: Callable[[Group], float | None], accuracy: bool = False) -> Callable[[Group], Cell]:
    def cell(group: Group) -> Cell:
        if group.printed is None or (accuracy and not group.same_data):
            return EMPTY
        value = read(group)
        return EMPTY if value is None else Cell(f"{value:,.1f}{'%' * accuracy}", value)

    return cell


def _printed_w(group: Group) -> Cell:
    pair = printed_params(group)
    if pair is None:
        return EMPTY
    printed, counted = pair
    return Cell(f"{printed:,}" + (f" (should be {counted:,})" if printed != counted else ""), printed)


def _runs(group: Group) -> Cell:
    states = [run.outcome for run in group.runs]
    counts = {state: states.count(state) for state in dict.fromkeys(("finished", *states))}
    words = [f"{count} {state}" for state, count in counts.items() if count and state != "stopped"]
    return Cell(", ".join(filter(None, (*words[:1], stopped_words(group), *words[1:]))), len(group.finished))


def _epochs(group: Group) -> Cell:
    """34; "13 of 34, stopped"; "13 to 34 of 34, 1 of 2 stopped"; of runs without a result how far they came."""
    runs = group.finished or group.runs
    done = sorted(run.epoch for run in runs)
    planned = max(run.epochs for run in runs)
    words = f"{done[0]:,}" + (f" to {done[-1]:,}" if done[-1] > done[0] else "")
    if planned > done[0]:
        words += f" of {planned:,}"
    if group.stopped:
        words += ", " + (f"{len(group.stopped)} of {len(runs)} " if len(runs) > 1 else "") + "stopped"
    return Cell(words, done[0])


def stopped_words(group: Group) -> str:
    """ "1 of 2 runs stopped after 13 of 34 epochs by its time budget"; nothing where all ran to their last epoch."""
    stopped = group.stopped
    if not stopped:
        return ""
    own = "its" if len(stopped) == 1 else "their"
    known = {"time": f"by {own} time budget", "patience": f"by {own} patience (early_stop)"}
    why = " or ".join(dict.fromkeys(known.get(run.stopped, "early") for run in stopped))
    done, planned = sorted(run.epoch for run in stopped), max(run.epochs for run in stopped)
    epochs = f"{done[0]:,}" + (f" to {done[-1]:,}" if done[-1] > done[0] else "")
    after = f"after {epochs} of {planned:,} epochs " if planned > done[0] else ""
    many = "" if len(group.runs) == 1 else f"{len(stopped)} of {len(group.runs)} runs "
    return f"{many}stopped {after}{why}"


def threads_words(groups: Sequence[Group]) -> str:
    """The threads of all measured times, "1 thread" or "1 to 4 threads"; nothing where no run says."""
    found = sorted({count for group in groups for count in group.threads})
    if not found:
        return ""
    least, most = found[0], found[-1]
    return f"{least} thread{'s' * (least > 1)}" if least == most else f"{least} to {most} threads"


def _format(group: Group) -> Cell:
    shared = group.shared
    how = "" if shared is False else ", shared" if shared is True else f", own {' '.join(map(str, shared))}"
    return Cell(group.format_text + how, group.format_text)


NAME = Column("experiment", "its name", lambda group: Cell(group.label, group.label.lower()), text=True)
COLUMNS = (
    NAME,
    Column(
        "accuracy at the last epoch", "mean over the runs with its 95% interval over clips and seeds", accuracy,
    ),
    Column(EPOCHS, "trained; fewer than planned where a run was stopped", _epochs),
    Column("parameters of W", "input weights of all gates", _params_w),
    Column("ratio of W", "dense W over W: the paper's compression ratio", _times("ratio_w", 0)),
    Column("ratio of the model", "the whole model, U and classifier counted", _times("ratio_model", 1)),
    Column("multiply-adds, millions", "for one clip, as executed", _millions("macs_executed")),
    Column(LATENCY, "one clip at a time, measured", _mean("latency_ms", 1)),
    Column(STEP, "one training step, measured", _mean("step_ms", 0)),
    Column(
        "accuracy at the best epoch", "selected on the very clips it was measured on: flattering, without an interval",
        lambda group: percent(group.spread("top1")), detail=True,
    ),
    Column(AVERAGE, "the paper's Avg, with its 95% interval", _with_interval("avg"), detail=True),
    Column(
        "accuracy in the paper", "printed, of the best epoch as it seems; only beside the same data",
        _printed(lambda group: group.printed.top1 if group.printed else None, accuracy=True), True, detail=True,
    ),
    Column("parameters of W in the paper", "printed for the same layer", _printed_w, True, detail=True),
    Column(
        "multiply-adds by the paper's order, millions", "for one clip, by the paper's count", _millions("macs_paper"),
        detail=True,
    ),
    Column(
        "multiply-adds in the paper, millions*", "printed for the same layer",
        _printed(lambda group: group.printed.mflops if group.printed else None), True, detail=True,
    ),
    Column("runs", "folds and seeds", _runs, text=True, detail=True),
    Column(FORMAT, "format, modes and ranks of the input weights", _format, text=True, detail=True),
)  # fmt: skip
FOOTNOTE = "* The paper writes MFLOPs for what are multiply-adds in millions; two floating point operations each."


def titles(columns: Sequence[Column], groups: Sequence[Group]) -> list[str]:
    """Titles of columns; those of times say for how many clips at once and with how many threads."""
    threads = threads_words(groups)
    batches = sorted({int(n) for g in groups for run in g.runs if (n := number_of(run.config.get("batch_size")))})
    batch = "" if not batches else f"batch {batches[0]}" + ("" if len(batches) == 1 else f" to {batches[-1]}")
    notes = {LATENCY: ("batch 1", threads), STEP: (batch, threads)}
    return [
        f"{column.title} ({', '.join(filter(None, notes[column.title]))})" if column.title in notes else column.title
        for column in columns
    ]


def shown_columns(groups: Sequence[Group]) -> list[Column]:
    """All columns but those of the paper that no group fills."""
    return [column for column in COLUMNS if not column.paper or any(column.cell(group).text for group in groups)]


def markdown(groups: Sequence[Group], broken: Sequence[Broken] = ()) -> str:
    """The table for a README or a pull request."""
    columns = shown_columns(groups)

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(_plain(cell) for cell in cells) + " |"

    marks = ["---" if column.text else "---:" for column in columns]
    lines = [line(titles(columns, groups)), "|" + "|".join(marks) + "|"]
    lines += [line([column.cell(group).text for column in columns]) for group in groups]
    if any(column.title.endswith("*") for column in columns):
        lines += ["", _plain(FOOTNOTE)]
    lines += ["", *(f"- broken: `{_plain(str(b.path))}`: {_plain(b.reason)}" for b in broken)] if broken else []
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Text that stays text in Markdown tables."""
    for sign in ("\\", "|", "<", ">", "`", "*", "_", "[", "]"):
        text = text.replace(sign, "\\" + sign) if sign in "\\|`*_[]" else text.replace(sign, f"&#{ord(sign)};")
    return " ".join(text.split())


def summary(groups: Sequence[Group], broken: Sequence[Broken]) -> dict[str, Any]:
    """Everything the page shows, as data."""
    return {
        "groups": [_group_facts(group) for group in groups],
        "runs": [_run_facts(run) for group in groups for run in group.runs],
        "broken": [{"path": str(b.path), "reason": b.reason} for b in broken],
    }


def _group_facts(group: Group) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for key in FIGURES:
        spread = group.spread(key)
        figures[key] = None if spread is None else spread.__dict__
    row = group.printed
    return {
        "label": group.label,
        "format": group.format_text,
        "shared": group.shared if isinstance(group.shared, bool) else [*group.shared],
        "dataset": group.dataset,
        "runs": len(group.runs),
        "finished": len(group.finished),
        "figures": figures,
        "interval": None if group.interval is None else [*group.interval],
        "stopped": stopped_words(group),
        "parameters": dict(group.breakdown),
        "paper": None if row is None else {**row.__dict__, "same_data": group.same_data},
        "problem": group.problem,
    }


def _run_facts(run: Run) -> dict[str, Any]:
    names = ("name", "fold", "seed", "state", "message", "epoch", "epochs")
    facts = {name: getattr(run, name) for name in names}
    facts |= {"accuracy": run.accuracy, "clips": run.tested, "stopped": run.stopped}
    return {**facts, "path": str(run.path), "problems": [*run.problems], "top1": run.result.get("top1")}
