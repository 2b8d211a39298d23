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
from kronecell.report.load import Broken, Run, load_runs
from kronecell.report.plans import PlanTable, plan_tables
from kronecell.report.tables import (
    FOOTNOTE,
    FORMAT,
    NAME,
    Cell,
    Column,
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
        _protocol(groups),
        _environments(runs),
    ]
    sections = [f"<section>{part}</section>" for part in parts if part]
    states = [run.state for run in runs] + ["broken"] * len(broken)
    found = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
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
    stopped = [group for group in groups if any(run.stopped == "time" for run in group.finished)]
    if stopped:
        names = "; ".join(f"{group.label}: {stopped_words(group)}" for group in stopped)
        words = f"{names}. With more time it might do better: hollow points."
        parts.append(f'<div class="notice"><b>Not finished.</b> {escape(words)}</div>')
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
        "<p>Values of the paper are printed ones, for the same layer; its accuracies stand only beside the same data "
        "set.</p>"
    )  # fmt: skip
    foot = f'<p class="soft">{escape(FOOTNOTE)}</p>' if any(c.title.endswith("*") for c in columns) else ""
    first = _columns([column for column in columns if not column.detail], groups, "main sortable")
    second = _columns([NAME, *(column for column in columns if column.detail)], groups, "main")
    return (
        "<h2>Comparison</h2><p>The headline is the accuracy of the last epoch with its 95% interval, over the clips it "
        "was measured on and over seeds: two experiments whose intervals overlap widely have not been told apart. "
        "Two ratios, which differ widely: that of W, the input weights, which is the paper's figure, and that of the "
        "whole model, whose recurrent weights U and classifier stay dense. Click a heading to sort.</p>"
        f"{first}<h3>More of each experiment</h3><p>The best epoch was chosen on the very clips it was measured on, so "
        f"it flatters.</p>{text}{second}{foot}"
    )


def _columns(columns: Sequence[Column], groups: Sequence[Group], name: str) -> str:
    heads = [(title, column.hint) for title, column in zip(titles(columns, groups), columns, strict=True)]
    body = [[column.cell(group) for column in columns] for group in groups]
    texts = {i for i, column in enumerate(columns) if column.text}
    classes = {i: "format" if c.title == FORMAT else "words" for i, c in enumerate(columns) if c.text and c != NAME}
    return _table(heads, body, texts, name, classes)


def _table(
    heads: Sequence[tuple[str, str]],
    body: Sequence[Sequence[Cell]],
    texts: set[int],
    name: str,
    classes: dict[int, str] | None = None,
) -> str:
    """A table whose `texts` columns are text; with "sortable" in its name the headings are buttons."""
    sort = "sortable" in name
    parts = [f'<div class="wide"><table class="{name}"><thead><tr>']
    for i, (title, hint) in enumerate(heads):
        words = f'<button type="button">{escape(title)}</button>' if sort else escape(title)
        parts.append(f'<th scope="col" title="{escape(hint)}"{_class(i, texts, {})}>{words}</th>')
    parts.append("</tr></thead><tbody>")
    for line in body:
        parts.append("<tr>")
        for i, cell in enumerate(line):
            order = "" if cell.order is None else escape(str(cell.order))
            words = (
                escape(cell.text).replace(",", ",<wbr>") if (classes or {}).get(i) == "format" else escape(cell.text)
            )
            parts.append(f'<td data-sort="{order}"{_class(i, texts, classes or {})}>{words}</td>')
        parts.append("</tr>")
    return "".join([*parts, "</tbody></table></div>"])


def _class(i: int, texts: set[int], classes: dict[int, str]) -> str:
    names = " ".join(filter(None, ("text" if i in texts else "", classes.get(i, ""))))
    return f' class="{names}"' if names else ""


def _options(choices: dict[str, str]) -> str:
    return "".join(f'<option value="{key}">{escape(words)}</option>' for key, words in choices.items())


def _scatter(groups: Sequence[Group]) -> str:
    whiskers = "95% intervals over clips and seeds" if all(g.interval for g in groups if g.finished) else (
        "95% intervals over clips and seeds where the number of clips is known, else from the worst to the best run"
    )  # fmt: skip
    hollow = (
        " Hollow: stopped by a time budget." if any(r.stopped == "time" for g in groups for r in g.finished) else ""
    )
    return (
        f'<div class="keep"><h2>Accuracy against cost</h2><p>Accuracy of the last epoch, '
        f"means over folds and seeds; bars are {whiskers}."
        f'{hollow}</p><div class="controls"><label>cost <select id="cost">{_options(COSTS)}</select></label>'
        '<label><input type="checkbox" id="logx" checked> log axis</label></div>'
        '<div class="chart" data-chart="scatter"></div></div>'
    )


def _curves(groups: Sequence[Group]) -> str:
    """Top-1 first, unless it was measured too rarely to be a curve."""
    points = max((len(group.curve("top1")) for group in groups), default=0)
    first = "top1" if points >= SHORTEST else "loss"
    metrics = {key: METRICS[key] for key in sorted(METRICS, key=lambda key: key != first)}
    return (
        '<div class="keep"><h2>Learning curves</h2><p>Lines are means over folds and seeds, bands reach from '
        f'the lowest to the highest run.</p><div class="controls">'
        f'<label>show <select id="metric">{_options(metrics)}</select></label>'
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
            body.append([Cell(group.label), *cells, Cell(f"{total:,}", total), Cell(f"{share:.1%}", share)])
    return (
        '<div class="keep"><h2>Where the parameters are</h2><p>Once W is compressed, the recurrent weights U are '
        "nearly all of the model: a ratio of W says little about the file on disk. All bars have one scale.</p>"
        '<div class="chart" data-chart="bars"></div>' + _table(heads, body, {0}, "plain")
    )


def _plans(groups: Sequence[Group], progress: Callable[[str], object]) -> str:
    parts = ["<h2>How each format is contracted</h2><p>Numbers on the tensors are those of the steps; green steps "
             "need no input and are done once per weight update, red ones for every row.</p>"]  # fmt: skip
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
        f"{_table(heads, body, {0, 1, 2}, 'plain')}"
        f"<p>{table.macs:,} multiply-adds a row, {table.hoisted:,} once per weight update, largest intermediate "
        f"{table.peak:,} elements. {escape(table.after)}</p></div>"
    )


def _title(run: Run) -> str:
    name = plain_name(run.name, str(run.config.get("format")))
    return f"{name} fold {run.fold} seed {run.seed}" if run.fold is not None else f"{name} ({run.path.name})"


def _runs(runs: Sequence[Run], broken: Sequence[Broken]) -> str:
    rows = []
    for run in runs:
        shown = f"{100 * run.accuracy:.1f}%" if run.finished and run.accuracy is not None else ""
        if run.tested and shown:
            low, high = wilson(float(run.accuracy or 0) * run.tested, run.tested)
            shown += f" ({100 * low:.0f} to {100 * high:.0f})"
        hash_ = str(run.result.get("manifest_hash") or "")[:12]
        seconds = run.result.get("seconds")
        cells = (
            f"{run.epoch}" + (f" of {run.epochs}" if run.epochs else "") + (", stopped" if run.stopped else ""),
            shown,
            f"{seconds:,.0f}" if isinstance(seconds, int | float) else "",
        )
        rows.append(
            f'<tr><td class="text">{escape(_title(run))}</td><td class="text state {run.state}">{run.state}</td>'
            + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            + f'<td class="text mono">{escape(hash_)}</td><td class="text mono wrap">{escape(str(run.path))}</td></tr>'
        )
    for b in broken:
        name = escape(f"{b.path.parent.name}/{b.path.name}")
        rows.append(
            f'<tr><td class="text">{name}</td><td class="text state broken">broken</td>{"<td></td>" * 4}'
            f'<td class="text mono wrap">{escape(str(b.path))}</td></tr>'
        )
    heads = "".join(
        f'<th{" class=text" if text else ""}>{name}</th>'
        for name, text in (("run", 1), ("state", 1), ("epochs", 0), ("accuracy, last epoch", 0),
                           ("seconds of training", 0), ("data (hash)", 1), ("folder", 1))
    )  # fmt: skip
    return (
        f'<h2>Runs</h2><div class="wide"><table class="main"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
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
        parts.append(f"<p>All experiments:</p>{_bullets(common)}")
    own = {label: [text for text in texts if text not in common] for label, texts in lists.items()}
    inside = "".join(f"<div><h3>{escape(label)}</h3>{_bullets(texts)}</div>" for label, texts in own.items() if texts)
    return "".join(parts) + (f'<div class="lists">{inside}</div>' if inside else "")


def _bullets(texts: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def _environments(runs: Sequence[Run]) -> str:
    """Each distinct machine and set of versions once, with the runs made there."""
    found: dict[str, list[str]] = {}
    for run in runs:
        if run.environment:
            found.setdefault(json.dumps(run.environment, sort_keys=True, default=str), []).append(_title(run))
    parts = ["<h2>Environment</h2>"] if found else []
    for text, names in found.items():
        facts = json.loads(text)
        body = [
            [Cell(str(key)), Cell(value if isinstance(value, str) else json.dumps(value))]
            for key, value in facts.items()
        ]
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        parts.append(
            f"<p class=soft>{escape(shown)}</p>{_table([('', ''), ('', '')], body, {0, 1}, 'plain', {1: 'wrap'})}"
        )
    return "".join(parts)
