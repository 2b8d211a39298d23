"""Networks of benchmarks.doped: formats that fill a budget of bytes, and the baselines that are no formats."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import kronecell as kc
from benchmarks.doped_data import Network, Task
from kronecell.formats.modes import factorize
from kronecell.formats.places import largest_places
from kronecell.formats.recipes import recipe_modes
from kronecell.nn.aware import Rounding
from kronecell.nn.quantize import SMALL
from kronecell.nn.quantized import QuantizedFactor
from kronecell.nn.sparse import SparseMatrix
from kronecell.plans.sparse import Sparse

# Bytes of a value, with 4% for the scales of integers; the page has the bytes that were counted.
VALUE_BYTES = {32: 4.0, **{bits: 0.13 * bits for bits in (8, 6, 5, 4)}}
FIT = {"sweeps": 2, "joint": False, "starts": 0}  # more would be lost in training
# Parts of the training after which places stay. What is doped loses its entries early: while S says all that the
# structure leaves, the structure learns nothing; on validation data of the text 5 to 15% were best, 45% lost 0.5%.
PRUNED_AT, DOPED_AT = 0.45, 0.1
AWARE_FROM = 0.7  # of the training, for variants that compute with rounded weights at last
ROW_INDEX = 2  # bytes of the number of a dense row in a hybrid


def kind_of(variant: str) -> str:
    """The structure of a variant: "doped tt, dropout" -> "tt"."""
    return variant.partition(",")[0].split(" ")[-1]


def budget_format(kind: str, gates: int, M: int, N: int, budget: float, value: float) -> kc.Format:
    """The largest ranks of a structure whose values take at most this many bytes."""
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
        if fmt == best or value * fmt.params(gates) > budget:  # clipped, or too large
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


@dataclass(frozen=True)
class Numbers:
    """Bits of the values of a structure (or a dense matrix), and of those of a sparse part; 32 is float32."""

    bits: int
    entries: int

    def __str__(self) -> str:
        return f"{self.bits} bits" if self.bits == self.entries else f"{self.bits} and {self.entries} bits"

    @property
    def value(self) -> float:
        return VALUE_BYTES[self.bits]

    @property
    def entry(self) -> float:
        return VALUE_BYTES[self.entries]


FLOATS = Numbers(32, 32)


def format_of(variant: str, gates: int, M: int, N: int, ratio: float, numbers: Numbers, share: float) -> kc.Format:
    """The format of a variant for one matrix: a structure, or a doped one whose S takes `share` of the bytes."""
    budget = 4 * gates * M * N / ratio
    if not variant.startswith("doped"):
        return budget_format(kind_of(variant), gates, M, N, budget, numbers.value)
    structure = budget_format(kind_of(variant), gates, M, N, (1 - share) * budget, numbers.value)
    block = 16 if "blocks" in variant else 1
    sparse = budget_sparse(gates * N, M, budget - numbers.value * structure.params(gates), numbers.entry, block)
    return kc.Doped(structure, sparse.num_values / (gates * N * M), block)


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
        self, task: Task, classes: int, name: str, numbers: Numbers, ratio: float, share: float, steps: int,
        start: Network | None,
    ) -> None:  # fmt: skip
        M, N, gates = task.inputs, task.hidden, task.gates
        self.name, self.numbers, self.gates = name, numbers, gates
        self.masks: Masks | None = None
        self.sparsity: Any = None
        self.rounding: Rounding | None = None
        widths = (M, N)
        budgets = [4 * gates * width * N / ratio for width in widths]
        if name in ("dense", "pruned"):
            self.formats: list[kc.Format | None] = [None, None]
            rnn = task.rnn(M, N)
            self.model = with_rest(Network(task, classes, rnn), start)
            if start is not None:
                rnn.load_state_dict(start.rnn.state_dict())
            if name == "pruned":
                sizes = [
                    budget_sparse(gates * N, width, budget, numbers.value)
                    for width, budget in zip(widths, budgets, strict=True)
                ]
                weights = [rnn.weight_ih_l0.data, rnn.weight_hh_l0.data]
                self.masks = Masks(weights, schedule(steps, PRUNED_AT, start), sizes, rows=False)
            return
        formats = [format_of(name, gates, width, N, ratio, numbers, share) for width in widths]
        if name.startswith("hybrid"):
            formats = [
                budget_format(kind_of(name), gates, width, N, (1 - share) * budget, numbers.value)
                for width, budget in zip(widths, budgets, strict=True)
            ]
            rows = [
                int((budget - numbers.value * fmt.params(gates)) / (numbers.value * width + ROW_INDEX))
                for width, budget, fmt in zip(widths, budgets, formats, strict=True)
            ]
            formats = [kc.Doped(fmt, 1.0) for fmt in formats]
        self.formats = [*formats]
        rnn = task.rnn(M, N, input_format=formats[0], hidden_format=formats[1])
        self.model = with_rest(Network(task, classes, rnn), start)
        if start is not None:
            fit_structures(rnn, start.rnn)
        if name.startswith("hybrid"):
            layers = [rnn.weight_ih_l0, rnn.weight_hh_l0]
            if start is not None:
                for layer, weight in zip(layers, (start.rnn.weight_ih_l0, start.rnn.weight_hh_l0), strict=True):
                    with torch.no_grad():
                        layer.sparse.entries.copy_((weight - layer.structure_weight()).reshape(-1, 1))
            parts = [
                part.sparse.entries.data.view(gates * N, width) for part, width in zip(layers, widths, strict=True)
            ]
            sizes = [Sparse(gates * N, 1, count) for count in rows]
            self.masks = Masks(parts, schedule(steps, PRUNED_AT, start), sizes, rows=True)
        if name.startswith("doped"):
            law = schedule(steps, DOPED_AT if start is not None else PRUNED_AT, start)
            self.sparsity = kc.train_sparsity(
                self.model, replace(law, dropout=0.5 if ", dropout" in name else 0.0), start=start
            )

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """After each step of the optimizer."""
        if self.masks is not None:
            self.masks.step()
        if self.sparsity is not None:
            self.sparsity.step(optimizer)

    @property
    def bits(self) -> dict[str, int]:
        """Of every matrix, as kc.quantize takes them."""
        return {"*": self.numbers.bits} | ({"*.sparse": self.numbers.entries} if self.name.startswith("doped") else {})

    def loss(self, data: Any, batch: Any, done: float) -> Tensor:
        """Of one batch after a part of the training; a variant that is aware computes with rounded weights at last."""
        if ", aware" not in self.name or done < AWARE_FROM:
            return data.loss(self.model.train(), batch)
        assert self.rounding is not None
        weights = self.rounding.weights(self.model.train())
        return data.loss(lambda x: functional_call(self.model, weights, (x,)), batch)

    def more_parameters(self, done: float) -> list[nn.Parameter]:
        """Scales, which learn from the moment on at which weights are rounded."""
        if ", aware" not in self.name or done < AWARE_FROM or self.rounding is not None:
            return []
        self.rounding = Rounding(self.model, self.bits)
        return [*self.rounding.parameters()]

    def finished(self) -> tuple[Network, int]:
        """What is evaluated, with the bytes of W and U: in float32, or with integers for values."""
        if self.numbers == FLOATS:
            return self.model.eval(), self._float_bytes()
        if self.masks is None:
            small = kc.quantize(self.model, self.bits) if self.rounding is None else self.rounding.quantized(self.model)
            return small, bytes_of_weights(small.rnn)
        return self._masked_integers()

    def _float_bytes(self) -> int:
        parts = [fmt for fmt in self.formats if fmt is not None]
        if self.masks is not None:
            size = self.masks.index_bytes() + sum(4 * self.masks.kept(i).numel() for i in range(2))
            return size + sum(4 * fmt.structure.params(self.gates) for fmt in parts if isinstance(fmt, kc.Doped))
        return bytes_of_weights(self.model.rnn)

    @torch.no_grad()
    def _masked_integers(self) -> tuple[Network, int]:
        """A pruned or hybrid network with integers as kc.quantize rounds them, as the floats they stand for."""
        assert self.masks is not None
        size = self.masks.index_bytes()
        for number, (weight, mask) in enumerate(zip(self.masks.weights, self.masks.masks, strict=True)):
            made = QuantizedFactor.of(self.masks.kept(number), self.numbers.bits, None, "")
            size += made.num_bytes
            where = mask.bool()
            weight[where] = made.factor().flatten()
        for name in ("weight_ih_l0", "weight_hh_l0"):
            layer = getattr(self.model.rnn, name)
            for factor in layer.factors().values() if isinstance(layer, kc.TensorLinear) else ():
                if factor.numel() > SMALL:
                    made = QuantizedFactor.of(factor, self.numbers.bits, None, "")
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
            alone = kc.TensorLinear(structure, bias=False, gates=layer.gates)
            alone.fit(weight, **FIT)
            _fits[key] = copy.deepcopy(alone.state_dict())
        layer.load_state_dict(_fits[key], strict=False)


def bytes_of_weights(rnn: nn.Module) -> int:
    """Of W and U with indices and scales, as they are saved; biases are floats in all networks."""
    kept = {name: t for name, t in rnn.state_dict().items() if not name.startswith("bias")}
    return sum(tensor.numel() * tensor.element_size() for tensor in kept.values())


@torch.no_grad()
def timed_model(task: Task, name: str, numbers: Numbers, ratio: float, share: float) -> nn.Module | None:
    """The layer of a variant as it would be run, with random numbers; None where this package has no such layer.

    A pruned one runs as the sparse part of a doped format whose structure is one column of zeros.
    """
    M, N, gates = task.inputs, task.hidden, task.gates
    if name.startswith("hybrid"):
        return None
    if name == "dense":
        return kc.freeze(task.rnn(M, N))
    if name == "pruned":
        formats: list[kc.Format] = []
        for width in (M, N):
            size = budget_sparse(gates * N, width, 4 * gates * width * N / ratio, numbers.value)
            formats.append(kc.Doped(kc.LowRank((width,), (N,), 1), size.count / (gates * N * width)))
    else:
        formats = [format_of(name, gates, width, N, ratio, numbers, share) for width in (M, N)]
    rnn = task.rnn(M, N, input_format=formats[0], hidden_format=formats[1])
    for part in rnn.modules():
        if isinstance(part, SparseMatrix):
            nn.init.normal_(part.entries, std=0.05)
    return kc.freeze(rnn) if numbers == FLOATS else kc.quantize(rnn, numbers.bits)


def schedule(steps: int, end: float, start: Network | None) -> kc.SparsitySchedule:
    """Until `end`, a part of all steps; from scratch, matrices stay dense for a tenth of them before."""
    begin = 0 if start is not None else steps // 10
    last = max(begin + 1, round(end * steps))
    return kc.SparsitySchedule(begin=begin, end=last, every=max(1, (last - begin) // 18))
