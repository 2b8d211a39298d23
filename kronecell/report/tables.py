"""The comparison table: one row per experiment, for HTML, Markdown and JSON alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kronecell.report.groups import Group, Spread, printed_params
from kronecell.report.load import Broken, Run

FIGURES = (
    "top1", "avg", "params_w", "params_model", "ratio_w", "ratio_model", "macs_paper", "macs_executed", "macs_hoisted",
    "step_ms", "latency_ms", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """What is shown, and the number it is sorted by."""

    text: str
    order: float | str | None = None


EMPTY = Cell("")
FORMAT = "format of W"


@dataclass(frozen=True)
class Column:
    """A title, an explanation, and how a group fills it."""

    title: str
    hint: str
    cell: Callable[[Group], Cell]
    paper: bool = False  # a column of printed values
    text: bool = False


def percent(spread: Spread | None) -> Cell:
    """87.1 % ± 0.4, the deviation over folds and seeds."""
    if spread is None:
        return EMPTY
    deviation = "" if spread.deviation is None else f" ± {100 * spread.deviation:.1f}"
    return Cell(f"{100 * spread.mean:.1f}%{deviation}", spread.mean)


def _whole(key: str) -> Callable[[Group], Cell]:
    def cell(group: Group) -> Cell:
        value = group.value(key)
        return EMPTY if value is None else Cell(f"{value:,.0f}", value)

    return cell


def _times(key: str, digits: int) -> Callable[[Group], Cell]:
    def cell(group: Group) -> Cell:
        value = group.value(key)
        return EMPTY if value is None else Cell(f"{value:,.{digits}f}x", value)

    return cell


def _millions(key: str) -> Callable[[Group], Cell]:
    def cell(group: Group) -> Cell:
        value = group.value(key)
        return EMPTY if value is None else Cell(f"{value / 1e6:,.1f}", value)

    return cell


def _mean(key: str, digits: int) -> Callable[[Group], Cell]:
    def cell(group: Group) -> Cell:
        spread = group.spread(key)
        return EMPTY if spread is None else Cell(f"{spread.mean:,.{digits}f}", spread.mean)

    return cell


def _printed(read: Callable[[Group], float | None], digits: int = 1, accuracy: bool = False) -> Callable[[Group], Cell]:
    def cell(group: Group) -> Cell:
        if group.printed is None or (accuracy and not group.same_data):
            return EMPTY
        value = read(group)
        return EMPTY if value is None else Cell(f"{value:,.{digits}f}", value)

    return cell


def _printed_w(group: Group) -> Cell:
    pair = printed_params(group)
    if pair is None:
        return EMPTY
    printed, counted = pair
    return Cell(f"{printed:,}" + (f" (should be {counted:,})" if printed != counted else ""), printed)


def _runs(group: Group) -> Cell:
    done = len(group.finished)
    states = [run.state for run in group.runs if not run.finished]
    rest = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return Cell(f"{done} finished" + (f", {rest}" if rest else ""), done)


def _format(group: Group) -> Cell:
    shared = group.shared
    how = "" if shared is False else ", shared" if shared is True else f", own {' '.join(map(str, shared))}"
    return Cell(group.format_text + how, group.format_text)


COLUMNS = (
    Column("experiment", "its name", lambda group: Cell(group.label, group.label.lower()), text=True),
    Column("top-1", "best epoch, mean and deviation over the runs", lambda group: percent(group.spread("top1"))),
    Column("avg", "mean of the last epochs, then over the runs", lambda group: percent(group.spread("avg"))),
    Column(
        "top-1 in the paper", "printed, only for the same data set",
        _printed(lambda group: group.printed.top1 if group.printed else None, accuracy=True), True,
    ),
    Column("parameters of W", "input weights of all gates", _whole("params_w")),
    Column("W in the paper", "printed for the same layer", _printed_w, True),
    Column("ratio of W", "dense W over W: the paper's compression ratio", _times("ratio_w", 0)),
    Column("ratio of model", "whole model, U and classifier counted", _times("ratio_model", 1)),
    Column("million multiply-adds", "for one clip, as executed", _millions("macs_executed")),
    Column("by the paper's order", "for one clip, in millions, by the paper's count", _millions("macs_paper")),
    Column(
        "MFLOPs in the paper", "printed for the same layer",
        _printed(lambda group: group.printed.mflops if group.printed else None), True,
    ),
    Column("latency ms", "one clip, measured", _mean("latency_ms", 1)),
    Column("step ms", "one training step, measured", _mean("step_ms", 0)),
    Column("runs", "folds and seeds", _runs, text=True),
    Column(FORMAT, "format, modes and ranks of the input weights", _format, text=True),
)  # fmt: skip


def shown_columns(groups: Sequence[Group]) -> list[Column]:
    """All columns but those of the paper that no group fills."""
    return [column for column in COLUMNS if not column.paper or any(column.cell(group).text for group in groups)]


def markdown(groups: Sequence[Group], broken: Sequence[Broken] = ()) -> str:
    """The table for a README or a pull request."""
    columns = shown_columns(groups)

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(_plain(cell) for cell in cells) + " |"

    marks = ["---" if column.text else "---:" for column in columns]
    lines = [line([column.title for column in columns]), "|" + "|".join(marks) + "|"]
    lines += [line([column.cell(group).text for column in columns]) for group in groups]
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
        "parameters": dict(group.breakdown),
        "paper": None if row is None else {**row.__dict__, "same_data": group.same_data},
        "problem": group.problem,
    }


def _run_facts(run: Run) -> dict[str, Any]:
    names = ("name", "fold", "seed", "state", "message", "epoch", "epochs")
    facts = {name: getattr(run, name) for name in names}
    return {**facts, "path": str(run.path), "problems": [*run.problems], "top1": run.result.get("top1")}
