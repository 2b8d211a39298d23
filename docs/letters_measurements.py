"""What benchmarks/results/letters.json says of lip reading, for README.md and docs/choosing.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from measurements import read, table


def letters(brief: bool = False) -> str:
    """Lip reading with fair training, from benchmarks/results/letters.json; `brief` fits a phone."""
    data = read("letters")
    if data is None:
        return "No measurement is in `benchmarks/results` yet; `python -m benchmarks.letters` makes one."
    rows = sorted([*data["table"], *data["besides"]], key=lambda row: -row["accuracy"])
    beside = {row["name"] for row in data["besides"]}
    head: tuple[str, ...] = (
        "LSTM over pixels; *something else*", "accuracy", "95%", "minus dense", "minus dense, by structure", "seeds",
        "parameters of W", "ratio of W", "rate",
    )  # fmt: skip
    lines = [
        [
            f"*{row['name']}*" if row["name"] in beside else row["name"],
            _percent(row["accuracy"]),
            _span(row["interval"]),
            _gap(row["difference"]),
            _gap(row["difference_by_structure"]),
            f"{row['seeds']}",
            f"{row['params_w']:,}",
            f"{row['ratio_w']:,.0f}x" if row["ratio_w"] else "",
            _rate(row["settings"]),
        ]
        for row in rows
    ]
    if brief:  # without what is neither dense nor 300 times smaller, nor a format's second kind of training
        kept = [row["name"] in beside or row["name"].startswith("dense") or _small(row) for row in rows]
        lines = [line for line, keep in zip(lines, kept, strict=True) if keep]
        lines = [[line[0], f"{line[1]} ({line[2]})", line[6]] for line in lines]
        head = ("LSTM over pixels; *something else*", "accuracy, 95%", "weights of W")
    first, last = min(row["seeds"] for row in data["table"]), max(row["seeds"] for row in data["table"])
    seeds = f"{first} to {last} seeds" if first < last else f"{last} seeds" if last > 1 else "1 seed"
    about = (
        "26 letters from the lips of 10 people (AVLetters, 40 x 30 grey pixels, whole clips); trained on two "
        f"repetitions, tested on the third, {seeds}, intervals over clips and seeds. Every network had the same five "
        "trials on the training clips alone; accuracy of the last epoch, chance 4%. By structure: W has its own rate."
    )
    return "\n\n".join([table(head, lines), about, _letters_verdict(data)])


def _small(row: dict[str, Any]) -> bool:
    return (row["ratio_w"] or 0) >= 300 and "by structure" not in row["name"]


def _letters_verdict(data: dict[str, Any]) -> str:
    """What the comparison shows, and what it does not."""
    found = data["verdict"]
    if not found:
        return ""
    names = {row["name"]: row for row in [*data["table"], *data["besides"]]}
    compressed, dense, kcp = found["compressed"], found["dense"], found["kcp"]
    text, turned = "", data["rotation"]
    if turned:
        seeds = min(row["seeds"] for row in turned["rows"])
        text = (
            f"With each of {len(turned['rows'])} repetitions tested once, {seeds} seeds, and everything chosen on the "
            f"other clips, the best LSTM whose W is at least 300 times smaller minus the best dense one, whose W has a "
            f"learning rate of its own, is {_gap(turned['difference'])} points ({turned['clips']} clips). "
        )
    text += (
        f"On the third repetition alone, as in the table, {compressed} was chosen; minus {dense} it is "
        f"{_gap(found['compressed minus dense'])} points"
    )
    if kcp != compressed:
        text += f"; {kcp}, the best KCP, minus {compressed} is {_gap(found['kcp minus compressed'])}"
    people = names[compressed].get("talkers_difference" + ("_by_structure" if dense != "dense" else ""))
    if people:
        text += f", on people never seen {_gap(people)}"
    ridge = next((row for row in data["besides"] if row["name"].startswith("ridge")), None)
    best = max(data["table"], key=lambda row: row["accuracy"])
    if ridge is not None and ridge["accuracy"] > best["accuracy"]:
        text += (
            f". Ridge regression on the same pixels, {_percent(ridge['accuracy'])}, beats every LSTM here: compression "
            "makes a network small, it does not make raw pixels a good input"
        )
    return text + "."


def letters_rotation() -> str:
    """The best compressed network against the best dense one, each repetition tested once."""
    data = read("letters")
    found = data["rotation"] if data else {}
    if not found:
        return ""
    head = ("tested on", "best compressed", "weights of W", "accuracy", "best dense", "accuracy", "difference, 95%")
    lines = [
        [
            f"repetition {row['repetition']}", row["compressed"]["name"], f"{row['compressed']['params_w']:,}",
            _percent(row["compressed"]["accuracy"]), row["dense"]["name"], _percent(row["dense"]["accuracy"]),
            _gap(row["difference"]),
        ]
        for row in found["rows"]
    ]  # fmt: skip
    lines.append([f"all {found['clips']} clips", "", "", "", "", "", _gap(found["difference"])])
    return table(head, lines)


def letters_kcp() -> str:
    """What makes KCP weaker or stronger, from the same results."""
    data = read("letters")
    if data is None:
        return ""
    parts = []
    for question, lines in data["kcp"].items():
        if lines:
            body = [
                [line["label"], _percent(line["accuracy"]), _span(line["interval"]), _gap(line["difference"]),
                 f"{line['params_w']:,}"]
                for line in lines
            ]  # fmt: skip
            head = (question, "accuracy, inner split", "95%", "minus the first", "parameters of W")
            parts.append(table(head, body))
    return "\n\n".join(parts)


def letters_rates() -> str:
    """The best rate of each network at each width, and what another network's best rate costs."""
    data = read("letters")
    if data is None:
        return ""
    curves: dict[tuple[str, int], dict[str, dict[float, float]]] = {}
    for point in data["sweep"]:
        kinds = curves.setdefault((point["name"], point["hidden"]), {})
        kinds.setdefault(point["rates"], {})[point["rate"]] = point["accuracy"]

    def best(curve: dict[float, float]) -> str:
        rate = max(curve, key=lambda rate: curve[rate])
        return f"{rate:g}: {_percent(curve[rate])}"

    widths = sorted({hidden for _, hidden in curves}, reverse=True)
    lines = []
    for name in dict.fromkeys(name for name, _ in curves):
        kinds = [curves.get((name, hidden), {}).get(kind) for hidden in widths for kind in ("uniform", "structure")]
        lines.append([name, *("" if curve is None else best(curve) for curve in kinds)])
    head = ("LSTM", *(f"{hidden} units, {kind}" for hidden in widths for kind in ("uniform", "structure")))
    lost = "; ".join(
        f"`{kind}` {100 * facts['mean_loss']:.1f} points on average, at most {100 * facts['largest_loss']:.1f}"
        for kind, facts in data["transfer"].items()
    )
    return f"{table(head, lines)}\n\nLost at the best rate of another network or width of these: {lost}."


def _rate(settings: dict[str, Any]) -> str:
    return f"{settings['learning_rate']:g}" if "learning_rate" in settings else ""


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _span(pair: Sequence[float] | None) -> str:
    return "" if pair is None else f"{100 * pair[0]:.0f} to {100 * pair[1]:.0f}"


def _gap(triple: Sequence[float] | None) -> str:
    return "" if triple is None else f"{100 * triple[0]:+.1f} ({100 * triple[1]:+.1f} to {100 * triple[2]:+.1f})"
