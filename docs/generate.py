"""Fill the generated parts of README.md and docs/ from the library and benchmarks/results; draw; make the notebook.

    python docs/generate.py           write what has changed
    python docs/generate.py --check   say what is stale and exit with 1

A page marks a part with <!-- generated: NAME --> and <!-- end -->; NAME is a function below.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from doped_measurements import doped_dense, doped_ratios, doped_structures, doped_times
from letters_measurements import letters, letters_kcp, letters_rates, letters_rotation
from measurements import (
    NOTHING,
    accuracy,
    deployed,
    everyday,
    fits,
    g2p,
    headline,
    measured,
    one_step,
    sizes,
    table,
)
from notebook import NOTEBOOK, PAGE, notebook
from pictures import FOLDER, LABELS, drawings

from kronecell.cli.count import EXAMPLES
from kronecell.formats import FORMATS, parse
from kronecell.formats.paper_counting import paper_order
from kronecell.paper import tables as paper
from kronecell.training.experiment import describe_settings
from kronecell.training.paper_settings import SETTINGS

ROOT = Path(__file__).resolve().parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
PART = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.S)
NAMES = {"Ori": "dense", "TT": "TT, rank 4", "BT": "BT, rank 4, P = 2", "TR": "TR, ranks 5 and 10", "HT": "HT, rank 4"}


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
        order = paper_order(fmt) or next(iter(fmt.orders()))
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
    for dataset in SETTINGS:
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
        "multiply-adds, millions, the paper's order",
        "our best order",
        "splits",
    )
    note = "Counted by the library, one clip of six frames; `kronecell paper tables` prints it."
    return f"{note}\n\n{table(head, lines)}"


def settings() -> str:
    """Every setting of an experiment, from its dataclass."""
    lines = [[f"`{name}`", f"`{default}`", meaning, change] for name, default, meaning, change in describe_settings()]
    return table(("setting", "default", "meaning", "when to change it"), lines, texts=4)


PARTS: dict[str, Callable[[], str]] = {
    "formats": formats, "errata": errata, "model-ratios": model_ratios, "tables": tables, "costs": costs,
    "settings": settings, "measured": measured, "headline": headline, "fits": fits, "sizes": sizes,
    "letters": letters, "letters-kcp": letters_kcp, "letters-rates": letters_rates,
    "letters-rotation": letters_rotation, "doped-times": doped_times,
    **{f"doped-ratios-{task}": lambda task=task: doped_ratios(task) for task in ("text", "digits")},
    **{f"doped-structures-{task}": lambda task=task: doped_structures(task) for task in ("text", "digits")},
    "doped-dense": lambda: doped_dense("text"),
    "letters-brief": lambda: letters(brief=True),
    "accuracy": lambda: accuracy() or NOTHING,
    "g2p": g2p,
    "deployed": deployed,
    "one-step": one_step,
    "everyday": everyday,
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
    """Every page with generated parts, every picture and the notebook, as they should be."""
    found = {}
    for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        if PART.search(text):
            found[path] = filled(text, path)
    return found | drawings() | {NOTEBOOK: notebook(PAGE.read_text(encoding="utf-8"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is stale")
    check = parser.parse_args().check
    files = wanted()
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    left_over = [path for path in sorted(FOLDER.iterdir()) if path not in files] if FOLDER.is_dir() else []
    for path in [*stale, *left_over]:
        print(f"{'stale' if check else 'changed'}: {path.relative_to(ROOT)}", file=sys.stderr)
    if check:
        if stale or left_over:
            print("run: python docs/generate.py", file=sys.stderr)
            raise SystemExit(1)
        return
    FOLDER.mkdir(exist_ok=True)
    for path in stale:
        path.write_text(files[path], encoding="utf-8")
    for path in left_over:
        path.unlink()


if __name__ == "__main__":
    main()
