"""The grid of recurrent modules and inputs, and the comparison with torch.nn's: outputs, states and all gradients."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import kronecell as kc

INPUT, HIDDEN, TIME, BATCH = 12, 6, 4, 3
ENTRY = ("plain", "packed", "unbatched")

# The compressed formats as recipes: modes follow from the sizes of the layer.
RECIPES = {
    "lowrank": "lowrank:r=2",
    "cp": "cp:r=3",
    "tucker": "tucker:r=2",
    "tt": "tt:r=2",
    "tr": "tr:r=2",
    "bt": "bt:r=2,P=2",
    "ht": "ht:r=2",
    "kt": "kt:K=2",
    "kcp": "kcp:K=2,CA=2,CB=2",
    "kcp-all": "kcp:K=2,CA=2,CB=2,tie=all",
}


@dataclass(frozen=True)
class Case:
    """One corner of the grid."""

    cell: str
    layers: int = 1
    bidirectional: bool = False
    batch_first: bool = False
    proj_size: int = 0
    bias: bool = True
    entry: str = "plain"
    hx: bool = False

    def __str__(self) -> str:
        words = [self.cell, f"{self.layers}l", self.entry]
        words += [n for n in ("bidirectional", "batch_first", "bias", "hx") if getattr(self, n)]
        return "-".join(words + (["proj"] if self.proj_size else []))

    @property
    def arguments(self) -> dict[str, Any]:
        names = ("bias", "batch_first", "bidirectional")
        given = {name: getattr(self, name) for name in names} | {"num_layers": self.layers}
        return given | ({"proj_size": self.proj_size} if self.proj_size else {})

    def ours(self, **options: Any) -> kc.LSTM | kc.GRU:
        return getattr(kc, self.cell)(INPUT, HIDDEN, **self.arguments, dtype=torch.float64, **options)

    def inputs(
        self, generator: torch.Generator, dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor | PackedSequence, Any, list[Tensor]]:
        """Input, state, and the leaves whose gradients are compared; the same numbers in every dtype."""

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

        count = self.layers * (2 if self.bidirectional else 1)
        batch = () if self.entry == "unbatched" else (BATCH,)
        x: Tensor | PackedSequence
        if self.entry == "packed":
            leaves = [draw(length, INPUT) for length in (2, 4, 3)]  # not sorted by length
            x = pack_sequence(leaves, enforce_sorted=False)
        elif self.entry == "unbatched":
            leaves = [x := draw(TIME, INPUT)]
        else:
            leaves = [x := draw(*((BATCH, TIME) if self.batch_first else (TIME, BATCH)), INPUT)]
        if not self.hx:
            return x, None, leaves
        h = draw(count, *batch, self.proj_size or HIDDEN)
        state = (h, draw(count, *batch, HIDDEN)) if self.cell == "LSTM" else h
        return x, state, leaves + ([*state] if isinstance(state, tuple) else [state])


def grid() -> list[Case]:
    """Every combination; proj_size exists for the LSTM only."""
    flags = (False, True)
    return [
        Case(cell, layers, bidirectional, batch_first, proj, bias, entry, hx)
        for cell, layers, bidirectional, batch_first, proj, bias, entry, hx in product(
            ("LSTM", "GRU"), (1, 3), flags, flags, (0, 4), flags, ENTRY, flags
        )
        if cell == "LSTM" or not proj
    ]


def corners() -> list[Case]:
    """The extremes of the grid: everything off, everything on, and the other inputs and states between."""
    return [
        Case("LSTM"),
        Case("LSTM", 3, True, True, 4, True, "packed", True),
        Case("LSTM", 3, True, False, 4, False, "plain", False),
        Case("LSTM", 1, False, True, 0, False, "unbatched", True),
        Case("GRU"),
        Case("GRU", 3, True, True, 0, True, "packed", True),
        Case("GRU", 3, True, False, 0, False, "plain", False),
        Case("GRU", 1, True, True, 0, True, "unbatched", True),
    ]


def flat(result: tuple[Any, Any]) -> list[Tensor]:
    """Output, h_n and c_n as a list of tensors."""
    output, state = result
    tensors = [output.data if isinstance(output, PackedSequence) else output]
    return tensors + ([*state] if isinstance(state, tuple) else [state])


def run(module: nn.Module, x: Any, state: Any, leaves: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Values, then gradients of a fixed random combination of all results with respect to inputs and parameters."""
    results = flat(module(x, state))
    if not weights:
        generator = torch.Generator().manual_seed(5)
        weights.extend(torch.randn(r.shape, generator=generator, dtype=r.dtype) for r in results)
    loss = sum((w * r).sum() for w, r in zip(weights, results, strict=True))
    # Both modules read the same packed tensor, whose graph has to survive the first gradient.
    return [*results, *torch.autograd.grad(loss, [*leaves, *module.parameters()], retain_graph=True)]


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest absolute difference of two lists of tensors of the same shapes."""
    assert [a.shape for a in ours] == [b.shape for b in theirs]
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
