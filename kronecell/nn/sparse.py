"""The sparse part S of a doped layer: values, which are trained, and where they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kronecell.formats.places import DTYPES, gaps_of, places_of
from kronecell.ops.engine import BYTE
from kronecell.ops.sparse import dense_of, sparse_linear, sparse_prepared
from kronecell.plans.sparse import Sparse

PRICE = 8  # one entry of S takes about as long as so many of a dense matrix: beyond, S runs as a dense one

Scales = tuple[Tensor, Tensor]


class SparseMatrix(nn.Module):
    """S (outputs, inputs), as torch stores W. Files hold `entries` and `gaps`; `places` are made of the gaps.

    `drop` is the rate of co-matrix dropout: in training, so many of the outputs take either the structure or S alone,
    so that neither comes to rely on the other (Thakker et al., MLSys 2021). `train_sparsity` sets it.
    """

    entries: Tensor
    gaps: Tensor
    places: Tensor

    def __init__(self, size: Sparse, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.size = size
        self.drop = 0.0
        self.entries = nn.Parameter(torch.empty(size.count, size.block, device=device, dtype=dtype))
        self.register_buffer("gaps", torch.empty(size.count, device=device, dtype=DTYPES[size.gap_bytes]))
        self.register_buffer("places", torch.empty(size.count, device=device, dtype=torch.int64), persistent=False)
        self.register_load_state_dict_post_hook(_placed)

    @property
    def is_many(self) -> bool:
        """Whether so many entries run as a dense matrix."""
        return PRICE * self.entries.numel() > self.size.outputs * self.size.inputs

    @torch.no_grad()
    def store(self, values: Tensor, gaps: Tensor) -> None:
        """Values and gaps of the size that S has."""
        self.entries.copy_(values)
        self.gaps.copy_(gaps)
        _placed(self)

    @torch.no_grad()
    def resize(self, values: Tensor, places: Tensor) -> None:
        """Other values at other places, as a new parameter: graphs remember the shape of the old one."""
        self.size = replace(self.size, count=len(places))
        self.entries = nn.Parameter(values.contiguous(), self.entries.requires_grad)
        self.places = places
        self.gaps = gaps_of(places, self.size)

    def factors(self) -> dict[str, Tensor]:
        """The values by name, as a layer's factors are named."""
        return {"entries": self.entries}

    def stored(self) -> tuple[Tensor, Tensor]:
        """Values and places as operators take them. An exported graph holds the gaps, which are short."""
        places = self.gaps.to(torch.int64).cumsum(0) - 1 if torch.compiler.is_exporting() else self.places
        return self.entries, places

    def prepared(self) -> Tensor:
        """Values and places as the kernels read them, for a layer that keeps its values."""
        prepared: Tensor = sparse_prepared(self.entries, self.places, self.size.outputs, self.size.inputs)
        return prepared

    def dense(self) -> Tensor:
        """S as a dense matrix; differentiable."""
        return dense_of(*self.stored(), self.size.outputs, self.size.inputs)

    def scales(self) -> Scales | None:
        """What every output of the structure and of S is multiplied by in this forward; None is 1."""
        if not self.training or not self.drop:
            return None
        chance = torch.rand(self.size.outputs, device=self.entries.device)
        half = self.drop / 2
        keep = torch.stack([chance >= half, chance < 1 - half]).to(self.entries.dtype) / (1 - half)
        return keep[0], keep[1]

    def scaled(self, scale: Tensor) -> Tensor:
        """The values, every output times its scale."""
        rows = scale.reshape(-1, self.size.block)
        return self.entries * rows[self.places // self.size.inputs]

    def add(self, x: Tensor, y: Tensor, scale: Tensor | None = None, prepared: Tensor | None = None) -> Tensor:
        """y (..., outputs) plus x (..., inputs) S^T; a byte of x is a part of 255. A frozen layer holds `prepared`."""
        values = self.entries if scale is None else self.scaled(scale)
        rows = x.reshape(-1, x.shape[-1]).to(values.dtype)
        rows = rows * BYTE if x.dtype == torch.uint8 else rows
        if y.dtype == values.dtype:
            start = y.reshape(-1, y.shape[-1])
            total: Tensor = sparse_linear(rows, values, self.places, self.size.outputs, start, prepared)
            return total.reshape(y.shape)
        product: Tensor = sparse_linear(rows, values, self.places, self.size.outputs, None, prepared)
        return y + product.reshape(y.shape).to(y.dtype)  # under autocast

    def explain(self, dense: bool) -> str:
        """How S runs: beside the structure, or in a dense W."""
        entries = self.entries.numel()
        how = "added to a dense W" if dense else f"multiplied beside it: {entries:,} multiply-adds a row"
        return f"S with {entries:,} entries, {how}"

    def extra_repr(self) -> str:
        size = self.size
        share = size.num_values / max(size.outputs * size.inputs, 1)
        block = f" in blocks of {size.block}" if size.block > 1 else ""
        return f"{size.outputs} x {size.inputs}, {size.num_values:,} entries{block} ({share:.2%})"


def added(structure: Tensor, sparse: SparseMatrix, scales: Scales | None = None) -> Tensor:
    """structure + S, dense (outputs, inputs)."""
    if scales is None:
        return structure + sparse.dense()
    return structure * scales[0][:, None] + sparse.dense() * scales[1][:, None]


def _placed(sparse: SparseMatrix, _: object = None) -> None:
    """Make places anew from gaps. A function of the module: a lambda cannot be pickled."""
    sparse.places = places_of(sparse.gaps, sparse.size)
