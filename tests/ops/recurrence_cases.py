"""Sizes for the recurrence operators, inputs drawn for them, and torch.nn in float64 as the dense oracle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from kronecell.ops.recurrence import gru, lstm
from kronecell.ops.sparse import sparse_prepared

GATES = {"lstm": 4, "gru": 3}
FORMS = ("dense", "split", "gated", "doped split", "doped gated", "prepared split")
BLOCKS = {"doped gated": (16, 4, 3)}  # outputs that share an index, the first that fits; 1 in the other forms


@dataclass(frozen=True)
class Case:
    """One call. `lengths` makes it a packed sequence; the form of U is one of FORMS."""

    cell: str
    form: str = "dense"
    steps: int = 3
    batch: int = 2
    hidden: int = 5
    rank: int = 2
    projection: int = 0
    lengths: tuple[int, ...] = ()
    reverse: bool = False
    bias: bool = True

    @property
    def width(self) -> int:
        """Numbers of the state h."""
        return self.projection or self.hidden

    @property
    def rows(self) -> tuple[int, ...]:
        """Shape of what there is per step."""
        return (sum(self.lengths),) if self.lengths else (self.steps, self.batch)

    def __str__(self) -> str:
        size = f"{self.batch}x{self.steps}x{self.hidden}" if not self.lengths else f"{self.lengths}x{self.hidden}"
        words = [self.cell, self.form, size.replace(" ", ""), "reverse" if self.reverse else "forward"]
        return "-".join(words + ([f"proj{self.projection}"] if self.projection else []))


@dataclass
class Inputs:
    """What a call reads; `tensors` are those with gradients, in one order for our operator and the oracle."""

    case: Case
    gates: Tensor
    hidden: list[Tensor]
    h: Tensor
    c: Tensor | None = None
    project: Tensor | None = None
    bias_n: Tensor | None = None
    batch_sizes: Tensor | None = None
    upstream: list[Tensor] = field(default_factory=list)

    @property
    def weights(self) -> list[Tensor]:
        """Those of U that gradients are taken of: not the places of a sparse part."""
        return [part for part in self.hidden if part.is_floating_point()]

    @property
    def tensors(self) -> list[Tensor]:
        """Those that gradients are taken of."""
        some = [self.gates, *self.weights, self.h, self.c, self.project, self.bias_n]
        return [tensor for tensor in some if tensor is not None]

    def to(self, dtype: torch.dtype, grad: bool = True) -> Inputs:
        """Copies as leaves of another dtype."""

        def copy(tensor: Tensor | None) -> Any:
            if tensor is not None and not tensor.is_floating_point():
                return tensor
            return None if tensor is None else tensor.detach().to(dtype, copy=True).requires_grad_(grad)

        return replace(
            self,
            gates=copy(self.gates),
            hidden=[copy(part) for part in self.hidden],
            h=copy(self.h),
            c=copy(self.c),
            project=copy(self.project),
            bias_n=copy(self.bias_n),
            upstream=[part.to(dtype) for part in self.upstream],
        )

    def arguments(self, keep: bool = True) -> tuple[Any, ...]:
        """For the operator."""
        last = (self.batch_sizes, self.case.reverse, keep)
        if self.case.cell == "lstm":
            return (self.gates, self.hidden, self.h, self.c, self.project, *last)
        return (self.gates, self.hidden, self.bias_n, self.h, *last)

    def run(self, keep: bool = True) -> tuple[Tensor, ...]:
        """output, last h and, of an LSTM, last c."""
        if self.case.cell == "lstm":
            return lstm(*self.arguments(keep))[:3]
        return gru(*self.arguments(keep))[:2]

    def loss(self, results: tuple[Tensor, ...]) -> Tensor:
        """One number from all results."""
        return sum(((a * b).sum() for a, b in zip(results, self.upstream, strict=True)), torch.zeros(()))


def draw(case: Case, seed: int = 0) -> Inputs:
    """Inputs of moderate size, so that gates are neither zero nor saturated."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    gates, size, width, batch = GATES[case.cell], case.hidden, case.width, len(case.lengths) or case.batch
    if case.form == "dense":
        hidden = [normal(gates * size, width, scale=width**-0.5)]
    elif "split" in case.form:
        hidden = [normal(case.rank, width, scale=width**-0.5), normal(case.rank, gates * size, scale=case.rank**-0.5)]
    else:
        hidden = [
            normal(gates * case.rank, width, scale=width**-0.5),
            normal(gates, case.rank, size, scale=case.rank**-0.5),
        ]
    if "doped" in case.form or "prepared" in case.form:
        block = next(each for each in (*BLOCKS.get(case.form, ()), 1) if gates * size % each == 0)
        count = max(1, size * width // (5 * block))
        places = torch.randperm(gates * size // block * width, generator=generator)[:count].sort().values
        hidden += [normal(count, block, scale=0.5), places]
    if "prepared" in case.form:
        hidden.append(sparse_prepared(*hidden[2:], gates * size, width))
    sizes = [sum(length > t for length in case.lengths) for t in range(max(case.lengths, default=0))]
    inputs = Inputs(case, normal(*case.rows, gates * size), hidden, normal(batch, width))
    if case.cell == "lstm":
        inputs.c = normal(batch, size)
        inputs.project = normal(width, size, scale=size**-0.5) if case.projection else None
    elif case.bias:
        inputs.bias_n = normal(size)
    inputs.batch_sizes = torch.tensor(sizes) if case.lengths else None
    inputs.upstream = [normal(*case.rows, width), normal(batch, width)]
    if case.cell == "lstm":
        inputs.upstream.append(normal(batch, size))
    return inputs


def dense(hidden: list[Tensor]) -> Tensor:
    """U (gates * H, P) of any form."""
    if len(hidden) == 1:
        return hidden[0]
    In, Out, *sparse = hidden
    if Out.dim() == 2:
        U = Out.t() @ In
    else:
        U = (Out.transpose(1, 2) @ In.unflatten(0, Out.shape[:2])).flatten(0, 1)
    if not sparse:
        return U
    values, places, *_ = sparse
    rows = [torch.zeros_like(U[0]) for _ in U]
    for value, place in zip(values, places.tolist(), strict=True):
        for i, number in enumerate(value):
            one = torch.nn.functional.one_hot(torch.tensor(place % U.shape[1]), U.shape[1]).to(U)
            row = place // U.shape[1] * len(value) + i
            rows[row] = rows[row] + number * one
    return U + torch.stack(rows)


def oracle(inputs: Inputs) -> tuple[Tensor, ...]:
    """The results by torch.nn: finished gates pass its input product with a weight of one, in one of two directions."""
    case, gates = inputs.case, GATES[inputs.case.cell]
    module = nn.LSTM if case.cell == "lstm" else nn.GRU
    options = {"proj_size": case.projection} if case.projection else {}
    rnn = module(gates * case.hidden, case.hidden, bidirectional=True, dtype=inputs.gates.dtype, **options)
    suffix, direction = ("_l0_reverse", 1) if case.reverse else ("_l0", 0)
    zeros = torch.zeros(gates * case.hidden, dtype=inputs.gates.dtype)
    bias = zeros if inputs.bias_n is None else torch.cat([zeros[case.hidden :], inputs.bias_n])
    weights = {
        "weight_ih" + suffix: torch.eye(len(zeros), dtype=zeros.dtype),
        "weight_hh" + suffix: dense(inputs.hidden),
        "bias_ih" + suffix: zeros,
        "bias_hh" + suffix: bias,
    }
    if inputs.project is not None:
        weights["weight_hr" + suffix] = inputs.project
    packed = inputs.batch_sizes is not None
    source = PackedSequence(inputs.gates, inputs.batch_sizes) if packed else inputs.gates
    states = [torch.stack([state] * 2) for state in (inputs.h, inputs.c) if state is not None]
    given = tuple(states) if len(states) > 1 else states[0]
    output, last = torch.func.functional_call(rnn, weights, (source, given))
    output = output.data if packed else output
    last = last if isinstance(last, tuple) else (last,)
    return (output.chunk(2, -1)[direction], *(state[direction] for state in last))


LAYOUTS = [
    Case("lstm", steps=1, batch=1, hidden=5),
    Case("lstm", steps=2, batch=3, hidden=33),
    Case("lstm", steps=7, batch=1, hidden=70),
    Case("lstm", steps=8, batch=13, hidden=50, rank=9),
    Case("lstm", steps=6, batch=2, hidden=300, rank=18),
    Case("lstm", steps=3, batch=131, hidden=16, rank=4),
    Case("lstm", lengths=(9, 9, 6, 6, 6, 1), hidden=37, rank=6),
    Case("lstm", lengths=(2, 1), hidden=20),
]


def cases() -> list[Case]:
    """Every layout in every form, direction and cell; projections of the LSTM."""
    found = []
    for layout in LAYOUTS:
        for form in FORMS:
            for reverse in (False, True):
                for cell in ("lstm", "gru"):
                    found.append(replace(layout, form=form, reverse=reverse, cell=cell, bias=layout.steps != 7))
                found.append(replace(layout, form=form, reverse=reverse, projection=max(1, layout.hidden // 3)))
    return found


SMALL = [
    replace(case, form=form, hidden=3)
    for form in FORMS
    for case in (
        Case("lstm", projection=2),
        Case("lstm", reverse=True),
        Case("lstm", lengths=(3, 2, 1), reverse=True),
        Case("gru"),
        Case("gru", lengths=(3, 2, 1), reverse=True, bias=False),
    )
]
