"""Parts of README.md and docs/ that come from benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pictures import LABELS

from kronecell.formats import parse

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
NOTHING = "No measurement is in `benchmarks/results` yet; `python -m benchmarks.surveillance` makes one."


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


def deployed() -> str:
    """Every way out of Python, from benchmarks/results/deploy.json."""
    data = read("deploy")
    if data is None:
        return "No measurement is in `benchmarks/results` yet; `python -m benchmarks.deploy` makes one."
    networks, steps = data["networks"], data["steps"]
    head, lines = ["way"], {name: [name] for name in networks[0]["ways"]}
    for number, network in enumerate(networks):
        letter = "AB"[number]
        head += [f"{letter}: file, KB", "memory, MB", "1 step, us", f"{steps} steps, us"]
        for name, way in network["ways"].items():
            times = (f"{_digits(1e6 * way[part]['seconds'])}" for part in ("step", "steps"))
            lines[name] += [_digits(way["bytes"] / 1024), _digits(way["memory"] / 2**20), *times]
    titles = "; ".join(f"{'AB'[number]}: {network['title']}" for number, network in enumerate(networks))
    about = (
        f"{titles}. Batch 1, one thread, medians. Memory is that of a process with all its libraries. From "
        "`benchmarks/results/deploy.json`; `python -m benchmarks.deploy` measures it anew."
    )
    return f"{table(head, list(lines.values()))}\n\n{about}"


def one_step() -> str:
    """A step of C files beside our operators, from benchmarks/results/deploy_steps.json."""
    data = read("deploy_steps")
    if data is None:
        return "No measurement is in `benchmarks/results` yet; `python -m benchmarks.deploy` makes one."
    found: dict[str, list[str]] = {}
    for row in data["steps"]:
        over = f"{row['over_call']['seconds']:.2f} ({row['over_sequence']['seconds']:.1f})"
        found.setdefault(row["network"], [row["network"]]).extend([over, f"{row['text']:,}"])
    head = ("network", "float", "code", "8 bits", "code", "4 bits", "code")
    return table(head, list(found.values()))


def g2p() -> str:
    """Error against bytes of a trained model, from benchmarks/results/g2p.json."""
    data = read("g2p")
    if data is None:
        return "No measurement is in `benchmarks/results` yet; `python -m benchmarks.g2p` makes one."
    names = {
        "float": "float32", "int8": "torch's dynamic int8", "bits": "`kc.quantize`, {target:g} bits",
        "plain": "`kc.compress(size=...)`", "further": "float32, trained further",
        "trained": "`kc.compress(size=..., train=...)`",
    }  # fmt: skip
    lines = []
    for row in data["rows"]:
        if row.get("seed"):
            continue
        rates = [f"{row[what]:.1f} ± {row[what + '_half']:.1f}" for what in ("per", "wer")]
        above = f"{row['above']:+.2f} ± {row['above_half']:.2f}" if row["kind"] not in ("float", "further") else ""
        latency = f"{row['ms']:.2f}" if row["ms"] else ""
        name = names[row["kind"]].format(target=row.get("target", 0))
        if row["name"].endswith("onnxruntime"):
            name = "float32 in ONNX Runtime" if row["kind"] == "float" else "ONNX Runtime's dynamic int8"
        lines.append([name, f"{row['ratio']:.1f}x", f"{row['bytes']:,}", *rates, above, latency])
    head = ("model", "smaller", "bytes", "phonemes wrong, %", "words wrong, %", "points above float", "ms a word")
    about = (
        f"{data['steps']} steps of training, minutes on one core. What was trained is compared with the float model "
        "trained with the same data and steps, on the same words. ± is a 95% interval over words."
    )
    trained = [row for row in data["rows"] if row["kind"] == "trained"]
    several = sorted({row["target"] for row in trained if row.get("seed")})
    for target in several:
        found = [f"{row['above']:+.2f}" for row in trained if row["target"] == target]
        about += f" At {target:g} times, {len(found)} seeds give {', '.join(found)}."
    return f"{table(head, lines)}\n\n{about}"


def everyday() -> str:
    """Two networks of everyday sizes, from benchmarks/results/everyday.json."""
    data = read("everyday")
    if data is None:
        return "No measurement is in `benchmarks/results` yet; `python -m benchmarks.everyday` makes one."
    whole = {row["case"]: row["bytes"] for row in data["rows"] if row["how"] == "trained here"}
    names = {"digits": "spoken digits", "text": "characters"}
    lines = []
    for row in data["rows"]:
        how = "float32" if row["how"] == "trained here" else f"`kc.compress({row['how']})`"
        how = f"`{row['how'].split(',')[0]}`,{row['how'].split(',')[1]}" if "quantize" in row["how"] else how
        smaller, seconds = f"{whole[row['case']] / row['bytes']:.1f}x", f"{row['seconds']:.0f}"
        lines.append([names[row["case"]], how, smaller, f"{row['bytes']:,}", row["score_text"], seconds])
    silence = max((row["longest_silence"] for row in data["rows"] if not row.get("trained", True)), default=0.0)
    about = (
        "Accuracy with its 95% interval, or the perplexity of a character. Seconds are of the whole call on a core "
        f"that other work shared. Without training, the longest time between two lines of progress was {silence:.0f} s."
    )
    return f"{table(('network', 'what', 'smaller', 'bytes', 'score', 'seconds'), lines)}\n\n{about}"
