"""Fill the generated parts of README.md and docs/: tables from the library and benchmarks/results, and the drawings.

    python docs/generate.py           write what has changed
    python docs/generate.py --check   say what is stale and exit with 1

A page marks a part with <!-- generated: NAME --> and <!-- end -->; NAME is a function below.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from kronecell import paper
from kronecell.commands.count import EXAMPLES
from kronecell.drawing import draw
from kronecell.formats import FORMATS, Format, parse

ROOT = Path(__file__).resolve().parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
PART = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.S)
LABELS = ("Ori", "TT", "BT", "TR", "HT", "KCP(4,4,2)", "KCP(4,2,2)")
NAMES = {"Ori": "dense", "TT": "TT, rank 4", "BT": "BT, rank 4, P = 2", "TR": "TR, ranks 5 and 10", "HT": "HT, rank 4"}


def table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """A Markdown table; all but the first `texts` columns are aligned to the right."""
    marks = ["---" if i < texts else "---:" for i in range(len(head))]
    lines = [head, marks, *rows]
    return "\n".join(
        "| " + " | ".join(line) + " |" if line is not marks else "|" + "|".join(line) + "|" for line in lines
    )


def read(name: str) -> dict[str, Any] | None:
    """A result file, None before it has been made."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


@lru_cache
def rows_of(dataset: str | None = None) -> list[dict[str, Any]]:
    """The paper's tables, recomputed."""
    return paper.tables(dataset)


# Parts of pages -------------------------------------------------------------------------------------------------


def drawing(kind: str) -> str:
    order = next(iter(FORMATS[kind].orders(parse(EXAMPLES[kind]))))
    return f"![{kind.upper()}, order {order}](../drawings/{kind}-{order}.svg)"


def counts(kind: str) -> str:
    fmt = parse(EXAMPLES[kind])
    cls = type(fmt)
    plans = {name: fmt.plan(name) for name in [*fmt.orders(), "optimal"]}
    lines = [
        [
            f"`{name}`",
            f"{plan.macs:,}",
            f"{plan.macs / (fmt.M * fmt.N):.2%}",
            f"{plan.hoisted_macs:,}",
            f"{plan.peak:,}",
        ]
        for name, plan in plans.items()
    ]
    shared = fmt.network(4, True).num_params
    return "\n\n".join(
        [
            f"`{fmt}`: {fmt.num_params:,} parameters, {fmt.compression_ratio:,.0f}x fewer than dense. Four gates: "
            f"{fmt.network(4).num_params:,}, with shared weights {shared:,} (own per gate: {', '.join(fmt.unshared)}).",
            f"Space O({cls.space}), computation O({cls.computation}).",
            table(("order", "multiply-adds a row", "of dense", "once per update", "largest intermediate"), lines),
        ]
    )


def formats() -> str:
    lines = []
    for kind, text in EXAMPLES.items():
        fmt = parse(text)
        best = fmt.macs("optimal")
        order = paper.paper_order(fmt) or next(iter(fmt.orders()))
        lines.append(
            [f"[{kind}]({kind}.md)", f"`{type(fmt).equation}`", f"{fmt.num_params:,}", f"{fmt.compression_ratio:,.0f}x",
             f"{fmt.macs(order):,}", f"{best:,}"]
        )  # fmt: skip
    head = ("format", "equation", "parameters", "ratio", "multiply-adds, the paper's order", "our best order")
    return table(head, lines, texts=2)


def errata() -> str:
    lines = []
    for row in rows_of():
        for column, text in row["errata"].items():
            where = f"{row['dataset']}{', shared' if row['shared'] else ''}: {row['format']}"
            lines.append(
                [where, {"params": "parameters", "mflops": "MFLOPs"}[column], f"{row['printed'][column]:,}", text]
            )
    for row in paper.last_table():
        if row["erratum"]:
            printed = f"{row['printed']['params_millions']}M"
            lines.append([f"last table: {row['dataset']} {row['method']}", "model parameters", printed, row["erratum"]])
    for row in paper.kt_rank_text():
        if row["erratum"]:
            lines.append(
                [
                    f"text on the KT rank, {row['dataset']}",
                    f"MFLOPs of {row['format']}",
                    f"{row['printed']}",
                    row["erratum"],
                ]
            )
    return table(("where", "what", "printed", "should be"), lines, texts=4)


def model_ratios() -> str:
    lines = []
    for row in rows_of():
        if row["shared"] and row["format"].startswith(("KCP", "TT")):
            real = row["executed"]
            dense = paper_dense(row["dataset"])
            lines.append(
                [row["dataset"], f"{row['format']} shared", f"{real['params']:,}", f"{real['model_params']:,}",
                 f"{dense / real['params']:,.0f}x", f"{real['model_ratio']:,.1f}x"]
            )  # fmt: skip
    head = ("data", "format", "parameters of W", "of the model", "ratio of W", "ratio of the model")
    return table(head, lines, texts=2)


def paper_dense(dataset: str) -> int:
    fmt = paper.paper_format(dataset, "Ori")
    return 4 * fmt.M * fmt.N


def tables() -> str:
    parts = []
    for dataset in paper.SETTINGS:
        for shared in (False, True):
            lines = []
            for row in rows_of():
                if (row["dataset"], row["shared"]) != (dataset, shared):
                    continue
                printed, again, real = row["printed"], row["recomputed"], row["executed"]
                lines.append(
                    [row["format"], f"{printed['params']:,}", f"{again['params']:,}", f"{printed['mflops']:,}",
                     f"{again['mflops']:,.1f}", f"{real['mflops_paper_order']:,.1f}",
                     f"{real['mflops_best_order']:,.1f}", f"{real['model_ratio']:,.1f}x"]
                )  # fmt: skip
            head = (
                "format",
                "W printed",
                "recomputed",
                "MFLOPs printed",
                "recomputed",
                "as executed",
                "ours",
                "model ratio",
            )
            parts.append(f"### {dataset}, {'weights shared' if shared else 'no sharing'}\n\n{table(head, lines)}")
    return "\n\n".join(parts)


def costs() -> str:
    lines = []
    for label in LABELS:
        row = next(r for r in rows_of("UCF11") if r["format"] == label and not r["shared"])
        real = row["executed"]
        split = "yes" if label.startswith(("KCP", "TR")) else "no"
        lines.append(
            [NAMES.get(label, label), f"{real['params']:,}", f"{paper_dense('UCF11') / real['params']:,.0f}x",
             f"{real['model_ratio']:,.1f}x", f"{real['mflops_paper_order']:,.1f}",
             f"{real['mflops_best_order']:,.1f}", split]
        )  # fmt: skip
    head = (
        "UCF11 LSTM",
        "parameters of W",
        "ratio of W",
        "ratio of the model",
        "MFLOPs, the paper's order",
        "our best order",
        "splits",
    )
    note = "Counted by the library, one clip of six frames; `kronecell paper tables` prints it."
    return f"{note}\n\n{table(head, lines)}"


def measured() -> str:
    """Times of the products, from benchmarks/results/projection.json."""
    data = read("projection")
    if data is None:
        return "No measurement is in `benchmarks/results` yet; `python -m benchmarks.projection` makes one."
    parts = []
    for group in data["groups"]:
        if group["dataset"] != "UCF11" or group["threads"] != 1 or group["rows"] not in (1, 96):
            continue
        lines = []
        for label in ("TT", "BT", "TR", "HT", "KCP(4,4,2)", "KCP(4,2,2)", "LowRank", "CP", "Tucker", "KT"):
            case = _case(group, f"{label} unshared")
            if case:
                lines.append([label, f"{1e3 * case['seconds']:.3g}", _times(case, "dense")])
        dense = group["cases"].get("dense")
        if dense:
            lines.insert(0, ["dense", f"{1e3 * dense['seconds']:.3g}", "1"])
        parts.append(f"{group['title']}:\n\n{table(('layer', 'ms', 'times faster than dense'), lines)}")
    about = "x W of the UCF11 layer for all four gates, from `benchmarks/results/projection.json`."
    return "\n\n".join([about, *parts])


def _case(group: dict[str, Any], name: str) -> dict[str, Any] | None:
    """A layer as it runs: tuned if that is another way, else as the cost model has it."""
    return group["cases"].get(f"{name} auto") or group["cases"].get(f"{name} untuned")


def _times(case: dict[str, Any], reference: str) -> str:
    over = case.get("over", {}).get(reference)
    return f"{1 / over['seconds']:.3g}" if over else ""


def headline() -> str:
    """README: measured layers and LSTMs beside the dense ones, as far as results exist."""
    lstm, projection = read("lstm"), read("projection")
    if lstm is None and projection is None:
        return "No measurement is in `benchmarks/results` yet; `make bench` makes them."
    wanted_group = ("UCF11", 96, False, 1)
    groups = (projection or {"groups": []})["groups"]
    keys = [(g["dataset"], g["rows"], g["grad"], g["threads"]) for g in groups]
    product = groups[keys.index(wanted_group)] if wanted_group in keys else None
    whole = [g for g in (lstm or {"groups": []})["groups"] if (g["dataset"], g["threads"]) == ("UCF11", 1)]
    head, lines = ["UCF11, times faster than torch's"], [[f"`{label}`"] for label in LABELS[1:]]
    if product:
        head.append("x W, 96 rows")
        for line in lines:
            case = _case(product, f"{line[0].strip('`')} unshared")
            line.append(_times(case, "dense") + "x" if case else "")
    for group in whole:
        head.append(group["title"].removeprefix("UCF11, "))
        for line in lines:
            line.append(_lstm(group, line[0].strip("`")))
    source = "From `benchmarks/results`, made by `make bench`, filled in by `python docs/generate.py`."
    return f"{table(head, lines)}\n\n{source}"


def _lstm(group: dict[str, Any], label: str) -> str:
    faster = group["cases"].get(f"{label} unshared", {}).get("faster")
    return f"{faster['seconds']:.3g}x" if faster else ""


def fits() -> str:
    """Errors of fitting a random matrix at the paper's ranks, from benchmarks/results/decompose.json."""
    data = read("decompose")
    if data is None:
        return "No measurement is in `benchmarks/results` yet; `python -m benchmarks.decompose` makes one."
    lines = []
    for row in data["paper"]:
        fmt = parse(row["format"])
        lines.append([row["name"], f"{fmt.network(4).num_params:,}", f"{row['error']:.4f}", f"{row['seconds']:.0f}"])
    head = ("format", "parameters, four gates", "relative error of the fit", "seconds")
    return f"{table(head, lines)}\n\nFrom `benchmarks/results/decompose.json` (`python -m benchmarks.decompose`)."


# Pictures -------------------------------------------------------------------------------------------------------


def picture() -> str:
    """UCF11 LSTM: multiply-adds of a clip by the paper's order and by ours, and the parameters of W, as SVG."""
    left, right, top, step, width = 112, 500, 76, 38, 760
    bottom = top + step * len(LABELS)

    def x(value: float) -> float:
        return left + (math.log10(value) - math.log10(5)) / (math.log10(500) - math.log10(5)) * (right - left)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 56}" width="{width}" '
        f'height="{bottom + 56}" role="img" aria-label="multiply-adds and parameters of each format">'
        "<style>text{font:13px system-ui,'DejaVu Sans',sans-serif;fill:#1d2733}.t{fill:#51606e;font-size:12px}"
        ".b{font-weight:650}.e{text-anchor:end}</style>"
        f'<rect width="{width}" height="{bottom + 56}" fill="#fff"/>'
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#51606e"/></marker></defs>'
        '<text class="b" x="14" y="24">UCF11 LSTM: million multiply-adds of a clip, and parameters of W</text>'
        '<circle cx="20" cy="46" r="5" fill="#fff" stroke="#0b62a8" stroke-width="2"/>'
        '<text class="t" x="32" y="50">the order of the paper</text><circle cx="190" cy="46" r="6" fill="#0b62a8"/>'
        '<text class="t" x="202" y="50">our order: same matrix, same result</text>'
        f'<text class="t e" x="640" y="50">parameters of W</text><text class="t e" x="{width - 14}" y="50">ratio</text>'
    ]
    for value in (5, 10, 50, 100, 500):
        parts.append(
            f'<line x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{top - 8}" y2="{bottom}" stroke="#d5dce3"/>'
            f'<text class="t" text-anchor="middle" x="{x(value):.1f}" y="{bottom + 18}">{value}</text>'
        )
    parts.append(
        f'<text class="t" text-anchor="middle" x="{(left + right) / 2}" y="{bottom + 40}">'
        "million multiply-adds (logarithmic)</text>"
    )
    for number, label in enumerate(LABELS):
        real = next(r for r in rows_of("UCF11") if r["format"] == label and not r["shared"])["executed"]
        theirs, ours = real["mflops_paper_order"], real["mflops_best_order"]
        colour = "#b3362b" if label.startswith("KCP") else "#51606e" if label == "Ori" else "#0b62a8"
        y = top + step * number + 12
        parts.append(f'<text class="b" x="14" y="{y + 4}">{"dense" if label == "Ori" else label}</text>')
        if theirs > ours:
            parts.append(
                f'<line x1="{x(theirs) - 6:.1f}" x2="{x(ours) + 8:.1f}" y1="{y}" y2="{y}" stroke="#51606e" '
                'stroke-width="1.5" marker-end="url(#a)"/>'
                f'<circle cx="{x(theirs):.1f}" cy="{y}" r="5" fill="#fff" stroke="{colour}" stroke-width="2"/>'
                f'<text class="t" x="{x(theirs) + 10:.1f}" y="{y + 4}">{theirs:,.1f}</text>'
            )
        parts.append(
            f'<circle cx="{x(ours):.1f}" cy="{y}" r="6" fill="{colour}"/>'
            f'<text class="t e" x="{x(ours) - 10:.1f}" y="{y + 4}">{ours:,.1f}</text>'
            f'<text class="e" x="640" y="{y + 4}">{real["params"]:,}</text>'
            f'<text class="e b" x="{width - 14}" y="{y + 4}">{paper_dense("UCF11") / real["params"]:,.0f}x</text>'
        )
    return "".join([*parts, "</svg>\n"])


def drawings() -> dict[Path, str]:
    """Every file below docs/drawings."""
    found = {DOCS / "drawings" / "result.svg": picture()}
    for kind, text in EXAMPLES.items():
        fmt: Format = parse(text)
        names = [*fmt.orders()][:1] + (["algorithm2"] if kind == "kcp" else [])
        for name in names:
            svg = draw(fmt.plan(name), title=f"{kind.upper()}, order {name}", standalone=True)
            found[DOCS / "drawings" / f"{kind}-{name}.svg"] = svg + "\n"
    every = parse(EXAMPLES["kcp"] + ",tie=all")
    svg = draw(every.plan(), title="KCP of Theorem 1 (tie=all), order separable", standalone=True)
    found[DOCS / "drawings" / "kcp-all-separable.svg"] = svg + "\n"
    return found


PARTS: dict[str, Callable[[], str]] = {
    "formats": formats, "errata": errata, "model-ratios": model_ratios, "tables": tables, "costs": costs,
    "measured": measured, "headline": headline, "fits": fits,
    **{f"drawing-{kind}": lambda kind=kind: drawing(kind) for kind in EXAMPLES},
    **{f"counts-{kind}": lambda kind=kind: counts(kind) for kind in EXAMPLES},
}  # type: ignore[dict-item]  # fmt: skip


def filled(text: str, where: Path) -> str:
    """A page with its generated parts as they should be."""

    def replace(match: re.Match[str]) -> str:
        if match[2] not in PARTS:
            raise SystemExit(f"{where}: there is no generated part {match[2]!r}; there are {', '.join(PARTS)}")
        return f"{match[1]}\n{PARTS[match[2]]()}\n\n{match[3]}"

    return PART.sub(replace, text)


def wanted() -> dict[Path, str]:
    """Every page with generated parts and every picture, as they should be."""
    found = {}
    for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        if PART.search(text):
            found[path] = filled(text, path)
    return found | drawings()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is stale")
    check = parser.parse_args().check
    stale = [p for p, text in wanted().items() if not p.is_file() or p.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{'stale' if check else 'wrote'}: {path.relative_to(ROOT)}", file=sys.stderr)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted()[path], encoding="utf-8")
    if check and stale:
        print("run: python docs/generate.py", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
