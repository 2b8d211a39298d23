"""The targets for speed and memory beside the measured figures, from the result files.

python -m benchmarks.acceptance [--results FOLDER]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.projection import FORWARD, FROZEN, LEARNING
from benchmarks.results import Options, main, table, write
from benchmarks.shapes import CP_APART, MAIN

MEGABYTE = 2**20
SAME = {"TT": ("TT", "BlockTT"), "BT": ("BT",), "TR": ("TR",), CP_APART: ("CP",)}  # ours: names in the peers
PAPER_FORMATS = ("TT", "BT", "TR", "HT", "KCP(4,4,2)", "KCP(4,2,2)")


@dataclass(frozen=True)
class Point:
    """One target: at most or at least a value."""

    what: str
    measured: float | None
    target: float
    at_most: bool
    note: str = ""

    @property
    def holds(self) -> str:
        """yes, no, or not measured."""
        if self.measured is None:
            return "not measured"
        return "yes" if (self.measured <= self.target if self.at_most else self.measured >= self.target) else "**no**"

    @property
    def line(self) -> tuple[str, ...]:
        """For the table."""
        figure = "" if self.measured is None else f"{self.measured:.2f}"
        return self.what, figure, f"{'at most' if self.at_most else 'at least'} {self.target:g}", self.holds, self.note


def group(results: dict[str, Any] | None, **wanted: Any) -> dict[str, Any]:
    """The cases of the group with these properties; none if it was not measured."""
    for found in (results or {}).get("groups", []):
        if all(found[key] == value for key, value in wanted.items()):
            cases: dict[str, Any] = found["cases"]
            return cases
    return {}


def auto(cases: dict[str, Any], label: str, shared: bool) -> dict[str, Any] | None:
    """A format as `auto` runs it: tuned where that is another way."""
    name = f"{label} {'shared' if shared else 'unshared'}"
    return cases.get(f"{name} auto") or cases.get(f"{name} untuned")


def over(case: dict[str, Any] | None, reference: str) -> float | None:
    """Time over that of a reference in the same rounds."""
    found = (case or {}).get("over", {}).get(reference)
    return found["seconds"] if found else None


def times(slow: dict[str, Any] | None, fast: dict[str, Any] | None) -> float | None:
    """How many times faster the second is, by medians of the same rounds."""
    return slow["seconds"] / fast["seconds"] if slow and fast else None


def inverse(value: float | None) -> float | None:
    """1 / value."""
    return 1 / value if value else None


def projection_points(results: dict[str, Any] | None) -> list[Point]:
    """The layer in KCP(4,4,2), unshared, and all formats against peers."""
    forward = {rows: group(results, dataset="UCF11", rows=rows, grad=False, threads=1) for rows in (1, 6, 96, 384)}
    both = group(results, dataset="UCF11", rows=96, grad=True, threads=1)
    main_case = {rows: auto(cases, MAIN, False) for rows, cases in forward.items()}
    trained = auto(both, MAIN, False)
    peers = {name: case for name, case in forward[96].items() if name.startswith(("tednet", "tensorly-torch"))}
    trains = [case for name, case in peers.items() if " TT" in name or "BlockTT" in name]
    ways = (("frozen, with products of weights held", FROZEN), ("with what the backward needs", LEARNING))
    ratios = [(what, over(trained, name)) for what, name in ways]
    others = "; ".join(f"over the forward {what}: {value:.2f}" for what, value in ratios if value)
    ordinary = [(rows, over(forward[rows].get(f"{MAIN} unshared ordinary"), "dense")) for rows in (1, 96)]
    beside = "; ".join(f"not frozen, {rows} rows: {inverse(value):.2f}" for rows, value in ordinary if value)
    byte, way = forward[384].get(f"{MAIN} unshared uint8"), "untuned"
    if f"{MAIN} unshared auto" in forward[384]:
        way = "auto"

    def fastest(cases: list[Any]) -> Any:
        return min(cases, key=lambda case: case["seconds"], default=None)

    nearest = min(peers, key=lambda name: peers[name]["seconds"], default="")
    points = [
        Point("forward, 96 rows, over the skinny GEMM", over(main_case[96], "skinny GEMM"), 1.2, True),
        Point("forward, 384 rows, over X.sum()", over(main_case[384], "X.sum()"), 2.0, True),
        Point("forward, 1 row, over the skinny GEMM", over(main_case[1], "skinny GEMM"), 1.5, True),
        Point("forward, 96 rows, faster than dense", inverse(over(main_case[96], "dense")), 22, False, beside),
        Point("faster than the fastest peer layer", times(peers.get(nearest), main_case[96]), 2, False, nearest),
        Point("faster than the fastest peer TT", times(fastest(trains), main_case[96]), 5, False),
        Point("forward and backward, 96 rows, faster than dense", inverse(over(trained, "dense")), 20, False),
        Point("forward and backward over forward, 96 rows", over(trained, FORWARD), 2.3, True, others),
        Point("uint8 over float32 input, 384 rows", over(byte, f"{MAIN} unshared {way}"), 1.0, True),
    ]
    return [Point(f"{MAIN}: {p.what}", p.measured, p.target, p.at_most, p.note) for p in points] + same_format(
        forward, both
    )


def same_format(forward: dict[int, dict[str, Any]], both: dict[str, Any]) -> list[Point]:
    """Every format against the same format in the peers, and against dense."""
    points = []
    for label, names in SAME.items():
        for shared in (False, True):
            ending = "" if shared else ", four layers"
            fits = {f"{library} {name}{ending}" for library in ("tednet", "tensorly-torch") for name in names}
            peers = {name: case for name, case in forward[96].items() if name in fits}
            nearest = min(peers, key=lambda name: peers[name]["seconds"], default="")
            value = times(peers.get(nearest), auto(forward[96], label, shared))
            points.append(Point(f"{_name(label, shared)}: faster than the same in a peer", value, 2, False, nearest))
    for label in PAPER_FORMATS:
        for shared in (False, True):
            found = []
            for rows, cases in [*forward.items(), (96, both)]:
                value = over(auto(cases, label, shared), "dense")
                if value is not None:
                    found.append((value, f"{rows} rows{', with backward' if cases is both else ''}"))
            value, where = max(found, default=(None, ""))
            points.append(Point(f"{_name(label, shared)}: over dense at its worst", value, 1, True, where))
    return points


def _name(label: str, shared: bool) -> str:
    return f"{label} {'shared' if shared else 'unshared'}"


def auto_points(results: dict[str, Any] | None) -> list[Point]:
    """The choice against the best candidate and the paper's order."""
    products = (results or {}).get("products", [])
    points = []
    for key, what in (("tuned_ratio", "auto, tuned, over the best candidate"), ("model_ratio", "the same untuned")):
        worst = max(products, key=lambda item: item[key], default=None)
        note = ""
        if worst:
            within = sum(item[key] <= 1.15 for item in products)
            how = "training" if worst["grad"] else "inference"
            note = f"{_name(worst['format'], worst['shared'])}, {worst['rows']} rows, {how}; "
            note += f"{within} of {len(products)} within 1.15"
        points.append(Point(f"{what}, at its worst", worst and worst[key], 1.15, True, note))
    run_too = [item for item in products if item["paper_ratio"]]
    slower = max((item["tuned_ratio"] / item["paper_ratio"] for item in run_too), default=None)
    note = f"run for {len(run_too)} of {len(products)}, the others are predicted to be far slower"
    points.append(Point("auto over the paper's order, at its worst", slower, 1.0, True, note))
    return points


def lstm_points(results: dict[str, Any] | None) -> list[Point]:
    """Whole LSTMs."""
    points = []
    for grad, what, target in ((False, "inference", 50), (True, "training step", 25)):
        cases = group(results, dataset="UCF11", batch=16, grad=grad, threads=1)
        case = cases.get(f"{MAIN} unshared")
        faster = case["faster"]["seconds"] if case and case["faster"] else None
        ordinary = cases.get(f"{MAIN} unshared ordinary")
        beside = f"not frozen: {ordinary['faster']['seconds']:.2f}" if ordinary and ordinary["faster"] else ""
        points.append(Point(f"LSTM UCF11 16 x 6, {what}: faster than nn.LSTM", faster, target, False, beside))
        peers = {name: found for name, found in cases.items() if name.startswith("tednet")}
        nearest = min(peers, key=lambda name: peers[name]["seconds"], default="")
        value = times(peers.get(nearest), case)
        points.append(Point(f"LSTM UCF11 16 x 6, {what}: faster than any peer", value, 5, False, nearest))
        value = times(peers.get(nearest), cases.get(f"{MAIN} shared"))
        name = f"LSTM UCF11 16 x 6, {what}, shared as the peer is: faster than any peer"
        points.append(Point(name, value, 5, False, nearest))
    for dataset, batch, label, target in (("UCF50", 2, "KCP(6,2,2)", 8), ("UCF11", 1, MAIN, 100)):
        cases = group(results, dataset=dataset, batch=batch, grad=False, threads=1)
        case, ordinary = cases.get(f"{label} unshared"), cases.get(f"{label} unshared ordinary")
        faster = case["faster"]["seconds"] if case and case["faster"] else None
        beside = f"not frozen: {ordinary['faster']['seconds']:.2f}" if ordinary and ordinary["faster"] else ""
        what = f"LSTM {dataset}, {label}, batch {batch}{', one step' if batch == 1 else ''}: faster than nn.LSTM"
        points.append(Point(what, faster, target, False, beside))
    return points


def memory_points(results: dict[str, Any] | None) -> list[Point]:
    """Peak memory of KCP."""
    found = [
        case for case in (results or {}).get("cases", []) if case["format"].startswith("KCP") and "above_x" in case
    ]
    worst = max(found, key=lambda case: case["above_x"], default=None)
    value = worst["above_x"] / MEGABYTE if worst else None
    note = _name(worst["format"], worst["shared"]) if worst else ""
    return [Point("KCP: peak of forward and backward above x, MB, 96 rows", value, 10, True, note)]


def run(options: Options) -> None:
    """Print the table and write it."""
    read = {name: options.read(name) for name in ("projection", "auto", "lstm", "memory")}
    points = [
        *projection_points(read["projection"]),
        *auto_points(read["auto"]),
        *lstm_points(read["lstm"]),
        *memory_points(read["memory"]),
    ]
    lines = table(("point", "measured", "target", "holds", "note"), [point.line for point in points])
    print(lines)
    held = sum(point.holds == "yes" for point in points)
    text = f"""# Targets and measured figures

Figures are ratios within one run of each benchmark, from the result files in this folder; {held} of {len(points)} hold.

{lines}"""
    data = {"points": [{**vars(point), "holds": point.holds == "yes"} for point in points]}
    write(options, "acceptance", data, text)


if __name__ == "__main__":
    main(run, __doc__)
