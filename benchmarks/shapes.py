"""The layers that are measured: the paper's formats at the paper's shapes, our further formats beside them."""

from __future__ import annotations

from dataclasses import replace

import torch

from kronecell.formats import BT, CP, HT, KCP, KT, TR, TT, Format, LowRank, Tucker
from kronecell.nn.linear import TensorLinear
from kronecell.ops.choose import Product
from kronecell.paper.tables import paper_format
from kronecell.training.paper_settings import SETTINGS

GATES = 4
KCP_LABELS = {"UCF11": ("KCP(4,4,2)", "KCP(4,2,2)"), "UCF50": ("KCP(6,2,2)", "KCP(4,2,2)")}
MAIN = "KCP(4,4,2)"
CP_APART = "CP apart"  # CP with a factor for every single mode, as other libraries have it; ours joins m_i and n_i


def formats(dataset: str) -> dict[str, Format]:
    """All compressed formats of one data set by label."""
    setting = SETTINGS[dataset]
    found = {label: paper_format(dataset, label) for label in ("TT", "BT", "TR", "HT", *KCP_LABELS[dataset])}
    m, n = setting.m, setting.n
    more: dict[str, Format] = {
        "LowRank": LowRank(m, n, 8),
        "CP": CP(m, n, 8),
        CP_APART: KCP(m, n, 8, 1, 1, tie="all"),
        "Tucker": Tucker(m, n, 4),
        "KT": KT(m, n, 4),
    }
    return {**found, **more}


def small_formats() -> dict[str, Format]:
    """The same formats on a layer of 36 x 16, for a quick look whether everything runs."""
    m, n = (3, 2, 2, 3), (2, 2, 2, 2)
    return {
        "TT": TT(m, n, 2),
        "BT": BT(m, n, 2, P=2),
        "TR": TR(m, n, 2),
        "HT": HT(m, n, 2),
        MAIN: KCP(m, n, 2, 2, 2),
        "LowRank": LowRank(m, n, 2),
        "CP": CP(m, n, 2),
        "Tucker": Tucker(m, n, 2),
        "KT": KT(m, n, 2),
    }


def product_of(fmt: Format, rows: int, shared: bool = False, grad: bool = False) -> Product:
    """What `auto` chooses a plan for: four gates and the next power of two of the rows, float32 on the CPU.

    Inference is of frozen layers, which hold their products of weights.
    """
    with torch.set_grad_enabled(grad):
        layer = TensorLinear(fmt, gates=GATES, shared=shared, device="meta")
        return replace(layer.product(rows), device="cpu", frozen=not grad)
