"""The report as one HTML file: styles, script and data inside, nothing from the network, every name escaped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from kronecell.deploy.atomic import write_atomically
from kronecell.report.groups import CURVES, Group, group_runs, plain_name
from kronecell.report.load import Broken, Run, load_runs, number_of
from kronecell.report.markup import bullets, html_table, long
from kronecell.report.plans import PlanTable, plan_tables
from kronecell.report.tables import (
    AVERAGE,
    EPOCHS,
    FOOTNOTE,
    FORMAT,
    NAME,
    Cell,
    Column,
    percents,
    rounded,
    shown_columns,
    stopped_words,
    threads_words,
    titles,
)
from kronecell.training.intervals import wilson
from kronecell.training.protocol import counted

# The browser itself refuses every request of this page to anywhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
COSTS = {
    "params_w": "parameters of W",
    "params_model": "parameters of the model",
    "macs_executed": "multiply-adds of a clip, as executed",
    "macs_paper": "multiply-adds of a clip, by the paper's order",
    "latency_ms": "latency of a clip, ms, measured at batch 1",
}
SHORTEST = 4  # validated epochs that make a curve
METRICS = {"top1": "accuracy on validation", "loss": "training loss", "train_accuracy": "training accuracy"}


def write_report(
    runs: Iterable[Path | str],
    out: Path | str,
    title: str = "Kronecell report",
    notes: Sequence[str] = (),
    progress: Callable[[str], object] = lambda text: None,
) -> tuple[list[Group], list[Broken]]:
    """Write the page of all runs below the folders; `notes` appear under its title, `progress` gets each stage."""
    loaded, broken = load_runs(runs)
    groups = group_runs(loaded)
    text = page(groups, broken, title, notes, progress)
    write_atomically(Path(out), lambda path: path.write_text(text, encoding="utf-8"))
    return groups, broken


def asset(name: str) -> str:
    """A file of report/assets."""
    return (resources.files("kronecell.report") / "assets" / name).read_text(encoding="utf-8")


def embed(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page(
    groups: Sequence[Group],
    broken: Sequence[Broken],
    title: str,
    notes: Sequence[str] = (),
    progress: Callable[[str], object] = lambda text: None,
) -> str:
    """The whole document."""
    runs = [run for group in groups for run in group.runs]
    parts = [
        _notices(runs, broken, groups),
        _comparison(groups),
        _scatter(groups),
        _curves(groups),
        _parameters(groups),
        _plans(groups, progress),
        _runs(runs, broken),
        f'<div class="keep">{_protocol(groups)}{_environments(runs)}</div>',  # no nearly blank page ends a print
    ]
    sections = [f"<section>{part}</section>" for part in parts if part]
    states = [run.outcome for run in runs] + ["broken"] * len(broken)
    order = ("finished", "stopped", "running", "interrupted", "failed", "broken")
    found = ", ".join(f"{states.count(state)} {state}" for state in order if state in states)
    introduction = "".join(f"<p>{escape(note)}</p>" for note in notes)
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{asset('page.css')}</style></head>\n<body>"
        f'<header class="page"><h1>{escape(title)}</h1><p class="soft">'
        f"{counted(len(groups), 'experiment')}, {counted(len(states), 'run')}: {escape(found)}. "
        f"Written {made}.</p>{introduction}</header>\n"
        f"<main>{''.join(sections)}</main>"
        "<footer>Made by <code>kronecell report</code>. This file needs no network.</footer>"
        f'<script id="data" type="application/json">{embed(_data(groups))}</script>'
        f"<script>{asset('charts.js')}</script></body></html>\n"
    )


def _data(groups: Sequence[Group]) -> dict[str, Any]:
    """What the charts draw."""
    found = []
    for group in groups:
        accuracy, known = group.spread("accuracy"), group.interval
        low, high = known if known is not None else (None, None)
        costs = {key: spread.mean for key in COSTS if (spread := group.spread(key)) is not None}
        found.append(
            {
                "label": group.label,
                "format": group.format_text,
                "accuracy": None if accuracy is None else {**accuracy.__dict__, "from": low, "to": high},
                "stopped": stopped_words(group) if any(run.stopped == "time" for run in group.finished) else "",
                "costs": costs,
                "parameters": dict(group.breakdown),
                "total": total_words(group),
                "curves": {key: group.curve(key) for key in CURVES},
            }
        )
    return {"groups": found, "threads": threads_words(groups)}


def _notices(runs: Sequence[Run], broken: Sequence[Broken], groups: Sequence[Group]) -> str:
    parts = []
    running = [run for run in runs if run.state == "running"]
    if running:
        names = ", ".join(f"{_title(run)} (epoch {run.epoch} of {run.epochs})" for run in running)
        parts.append(f'<div class="notice"><b>Still running:</b> {escape(names)}. Their figures are not final.</div>')
    ends = {
        "time": "More time might raise these accuracies. The chart draws them as hollow points.",
        "patience": "The setting early_stop looks at the very clips that the accuracy is measured on, which flatters "
        "it a little.",
    }
    for reason, meaning in ends.items():
        stopped = [group for group in groups if any(run.stopped == reason for run in group.finished)]
        if stopped:
            names = "; ".join(f"{group.label}: {stopped_words(group)}" for group in stopped)
            parts.append(f'<div class="notice"><b>Stopped early.</b> {escape(names)}. {meaning}</div>')
    for run in runs:
        if run.state in ("failed", "interrupted"):
            words = f"{_title(run)} {run.state}: {run.message or 'no message'}"
            parts.append(f'<div class="notice">{escape(words)}</div>')
        if run.problems:
            parts.append(f'<div class="notice">{escape(_title(run))}: {escape("; ".join(run.problems))}</div>')
    parts += [
        f'<div class="notice bad"><b>Broken:</b> <code>{escape(str(b.path))}</code>: {escape(b.reason)}</div>'
        for b in broken
    ]
    parts += [
        f'<div class="notice bad">{escape(group.label)}: its format cannot be read: {escape(group.problem)}</div>'
        for group in groups
        if group.problem
    ]
    return "".join(parts)


def _comparison(groups: Sequence[Group]) -> str:
    columns = shown_columns(groups)
    text = "" if not any(column.paper for column in columns) else (
        "<p>Columns of the paper show what it prints for the same layer; its accuracies appear only where the data "
        "are the paper's.</p>"
    )  # fmt: skip
    foot = f'<p class="soft">{escape(FOOTNOTE)}</p>' if any(c.title.endswith("*") for c in columns) else ""
    first = _columns([column for column in columns if not column.detail], groups, "main sortable")
    second = _columns([NAME, *(column for column in columns if column.detail)], groups, "main")
    return (
        "<h2>Comparison</h2><p>The accuracy is that of the last epoch, with its 95% interval over clips and seeds: "
        "where two intervals overlap widely, these runs do not say which experiment is better. The ratio of W compares "
        "the input weights alone, as the paper does; the ratio of the model also counts the recurrent weights U and "
        'the classifier, which stay dense. <span class="wide-screen">Click a heading to sort.</span></p>'
        f'{first}<div class="keep"><h3>More of each experiment</h3><p>The best epoch was chosen on the very clips it '
        f"was measured on: it flatters, and no interval holds for it.</p>{text}{second}{foot}</div>"
    )


def _columns(columns: Sequence[Column], groups: Sequence[Group], name: str) -> str:
    heads = [(title, column.hint) for title, column in zip(titles(columns, groups), columns, strict=True)]
    body = [[column.cell(group) for column in columns] for group in groups]
    texts = {i for i, column in enumerate(columns) if column.text}
    classes = {i: "format" if c.title == FORMAT else "words" for i, c in enumerate(columns) if c.text and c != NAME}
    classes |= {i: "some" for i, column in enumerate(columns) if column.title in (EPOCHS, AVERAGE)}
    return html_table(heads, body, texts, name, classes)


def _options(choices: dict[str, str]) -> str:
    return "".join(f'<option value="{key}">{escape(words)}</option>' for key, words in choices.items())


def _scatter(groups: Sequence[Group]) -> str:
    whiskers = "95% intervals over clips and seeds" if all(g.interval for g in groups if g.finished) else (
        "95% intervals over clips and seeds where the number of clips is known, else from the worst to the best run"
    )  # fmt: skip
    hollow = (
        " Hollow: stopped by a time budget." if any(r.stopped == "time" for g in groups for r in g.finished) else ""
    )
    absent = ", ".join(group.label for group in groups if group.spread("accuracy") is None)
    without = f" Without a result, and not drawn: {escape(absent)}." if absent else ""
    return (
        f'<div class="keep"><h2>Accuracy against cost</h2><p>Accuracy of the last epoch, '
        f"means over folds and seeds; bars are {whiskers}."
        f'{hollow}{without}</p><div class="controls"><label>cost <select id="cost">{_options(COSTS)}</select></label>'
        '<label><input type="checkbox" id="logx" checked> log axis</label></div>'
        '<div class="chart" data-chart="scatter"></div></div>'
    )


def _curves(groups: Sequence[Group]) -> str:
    """Accuracy first, unless it was measured too rarely to be a curve."""
    points = max((len(group.curve("top1")) for group in groups), default=0)
    first = "top1" if points >= SHORTEST else "loss"
    metrics = {key: METRICS[key] for key in sorted(METRICS, key=lambda key: key != first)}
    counts = [[point["count"] for point in group.curve(first)] for group in groups]
    uneven = any(count and count[-1] < max(count) for count in counts)
    thin = " A line is thin where some of its runs have ended: there it is the mean of the others." if uneven else ""
    return (
        '<div class="keep"><h2>Learning curves</h2><p>Lines are means over folds and seeds, bands reach from '
        f'the lowest to the highest run.{thin} <span class="wide-screen">Click a name to hide it.</span></p>'
        f'<div class="controls"><label>show <select id="metric">{_options(metrics)}</select></label>'
        '<label>against <select id="base"><option value="epoch">epochs</option><option value="seconds">seconds'
        '</option></select></label><label><input type="checkbox" id="logy"> log axis</label></div>'
        '<div class="chart" data-chart="curves"></div></div>'
    )


def _parameters(groups: Sequence[Group]) -> str:
    names = [name for name in ("W", "U", "bias", "classifier", "other") if any(name in g.breakdown for g in groups)]
    heads = [("experiment", ""), *((name, "") for name in names), ("all", ""), ("W of all", "")]
    body = []
    for group in groups:
        parts, total = group.breakdown, sum(group.breakdown.values())
        if total:
            cells = [Cell(f"{parts[n]:,}", parts[n]) if n in parts else Cell("unknown") for n in names]
            share = parts["W"] / total
            last = Cell(f"{share:.1%}", share) if "classifier" in parts else Cell("unknown")
            body.append([Cell(group.label), *cells, Cell(total_words(group), total), last])
    return (
        '<div class="keep"><h2>Where the parameters are</h2><p>Once W is compressed, the recurrent weights U are '
        "nearly all of the model: a ratio of W says little about the file on disk. All bars have one scale.</p>"
        f'<div class="chart" data-chart="bars"></div></div><div class="keep"><h3>In numbers</h3>'
        f"{html_table(heads, body, {0}, 'cards')}</div>"
    )


def total_words(group: Group) -> str:
    """Parameters of the model, as far as they are known: a run without a result does not say how many classes."""
    total = f"{sum(group.breakdown.values()):,}"
    return total if "classifier" in group.breakdown else f"{total} without classifier"


def _plans(groups: Sequence[Group], progress: Callable[[str], object]) -> str:
    parts = [
        "<h2>How each format is contracted</h2><p>Each tensor carries the number of the step that contracts it. Green "
        "steps need no input: they run once per weight update. Red steps run for every row of x.</p>"
    ]
    seen: set[tuple[Any, ...]] = set()
    for group in groups:
        key = (group.format_text, str(group.shared), group.gates, group.rows)
        if key in seen:
            continue
        progress(f"plans of {group.label}")
        tables = plan_tables(group)
        if tables:
            seen.add(key)
            inside = "".join(_plan(table) for table in tables)
            parts.append(
                f"<details><summary>{escape(group.label)}: {escape(group.format_text)}</summary>{inside}</details>"
            )
    return "".join(parts) if seen else ""


def _plan(table: PlanTable) -> str:
    heads = [("step", ""), ("contract", ""), ("legs that stay", ""), ("multiply-adds", ""), ("when", "")]
    body = [
        [Cell(number), Cell(pair), Cell(out), Cell(f"{macs:,}"), Cell(when)]
        for number, pair, out, macs, when in table.rows
    ]
    return (
        f'<div class="plan"><h3>{escape(table.title)}</h3><div class="drawing">{table.svg}</div>'
        f"{html_table(heads, body, {0, 1, 2}, 'steps')}"
        f"<p>{table.macs:,} multiply-adds a row, {table.hoisted:,} once per weight update, largest intermediate "
        f"{table.peak:,} elements. {escape(table.after)}</p></div>"
    )


def _title(run: Run) -> str:
    name = plain_name(run.name, str(run.config.get("format")))
    return f"{name} fold {run.fold} seed {run.seed}" if run.fold is not None else f"{name} ({run.path.name})"


def _runs(runs: Sequence[Run], broken: Sequence[Broken]) -> str:
    rows: list[tuple[str, ...]] = []
    for run in runs:
        shown = ""
        if run.finished and run.accuracy is not None:
            known = wilson(run.accuracy * run.tested, run.tested) if run.tested else None
            shown = percents(run.accuracy, known)
        hash_ = str(run.result.get("manifest_hash") or "")[:12]
        seconds = number_of(run.result.get("seconds"))
        epochs = f"{run.epoch:,}" + (f" of {run.epochs:,}" if run.epochs else "")
        spent = "" if seconds is None else rounded(seconds, 0)
        rows.append((_title(run), run.outcome, epochs, shown, spent, hash_, str(run.path)))
    rows += [(f"{b.path.parent.name}/{b.path.name}", "broken", "", "", "", "", str(b.path)) for b in broken]
    heads = ("run", "state", "epochs", "accuracy at the last epoch", "seconds of training", "data (hash)", "folder")
    texts = {0: "text", 1: "text state", 5: "text mono", 6: "text mono wrap"}
    top = "".join(f'<th scope="col" class="{"text" if i in texts else ""}">{name}</th>' for i, name in enumerate(heads))
    lines = []
    for row in rows:
        cells = (
            f'<td data-label="{heads[i]}" class="{texts.get(i, "")}{f" {cell}" * (i == 1)}">{escape(cell)}</td>'
            for i, cell in enumerate(row)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<h2>Runs</h2><div class="wide{long(rows)}"><table class="main runs"><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _protocol(groups: Sequence[Group]) -> str:
    """Deviations from the paper's protocol: those of all first, then each experiment's own."""
    lists = {}
    for group in groups:
        texts = [t for run in group.finished for t in run.result.get("deviations") or () if isinstance(t, str)]
        if texts:
            lists[group.label] = [*dict.fromkeys(texts)]
    if not lists:
        return ""
    common = [text for text in next(iter(lists.values())) if all(text in texts for texts in lists.values())]
    parts = ["<h2>Where this differs from the paper's protocol</h2>"]
    if common:
        parts.append(f"<p>All experiments:</p>{bullets(common)}")
    own = {label: [text for text in texts if text not in common] for label, texts in lists.items()}
    inside = "".join(f"<div><h3>{escape(label)}</h3>{bullets(texts)}</div>" for label, texts in own.items() if texts)
    return "".join(parts) + (f'<div class="lists">{inside}</div>' if inside else "")


def _environments(runs: Sequence[Run]) -> str:
    """Each distinct machine and set of versions once, with the runs made there."""
    found: dict[str, list[str]] = {}
    for run in runs:
        if run.environment:
            found.setdefault(json.dumps(run.environment, sort_keys=True, default=str), []).append(_title(run))
    parts = ["<h2>Environment</h2>"] if found else []
    for text, names in found.items():
        facts = json.loads(text)
        body = [[Cell(str(key)), Cell(_plainly(value))] for key, value in facts.items()]
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        parts.append(
            f"<p class=soft>{escape(shown)}</p>{html_table([('', ''), ('', '')], body, {0, 1}, 'facts', {1: 'wrap'})}"
        )
    return "".join(parts)


def _plainly(value: object) -> str:
    """A fact of an environment for a reader: "yes" for true, "torch 2.13, numpy 2.4" for a table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plainly(item)}" for key, item in value.items())
    return value if isinstance(value, str) else json.dumps(value)
