"""The paper's tables and curves, recomputed from networks and orders beside the printed values.

The counting convention of the tables, which gives 83 of the 88 printed figures (the other five are errata):
MFLOPs = [ 6 steps * (gates * one W x + gates * H^2) + H * classes ] / 1e6: multiply-adds, bias and gates excluded.
KCP rows count Algorithm 2. Where the paper's convention is not what a machine stores or executes (see
`formats.paper_counting`), both values are given.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kronecell.errors import ShapeError
from kronecell.formats import BT, HT, KCP, TR, TT, Dense, Format
from kronecell.formats.paper_counting import paper_macs, paper_order, paper_params
from kronecell.paper.printed import KT_RANK_TEXT, LAST_TABLE, REASONS, TABLES, Printed, PrintedModel
from kronecell.training.paper_settings import SETTINGS, TR_M

STEPS = 6  # frames of a clip
ROWS = 96  # rows for which our best order is chosen: 16 clips of 6 frames
GATES = {"LSTM": 4, "GRU": 3}


def paper_format(dataset: str, label: str) -> Format:
    """The format of a column: "Ori", "TT", "BT", "TR", "HT" or "KCP(K,CA,CB)"."""
    if dataset not in SETTINGS:
        raise ShapeError(f"unknown data set {dataset!r}; the paper has {', '.join(SETTINGS)}")
    s = SETTINGS[dataset]
    if label.startswith("KCP("):
        K, CA, CB = (int(rank) for rank in label[4:-1].split(","))
        return KCP(s.m, s.n, K, CA, CB)
    if label == "TR":  # r_0 = r_8 = 10, all others equal; 8 input and 5 output modes
        ranks = [s.tr_rank] * 13
        ranks[0] = ranks[8] = 10
        return TR(TR_M, s.tr_n, tuple(ranks))
    simple: dict[str, Format] = {
        "Ori": Dense(s.m, s.n),
        "TT": TT(s.m, s.n, s.rank),
        "BT": BT(s.m, s.n, s.rank, P=2),
        "HT": HT(s.m, s.n, s.rank),
    }
    if label not in simple:
        raise ShapeError(f"unknown column {label!r}; the paper has {', '.join(simple)}, TR and KCP(K,CA,CB)")
    return simple[label]


def mflops(wx: int, gates: int, hidden: int, classes: int) -> float:
    """MFLOPs of a whole network for one clip from the multiply-adds of W x for all gates and one frame."""
    return (STEPS * (wx + gates * hidden**2) + hidden * classes) / 1e6


@lru_cache(maxsize=64)
def _ours(fmt: Format, gates: int, shared: bool) -> tuple[int, int]:
    plan = fmt.plan("optimal", ROWS, gates=gates, shared=shared)
    return plan.macs, plan.hoisted_macs


def recompute(row: Printed) -> dict[str, Any]:
    """One column of a comparison table: printed, recomputed, errata, and what a machine really stores and executes."""
    s, fmt, gates = SETTINGS[row.dataset], paper_format(row.dataset, row.format), GATES["LSTM"]
    shared = row.shared and row.format != "Ori"
    dense = gates * fmt.M * fmt.N
    params = paper_params(fmt, gates, shared)
    true_params = fmt.network(gates, shared).num_params
    counted = mflops(paper_macs(fmt, gates, shared), gates, s.hidden, s.classes)
    executed = fmt.plan(paper_order(fmt), ROWS, gates=gates, shared=shared).macs
    best, hoisted = _ours(fmt, gates, shared)
    rest = gates * s.hidden**2 + s.hidden * s.classes  # U and the classifier stay dense here
    printed = {"top1": row.top1, "avg": row.avg, "params": row.params, "ratio": row.ratio, "mflops": row.mflops}
    recomputed = {"params": params, "ratio": dense / params, "mflops": round(counted, 4)}
    return {
        "dataset": row.dataset,
        "shared": row.shared,
        "format": row.format,
        "spec": str(fmt),
        "printed": printed,
        "recomputed": recomputed,
        "errata": errata(row, params, counted),
        "executed": {
            "params": true_params,
            "mflops_paper_order": round(mflops(executed, gates, s.hidden, s.classes), 4),
            "mflops_best_order": round(mflops(best, gates, s.hidden, s.classes), 4),
            "hoisted_macs_best_order": hoisted,
            "model_params": true_params + rest,
            "model_ratio": (dense + rest) / (true_params + rest),
        },
    }


def errata(row: Printed, params: int, counted: float) -> dict[str, str]:
    """Columns whose printed figure is not the recomputed one at the printed precision, with the reason where known."""
    found = {}
    if row.params != params:
        found["params"] = f"{params:,}"
    if abs(row.mflops - counted) > 0.05 + 1e-9:
        found["mflops"] = f"{counted:.1f}"
    return {
        column: f"{value} ({REASONS.get((row.dataset, row.shared, row.format, column), 'reason unknown')})"
        for column, value in found.items()
    }


def tables(dataset: str | None = None) -> list[dict[str, Any]]:
    """All columns of the six comparison tables, or of the two of one data set."""
    chosen = _dataset(dataset)
    return [recompute(row) for row in TABLES if chosen is None or row.dataset == chosen]


def last_table(dataset: str | None = None) -> list[dict[str, Any]]:
    """The parameter column of the last table: W (shared) + U + classifier, in millions, printed and recomputed."""
    chosen = _dataset(dataset)
    return [_last_row(row) for row in LAST_TABLE if chosen is None or row.dataset == chosen]


def _last_row(row: PrintedModel) -> dict[str, Any]:
    s, fmt, gates = SETTINGS[row.dataset], paper_format(row.dataset, row.format), GATES[row.cell]
    w, u, classifier = paper_params(fmt, gates, True), s.hidden**2, s.hidden * s.classes
    params = w + gates * u + classifier
    digits = 1 if row.params_millions > 1 else 3
    erratum = ""
    if round(params / 1e6, digits) != row.params_millions:
        one_u = round((w + u + classifier) / 1e6, digits) == row.params_millions
        eleven = round((w + gates * u + s.hidden * SETTINGS["UCF11"].classes) / 1e6, digits) == row.params_millions
        erratum = f"{params / 1e6:.{digits}f}M"
        if one_u:
            erratum += f" (the printed figure counts one of the {gates} recurrent matrices)"
        elif eleven:
            erratum += " (the printed figure has the classifier of UCF11, 11 classes instead of 47)"
    dense = gates * fmt.M * fmt.N + gates * u + classifier
    return {
        "dataset": row.dataset,
        "method": row.method,
        "spec": str(fmt),
        "cell": row.cell,
        "printed": {"top1": row.top1, "params_millions": row.params_millions, "mflops": row.mflops},
        "recomputed": {
            "params": params,
            "params_millions": round(params / 1e6, digits),
            "mflops": round(mflops(paper_macs(fmt, gates, True), gates, s.hidden, s.classes), 4),
        },
        "erratum": erratum,
        "model_ratio": dense / params,
    }


def kt_rank_text(dataset: str | None = None) -> list[dict[str, Any]]:
    """The MFLOPs in the text on the KT rank; "(2,2,4)" is printed where the figures are those of (2,4,4)."""
    chosen = _dataset(dataset)
    rows = []
    for name, label, meant, printed in KT_RANK_TEXT:
        if chosen is not None and name != chosen:
            continue
        s, values = SETTINGS[name], {}
        for column in dict.fromkeys((label, meant)):
            fmt = paper_format(name, column)
            values[column] = round(mflops(paper_macs(fmt, 4, False), 4, s.hidden, s.classes), 4)
        erratum = "" if label == meant else f"the figure belongs to {meant}"
        rows.append({"dataset": name, "format": label, "printed": printed, "recomputed": values, "erratum": erratum})
    return rows


def _dataset(name: str | None) -> str | None:
    if name is None:
        return None
    matches = [known for known in SETTINGS if known.lower() == name.lower()]
    if not matches:
        raise ShapeError(f"unknown data set {name!r}; the paper has {', '.join(SETTINGS)}")
    return matches[0]


def complexity(
    ranks: range = range(1, 17), d: int = 4, m: int = 20, n: int = 8, P: int = 2, K: int = 4
) -> dict[str, Any]:
    """The two curves of the complexity figure: parameters and multiply-adds of one W x against the rank r = CA = CB."""
    shape = ((m,) * d, (n,) * d)
    curves: dict[str, dict[str, list[int]]] = {}
    for label in ("TT", "BT", "TR", "HT", "KCP", "KCP separable"):
        params, macs = [], []
        for r in ranks:
            fmt: Format
            if label == "TT":
                fmt = TT(*shape, r)
            elif label == "BT":
                fmt = BT(*shape, r, P=P)
            elif label == "TR":
                fmt = TR(*shape, r)
            elif label == "HT":
                fmt = HT(*shape, r)
            else:
                fmt = KCP(*shape, K, r, r)
            params.append(fmt.num_params)
            macs.append(fmt.macs("separable" if label == "KCP separable" else paper_order(fmt)))
        curves[label] = {"params": params, "macs": macs}
    return {"d": d, "m": m, "n": n, "P": P, "K": K, "ranks": [*ranks], "curves": curves}
