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

from kronecell.compress.matrices import Matrix, stored
from kronecell.nn.embedding import TensorEmbedding
from kronecell.nn.hidden import macs_of
from kronecell.nn.linear import TensorLinear
from kronecell.nn.quantize import bytes_of
from kronecell.nn.quantized import Integers, QuantizedLinear
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
    bytes_before: int = 0
    bytes_after: int = 0

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
    model_bytes_before: int = 0
    model_bytes_after: int = 0

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

    @property
    def bytes_ratio(self) -> float:
        """Of the whole model in bytes."""
        return self.model_bytes_before / max(self.model_bytes_after, 1)

    def record(self) -> dict[str, Any]:
        """In JSON's types."""
        names = ("params_before", "params_after", "ratio", "model_params_before", "model_params_after", "model_ratio",
                 "model_bytes_before", "model_bytes_after", "bytes_ratio")  # fmt: skip
        totals = {name: getattr(self, name) for name in (*names, "rows")}
        return {"layers": [asdict(layer) | {"ratio": layer.ratio} for layer in self.layers], "totals": totals}

    def to_json(self) -> str:
        """The record as text."""
        return json.dumps(self.record(), indent=1)

    def __str__(self) -> str:
        header = ("layer", "format", "before", "after", "ratio", "bytes", "error", "on data", "multiply-adds", "ms")
        lines = [header]
        for layer in self.layers:
            seen = "" if layer.calibration_error is None else f"{layer.calibration_error:.4f}"
            sizes = (f"{layer.params_before:,}", f"{layer.params_after:,}", f"{layer.ratio:,.1f}")
            macs = f"{layer.macs_before:,} -> {layer.macs_after:,}"
            latency = f"{layer.latency_ms_before:.3f} -> {layer.latency_ms_after:.3f}"
            stored = f"{layer.bytes_after:,}"
            lines.append((layer.name, layer.format, *sizes, stored, f"{layer.error:.4f}", seen, macs, latency))
        for name, before, after, stored in (
            ("these matrices", self.params_before, self.params_after, ""),
            ("whole model", self.model_params_before, self.model_params_after, f"{self.model_bytes_after:,}"),
        ):
            lines.append((name, "", f"{before:,}", f"{after:,}", f"{before / after:,.1f}", stored, "", "", "", ""))
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        return "\n".join(
            "  ".join(
                c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )


@dataclass(frozen=True)
class Plan:
    """What is compressed, and the model that it came from: matrices (whose owners are its modules), inputs, sizes."""

    matrices: list[Matrix]
    inputs: Mapping[str, Tensor]
    params_before: int
    bytes_before: int
    bits: dict[str, int]


@torch.no_grad()
def measure(model: nn.Module, plan: Plan, rows: int) -> Report:
    """The report of a compressed model beside the dense weights it came from."""
    layers = []
    for matrix in plan.matrices:
        owner = model.get_submodule(matrix.module)
        parts = [getattr(owner, name) for name in matrix.weight_names] if matrix.part != "weight" else [owner]
        layers.append(_layer(matrix, parts, plan.inputs.get(matrix.name), rows))
    params = sum(parameter.numel() for parameter in model.parameters())
    for part in model.modules():
        params += part.num_weights if isinstance(part, Integers) else 0
    return Report(tuple(layers), plan.params_before, params, rows, plan.bytes_before, bytes_of(model))


def _layer(matrix: Matrix, parts: list[Any], X: Tensor | None, rows: int) -> LayerReport:
    count = size = macs = 0
    errors = norms = seen = seen_norms = 0.0
    old = matrix.weights()
    for part, W in zip(parts, old, strict=True):
        plain = part.weight if isinstance(part, (nn.Linear, nn.Embedding)) else part
        stores = stored(plain)
        count, size = count + stores[0], size + stores[1]
        if isinstance(part, TensorLinear):
            # U runs inside the recurrence, split or dense, and not by the plan of a layer.
            macs += macs_of(part)[0] if matrix.part == "weight_hh" else executed_macs(part.plan(rows))
        elif isinstance(part, TensorEmbedding):
            macs += part.lookup.macs
        else:
            macs += 0 if matrix.is_table else W.numel()
        new = part.dense_weight() if isinstance(plain, nn.Module) else plain
        if not matrix.is_table:
            new = new.reshape(matrix.gates, matrix.N, -1)[:, :, : matrix.M].transpose(1, 2)
        new = new.reshape(W.shape).to(W)
        errors, norms = errors + _square(W - new), norms + _square(W)
        if X is not None:
            X = X.to(W)
            seen, seen_norms = seen + _square(X @ (W - new)), seen_norms + _square(X @ W)
    before_ms, after_ms = _latency(matrix, parts, old, rows)
    return LayerReport(
        name=matrix.name,
        shape=(matrix.copies, matrix.gates, matrix.M, matrix.N),
        format=_format_text(parts[0]),
        params_before=matrix.params,
        params_after=count,
        error=(errors / norms) ** 0.5 if norms else 0.0,
        calibration_error=None if X is None else ((seen / seen_norms) ** 0.5 if seen_norms else 0.0),
        macs_before=0 if matrix.is_table else matrix.params,
        macs_after=macs,
        latency_ms_before=before_ms,
        latency_ms_after=after_ms,
        bytes_before=matrix.stored_bytes,
        bytes_after=size,
    )


def _format_text(part: Any) -> str:
    """Format, sharing and bits of what is stored."""
    words = [f"{part.format}" if isinstance(part, (TensorLinear, TensorEmbedding)) else "dense"]
    words += ["shared"] if isinstance(part, TensorLinear) and part.shared else []
    integers = sorted({each.bits for each in part.modules() if isinstance(each, Integers)} if _is(part) else ())
    words += [f"{'/'.join(map(str, integers))} bits"] if integers else []
    return " ".join(words)


def _is(part: Any) -> bool:
    return isinstance(part, nn.Module)


def _latency(matrix: Matrix, parts: list[Any], old: list[Tensor], rows: int) -> tuple[float, float]:
    """Milliseconds of x @ W for so many rows, both directions; a table's are not measured."""
    if matrix.is_table:
        return 0.0, 0.0
    x = old[0].new_zeros(rows, matrix.M)
    weights = [W.transpose(1, 2).reshape(-1, matrix.M).contiguous() for W in old]
    before = sum(_milliseconds(lambda w=weight: F.linear(x, w)) for weight in weights)
    if all(isinstance(part, (TensorLinear, QuantizedLinear)) for part in parts):
        return before, sum(_milliseconds(lambda p=part: p(x)) for part in parts)
    return before, before


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def _milliseconds(call: Any) -> float:
    times = []
    for _ in range(LATENCY_RUNS + 2):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times[2:])  # the first runs are slower: plans are made and caches are cold
