"""What a compression did, per layer and in total, with every number measured on the model that is returned."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronecell.compress.matrices import Matrix
from kronecell.nn.hidden import macs_of
from kronecell.nn.linear import TensorLinear
from kronecell.ops.choose import executed_macs

LATENCY_RUNS = 5


@dataclass(frozen=True)
class LayerReport:
    """One matrix (all gates, both directions); multiply-adds are per row of x, latency is for `rows` rows."""

    name: str
    shape: tuple[int, int, int, int]  # directions, gates, M, N
    format: str
    params_before: int
    params_after: int
    error: float
    calibration_error: float | None
    macs_before: int
    macs_after: int
    latency_ms_before: float
    latency_ms_after: float

    @property
    def ratio(self) -> float:
        """Parameters before over after."""
        return self.params_before / self.params_after


@dataclass(frozen=True)
class Report:
    """All matched matrices, and the totals: theirs, and those of the whole model with everything else counted."""

    layers: tuple[LayerReport, ...]
    model_params_before: int
    model_params_after: int
    rows: int

    @property
    def params_before(self) -> int:
        """Of the matched matrices."""
        return sum(layer.params_before for layer in self.layers)

    @property
    def params_after(self) -> int:
        """Of the matched matrices."""
        return sum(layer.params_after for layer in self.layers)

    @property
    def ratio(self) -> float:
        """Of the matched matrices."""
        return self.params_before / self.params_after

    @property
    def model_ratio(self) -> float:
        """Of the whole model: biases, uncompressed matrices and everything else counted."""
        return self.model_params_before / self.model_params_after

    def record(self) -> dict[str, Any]:
        """In JSON's types."""
        names = ("params_before", "params_after", "ratio", "model_params_before", "model_params_after", "model_ratio")
        totals = {name: getattr(self, name) for name in (*names, "rows")}
        return {"layers": [asdict(layer) | {"ratio": layer.ratio} for layer in self.layers], "totals": totals}

    def to_json(self) -> str:
        """The record as text."""
        return json.dumps(self.record(), indent=1)

    def __str__(self) -> str:
        header = ("layer", "format", "before", "after", "ratio", "error", "on data", "multiply-adds", "ms")
        lines = [header]
        for layer in self.layers:
            seen = "" if layer.calibration_error is None else f"{layer.calibration_error:.4f}"
            sizes = (f"{layer.params_before:,}", f"{layer.params_after:,}", f"{layer.ratio:,.1f}")
            macs = f"{layer.macs_before:,} -> {layer.macs_after:,}"
            latency = f"{layer.latency_ms_before:.3f} -> {layer.latency_ms_after:.3f}"
            lines.append((layer.name, layer.format, *sizes, f"{layer.error:.4f}", seen, macs, latency))
        for name, before, after in (
            ("these matrices", self.params_before, self.params_after),
            ("whole model", self.model_params_before, self.model_params_after),
        ):
            lines.append((name, "", f"{before:,}", f"{after:,}", f"{before / after:,.1f}", "", "", "", ""))
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        return "\n".join(
            "  ".join(
                c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )


@torch.no_grad()
def measure(
    model: nn.Module,
    matrices: list[Matrix],
    dense: Mapping[str, list[Tensor]],
    inputs: Mapping[str, Tensor],
    params_before: int,
    rows: int,
) -> Report:
    """The report of a compressed model beside the dense weights it came from, (gates, M, N) per direction."""
    layers = []
    for matrix in matrices:
        owner = model.get_submodule(matrix.module)
        parts = [getattr(owner, name) for name in matrix.weight_names] if matrix.part != "weight" else [owner]
        layers.append(_layer(matrix, parts, dense[matrix.name], inputs.get(matrix.name), rows))
    after = sum(parameter.numel() for parameter in model.parameters())
    return Report(tuple(layers), params_before, after, rows)


def _layer(matrix: Matrix, parts: list[Any], dense: list[Tensor], X: Tensor | None, rows: int) -> LayerReport:
    compressed = [part if isinstance(part, TensorLinear) else None for part in parts]
    count, macs, errors, seen, norms, seen_norms = 0, 0, 0.0, 0.0, 0.0, 0.0
    for part, W in zip(compressed, dense, strict=True):
        if part is None:
            count, macs = count + W.numel(), macs + W.numel()
            new = W
        else:
            count += sum(p.numel() for p in part.factors().values())
            # U runs inside the recurrence, split or dense, and not by the plan of a layer.
            macs += macs_of(part)[0] if matrix.part == "weight_hh" else executed_macs(part.plan(rows))
            new = part.dense_weight().reshape(matrix.gates, matrix.N, matrix.M).transpose(1, 2)
        errors, norms = errors + _square(W - new), norms + _square(W)
        if X is not None:
            seen, seen_norms = seen + _square(X @ (W - new)), seen_norms + _square(X @ W)
    x = dense[0].new_zeros(rows, matrix.M)
    weights = [W.transpose(1, 2).reshape(-1, matrix.M).contiguous() for W in dense]
    before_ms = sum(_milliseconds(lambda w=weight: F.linear(x, w)) for weight in weights)
    after_ms = before_ms
    if all(part is not None for part in compressed):
        after_ms = sum(_milliseconds(lambda p=part: p(x)) for part in compressed)
    fmt = next((str(part.format) for part in compressed if part is not None), "dense")
    return LayerReport(
        name=matrix.name,
        shape=(matrix.copies, matrix.gates, matrix.M, matrix.N),
        format=fmt,
        params_before=matrix.params,
        params_after=count,
        error=(errors / norms) ** 0.5 if norms else 0.0,
        calibration_error=None if X is None else ((seen / seen_norms) ** 0.5 if seen_norms else 0.0),
        macs_before=matrix.params,
        macs_after=macs,
        latency_ms_before=before_ms,
        latency_ms_after=after_ms,
    )


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def _milliseconds(call: Any) -> float:
    times = []
    for _ in range(LATENCY_RUNS + 2):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times[2:])  # the first runs are slower: plans are made and caches are cold
