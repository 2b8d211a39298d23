"""Fill the generated parts of README.md and docs/ from the library and benchmarks/results; draw; make the notebook.

    python docs/generate.py           write what has changed
    python docs/generate.py --check   say what is stale and exit with 1

A page marks a part with <!-- generated: NAME --> and <!-- end -->; NAME is a function below.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

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
NOTHING = "No measurement is in `benchmarks/results` yet; `python -m benchmarks.surveillance` makes one."
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
    return _digits(1 / over["seconds"]) if over else ""


def _digits(value: float) -> str:
    """Three digits that count, large numbers as a person writes them."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def headline() -> str:
    """README: everything measured, as far as results exist."""
    parts = [part for part in (speed(), accuracy(brief=True), besides()) if part]
    source = "From `benchmarks/results`, filled in by `python docs/generate.py`; `make bench` measures speed anew."
    return "\n\n".join([*parts, source]) if parts else "No measurement is in `benchmarks/results` yet."


def speed() -> str:
    """How many times faster than torch: products and whole LSTMs."""
    lstm, projection = read("lstm") or {"groups": []}, read("projection") or {"groups": []}
    wanted_group = ("UCF11", 96, False, 1)
    products = [g for g in projection["groups"] if (g["dataset"], g["rows"], g["grad"], g["threads"]) == wanted_group]
    whole = [g for g in lstm["groups"] if (g["dataset"], g["threads"]) == ("UCF11", 1)]
    if not products and not whole:
        return ""
    lines = [[label, *(_lstm(group, label) for group in whole)] for label in LABELS[1:]]
    head = ["format", *(group["title"].split(", ", 1)[1].removesuffix(", 1 thread") for group in whole)]
    for words in (" x 6 frames", " x 1 frames", ", inference", " step"):
        head = [title.replace(words, "") for title in head]
    cases = [(label, _case(group, f"{label} unshared")) for group in products for label in LABELS[1:]]
    alone = ", ".join(f"{label} {_times(case, 'dense')}x" for label, case in cases if case)
    return (
        "How many times faster than torch's the UCF11 LSTM is on one thread, in inference and in a training step; "
        f"clips of 6 frames in batches of 16, one frame in a batch of 1:\n\n{table(head, lines)}\n\n"
        f"The product x W alone, 96 rows: {alone}."
    )


def accuracy(brief: bool = False) -> str:
    """Cross validation on real video, from benchmarks/results/surveillance.json; `brief` fits a phone."""
    data = read("surveillance")
    if data is None:
        return ""
    head = ("real video, two classes", "accuracy", "sd over folds", "runs", "parameters of W", "ratio of W", "of model")
    lines = [
        [f"`{'dense' if row['format'] == 'Ori' else row['format']}`", f"{row['accuracy']:.1f}%",
         f"{row['spread_over_folds']:.1f}", f"{row['runs']}", f"{row['params_w']:,}", f"{row['ratio_w']:,.0f}x",
         f"{row['ratio_model']:,.1f}x"]
        for row in data["rows"]
    ]  # fmt: skip
    above = [row["accuracy"] - 50 for row in data["rows"]]
    honest = f"The formats lie {min(above):.0f} to {max(above):.0f} points above chance, within each other's spread: "
    honest += "raw pixels of 300 clips do not separate them."
    if brief:
        few = [[line[0].strip("`"), f"{line[1]} ± {line[2]}", line[4]] for line in lines]
        about = "Accuracy on 300 real clips of two classes, mean and standard deviation over 5 folds; chance is 50%:"
        return f"{about}\n\n{table(('format', 'accuracy', 'parameters of W'), few)}\n\n{honest}"
    return f"{table(head, lines)}\n\n{data['protocol']} {honest}"


def letters() -> str:
    """Lip reading with fair training, from benchmarks/results/letters.json."""
    data = read("letters")
    if data is None:
        return "No measurement is in `benchmarks/results` yet; `python -m benchmarks.letters` makes one."

    def whole(value: float) -> str:
        return f"{100 * value:.1f}%"

    def span(pair: Sequence[float] | None) -> str:
        return "" if pair is None else f"{100 * pair[0]:.0f} to {100 * pair[1]:.0f}"

    def gap(triple: Sequence[float] | None) -> str:
        return "" if triple is None else f"{100 * triple[0]:+.1f} ({100 * triple[1]:+.1f} to {100 * triple[2]:+.1f})"

    rows = sorted(data["table"], key=lambda row: -row["accuracy"])
    lines = [
        [row["name"], whole(row["accuracy"]), span(row["interval"]), gap(row["difference"]), f"{row['params_w']:,}",
         f"{row['ratio_w']:,.0f}x", f"{row['settings']['learning_rate']:g}"]
        for row in rows
    ]  # fmt: skip
    head = ("LSTM over raw pixels", "accuracy", "95%", "minus dense", "parameters of W", "ratio of W", "rate")
    seeds = sorted({row["seeds"] for row in rows})
    runs = (
        f"{seeds[0]} seed"
        if seeds == [1]
        else f"{seeds[0]} to {seeds[-1]} seeds"
        if len(seeds) > 1
        else f"{seeds[0]} seeds"
    )
    beside = "; ".join(f"{row['name']} {whole(row['accuracy'])} ({span(row['interval'])})" for row in data["besides"])
    compressed = [row for row in rows if row["difference"] is not None]
    better = [row["name"] for row in compressed if row["difference"][1] > 0]
    worse = [row["name"] for row in compressed if row["difference"][2] < 0]
    verdict = (
        f"Told apart from dense by a 95% interval of the difference: better {', '.join(better) or 'none'}; worse "
        f"{', '.join(worse) or 'none'}."
    )
    return "\n\n".join(
        [
            table(head, lines),
            "26 letters from the lips of 10 people (AVLetters, 40 x 30 grey pixels, whole clips); trained on two "
            f"repetitions, tested on the third, {runs}. Every format had the same five trials on the training clips "
            f"alone; accuracy of the last epoch, chance is 4%. {verdict}"
            + (f" On the same clips: {beside}." if beside else ""),
        ]
    )


def besides() -> str:
    """One line for each of the other results."""
    lines, video, fits = [], read("data"), read("decompose")
    if video:
        ratio = video["decode"]["ratio_without_startup"]
        lines.append(f"- Decoding video: {ratio:.2f} times the frames a second of ffmpeg, one thread each.")
    if fits:
        ratios = [row["time_ratio"] for row in fits["tensorly"]]
        errors = [row["error_ratio"] for row in fits["tensorly"]]
        lines.append(
            f"- Decompositions against tensorly: {1 / max(ratios):.1f} to {1 / min(ratios):.1f} times as fast, errors "
            f"{min(errors):.2f} to {max(errors):.2f} of its."
        )
    return "\n".join(lines)


def _lstm(group: dict[str, Any], label: str) -> str:
    faster = group["cases"].get(f"{label} unshared", {}).get("faster")
    return f"{_digits(faster['seconds'])}x" if faster else ""


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


def sizes() -> str:
    """Recurrent layers of everyday sizes beside torch's, from benchmarks/results/recurrence.json."""
    data = read("recurrence")
    if data is None:
        return "No measurement is in `benchmarks/results` yet; `python -m benchmarks.recurrence` makes one."
    columns: dict[str, None] = {}
    found: dict[str, dict[str, str]] = {}
    for group in data["groups"]:
        column = "training" if group["grad"] else f"{group['batch']} x {group['steps']}"
        columns[column] = None
        line = found.setdefault(f"{group['cell']} {group['size']}, `{group['recipe']}`", {})
        line[column] = f"{_digits(group['faster']['torch.nn']['seconds'])}x"
    lines = [[name, *(line.get(column, "") for column in columns)] for name, line in found.items()]
    about = (
        "W and U in the format, input size and hidden size the same, one thread: times faster than `torch.nn` (batch x "
        "steps, frozen for inference). From `benchmarks/results/recurrence.json`, which has int8 and ONNX Runtime, too."
    )
    return f"{about}\n\n{table(('layer', *columns), lines)}"


def settings() -> str:
    """Every setting of an experiment, from its dataclass."""
    lines = [[f"`{name}`", f"`{default}`", meaning, change] for name, default, meaning, change in describe_settings()]
    return table(("setting", "default", "meaning", "when to change it"), lines, texts=4)


PARTS: dict[str, Callable[[], str]] = {
    "formats": formats, "errata": errata, "model-ratios": model_ratios, "tables": tables, "costs": costs,
    "settings": settings, "measured": measured, "headline": headline, "fits": fits, "sizes": sizes,
    "letters": letters, "accuracy": lambda: accuracy() or NOTHING,
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
