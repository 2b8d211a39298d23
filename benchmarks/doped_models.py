"""Networks of benchmarks.doped: formats that fill a budget of bytes, and the baselines that are no formats."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import kronecell as kc
from benchmarks.doped_data import Network, Task
from kronecell.formats.modes import factorize
from kronecell.formats.places import largest_places
from kronecell.formats.recipes import recipe_modes
from kronecell.nn.quantize import SMALL
from kronecell.nn.quantized import QuantizedFactor
from kronecell.nn.sparse import SparseMatrix
from kronecell.plans.sparse import Sparse

VALUE_BYTES = {32: 4.0, 8: 1.04, 6: 0.79}  # with 4% for scales; the page has the bytes that were counted
FIT = {"sweeps": 2, "joint": False, "starts": 0}  # more would be lost in training
ROW_INDEX = 2  # bytes of the number of a dense row in a hybrid


def kind_of(variant: str) -> str:
    """The structure of a variant: "doped tt, dropout" -> "tt"."""
    return variant.partition(",")[0].split(" ")[-1]


def budget_format(kind: str, M: int, N: int, budget: float, value: float) -> kc.Format:
    """The largest ranks of a structure of four gates whose values take at most this many bytes."""
    pair = factorize(M, 2)[::-1], factorize(N, 2)
    m, n = recipe_modes("tt" if kind == "kp" else kind, M, N)
    make: dict[str, Callable[[int], kc.Format]] = {
        "lowrank": lambda r: kc.LowRank(m, n, r, clip=True),
        "kp": lambda r: kc.TT(*pair, r, clip=True),  # a sum of r Kronecker products
        "tt": lambda r: kc.TT(m, n, r, clip=True),
        "tr": lambda r: kc.TR(m, n, r, clip=True),
        "kcp": lambda r: kc.KCP(m, n, K=r, CA=4, CB=2, tie="all", clip=True),
    }
    best = make[kind](1)
    for rank in range(2, 400):
        fmt = make[kind](rank)
        if fmt == best or value * fmt.params(4) > budget:  # clipped, or too large
            break
        best = fmt
    return best


def budget_sparse(outputs: int, inputs: int, budget: float, value: float, block: int = 1) -> Sparse:
    """The largest sparse matrix that takes at most this many bytes with its indices."""
    for width in (1, 2, 4):
        density = min(1.0, max(0.0, budget) / (value + width / block) / (outputs * inputs))
        size = Sparse.of(outputs, inputs, density, block)
        if size.gap_bytes <= width:
            break
    return size


def format_of(variant: str, M: int, N: int, ratio: float, bits: int, share: float) -> kc.Format:
    """The format of a variant for one matrix: a structure, or a doped one whose S takes `share` of the bytes."""
    value, budget = VALUE_BYTES[bits], 16 * M * N / ratio
    if not variant.startswith("doped"):
        return budget_format(kind_of(variant), M, N, budget, value)
    structure = budget_format(kind_of(variant), M, N, (1 - share) * budget, value)
    block = 16 if "blocks" in variant else 1
    sparse = budget_sparse(4 * N, M, budget - value * structure.params(4), value, block)
    return kc.Doped(structure, sparse.num_values / (4 * N * M), block)


class Masks:
    """Magnitude pruning of dense matrices (outputs, inputs) by the schedule of sparse parts: of entries, or of rows."""

    def __init__(self, weights: list[Tensor], schedule: kc.SparsitySchedule, sizes: list[Sparse], rows: bool) -> None:
        self.weights, self.schedule, self.sizes, self.rows, self.steps = weights, schedule, sizes, rows, 0
        self.masks = [torch.ones_like(weight) for weight in weights]

    @torch.no_grad()
    def step(self, _: object = None) -> None:
        self.steps += 1
        for weight, mask, target in zip(self.weights, self.masks, self.sizes, strict=True):
            if self.schedule.is_due(self.steps):
                density = self.schedule.density(self.steps, target.count / target.places)
                if self.rows:
                    norms = (weight * mask).square().sum(1)
                    mask.zero_()[norms.topk(max(target.count, round(density * len(norms)))).indices] = 1
                else:
                    size = Sparse.of(*weight.shape, max(density, target.count / target.places))
                    places = largest_places((weight * mask).square().flatten(), size)
                    mask.zero_().view(-1)[places] = 1
            weight *= mask

    def index_bytes(self) -> int:
        return sum(ROW_INDEX * size.count if self.rows else size.index_bytes for size in self.sizes)

    def kept(self, number: int) -> Tensor:
        """The values that are left of one matrix: rows, or a column of entries."""
        weight, mask = self.weights[number], self.masks[number].bool()
        return weight[mask.any(1)] if self.rows else weight[mask][:, None]


class Variant:
    """One network to train: the model, what is called after each step, and what it takes in bytes."""

    def __init__(
        self, task: Task, classes: int, name: str, bits: int, ratio: float, share: float, steps: int,
        start: Network | None,
    ) -> None:  # fmt: skip
        M, N = task.inputs, task.hidden
        self.name, self.bits = name, bits
        schedule = kc.SparsitySchedule(
            end=max(1, steps * 45 // 100), every=max(1, steps // 40), dropout=0.5 if ", dropout" in name else 0.0
        )
        if start is None:  # from scratch: S is dense for a while
            schedule = kc.SparsitySchedule(
                begin=steps // 10, end=max(steps // 10 + 1, steps * 45 // 100), every=max(1, steps // 40),
                dropout=schedule.dropout,
            )  # fmt: skip
        self.masks: Masks | None = None
        self.sparsity: Any = None
        widths = (M, N)
        value = VALUE_BYTES[bits]
        if name in ("dense", "pruned"):
            self.formats: list[kc.Format | None] = [None, None]
            rnn = kc.LSTM(M, N)
            self.model = with_rest(Network(task, classes, rnn), start)
            if start is not None:
                rnn.load_state_dict(start.rnn.state_dict())
            if name == "pruned":
                sizes = [budget_sparse(4 * N, width, 16 * width * N / ratio, value) for width in widths]
                self.masks = Masks([rnn.weight_ih_l0.data, rnn.weight_hh_l0.data], schedule, sizes, rows=False)
            return
        formats = [format_of(name, width, N, ratio, bits, share) for width in widths]
        if name.startswith("hybrid"):
            formats = [budget_format(kind_of(name), w, N, (1 - share) * 16 * w * N / ratio, value) for w in widths]
            left = [16 * w * N / ratio - value * f.params(4) for w, f in zip(widths, formats, strict=True)]
            sizes = [
                Sparse(4 * N, 1, int(rest / (value * w + ROW_INDEX))) for w, rest in zip(widths, left, strict=True)
            ]
            formats = [kc.Doped(fmt, 1.0) for fmt in formats]
        self.formats = [*formats]
        rnn = kc.LSTM(M, N, input_format=formats[0], hidden_format=formats[1])
        self.model = with_rest(Network(task, classes, rnn), start)
        if start is not None:
            fit_structures(rnn, start.rnn)
        if name.startswith("hybrid"):
            layers = [rnn.weight_ih_l0, rnn.weight_hh_l0]
            if start is not None:
                for layer, weight in zip(layers, (start.rnn.weight_ih_l0, start.rnn.weight_hh_l0), strict=True):
                    with torch.no_grad():
                        layer.sparse.entries.copy_((weight - layer.structure_weight()).reshape(-1, 1))
            rows = [part.sparse.entries.data.view(4 * N, width) for part, width in zip(layers, widths, strict=True)]
            self.masks = Masks(rows, schedule, sizes, rows=True)
        if name.startswith("doped"):
            self.sparsity = kc.train_sparsity(self.model, schedule, start=start)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """After each step of the optimizer."""
        if self.masks is not None:
            self.masks.step()
        if self.sparsity is not None:
            self.sparsity.step(optimizer)

    def finished(self) -> tuple[Network, int]:
        """What is evaluated, with the bytes of W and U: in float32, or with integers for values."""
        if self.bits == 32:
            return self.model.eval(), self._float_bytes()
        if self.masks is None:
            small = kc.quantize(self.model, self.bits)
            return small, bytes_of_weights(small.rnn)
        return self._masked_integers()

    def _float_bytes(self) -> int:
        parts = [fmt for fmt in self.formats if fmt is not None]
        if self.masks is not None:
            size = self.masks.index_bytes() + sum(4 * self.masks.kept(i).numel() for i in range(2))
            return size + sum(4 * fmt.structure.params(4) for fmt in parts if isinstance(fmt, kc.Doped))
        return bytes_of_weights(self.model.rnn)

    @torch.no_grad()
    def _masked_integers(self) -> tuple[Network, int]:
        """A pruned or hybrid network with integers as kc.quantize rounds them, as the floats they stand for."""
        assert self.masks is not None
        size = self.masks.index_bytes()
        for number, (weight, mask) in enumerate(zip(self.masks.weights, self.masks.masks, strict=True)):
            made = QuantizedFactor.of(self.masks.kept(number), self.bits, None, "")
            size += made.num_bytes
            where = mask.bool()
            weight[where] = made.factor().flatten()
        for name in ("weight_ih_l0", "weight_hh_l0"):
            layer = getattr(self.model.rnn, name)
            for factor in layer.factors().values() if isinstance(layer, kc.TensorLinear) else ():
                if factor.numel() > SMALL:
                    made = QuantizedFactor.of(factor, self.bits, None, "")
                    factor.copy_(made.factor())
                    size += made.num_bytes
                else:
                    size += 4 * factor.numel()
        return self.model.eval(), size


def with_rest(model: Network, start: Network | None) -> Network:
    """All that is not W or U as in the dense network that the variant starts from."""
    if start is not None:
        known = {name: t for name, t in start.state_dict().items() if not name.startswith("rnn.weight")}
        model.load_state_dict(known, strict=False)
    return model


_fits: dict[tuple[int, str, str], dict[str, Tensor]] = {}


@torch.no_grad()
def fit_structures(rnn: Any, start: Any) -> None:
    """The structure of W and of U, each the closest to the dense one; a fit that was made before is read."""
    for name in ("weight_ih_l0", "weight_hh_l0"):
        layer, weight = getattr(rnn, name), getattr(start, name)
        structure = layer.format.structure if isinstance(layer.format, kc.Doped) else layer.format
        key = id(start), name, str(structure)
        if key not in _fits:
            alone = kc.TensorLinear(structure, bias=False, gates=4)
            alone.fit(weight, **FIT)
            _fits[key] = copy.deepcopy(alone.state_dict())
        layer.load_state_dict(_fits[key], strict=False)


def bytes_of_weights(rnn: nn.Module) -> int:
    """Of W and U with indices and scales, as they are saved; biases are floats in all networks."""
    kept = {name: t for name, t in rnn.state_dict().items() if not name.startswith("bias")}
    return sum(tensor.numel() * tensor.element_size() for tensor in kept.values())


@torch.no_grad()
def timed_model(task: Task, name: str, bits: int, ratio: float, share: float) -> nn.Module | None:
    """The LSTM of a variant as it would be run, with random numbers; None where this package has no such layer.

    A pruned one runs as the sparse part of a doped format whose structure is one column of zeros.
    """
    M, N = task.inputs, task.hidden
    if name.startswith("hybrid"):
        return None
    if name == "dense":
        rnn = kc.LSTM(M, N)
        return kc.freeze(rnn) if bits == 32 else kc.quantize(rnn, bits)
    if name == "pruned":
        value = VALUE_BYTES[bits]
        formats: list[kc.Format] = [
            kc.Doped(kc.LowRank((w,), (N,), 1), budget_sparse(4 * N, w, 16 * w * N / ratio, value).count / (4 * N * w))
            for w in (M, N)
        ]
    else:
        formats = [format_of(name, width, N, ratio, bits, share) for width in (M, N)]
    rnn = kc.LSTM(M, N, input_format=formats[0], hidden_format=formats[1])
    for part in rnn.modules():
        if isinstance(part, SparseMatrix):
            nn.init.normal_(part.entries, std=0.05)
    return kc.freeze(rnn) if bits == 32 else kc.quantize(rnn, bits)
