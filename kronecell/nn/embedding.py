"""TensorEmbedding: a table of rows as a format, from which rows are read without ever forming the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronecell.errors import PlanError, ShapeError
from kronecell.formats import Format
from kronecell.nn.linear import check_format
from kronecell.ops.contract import check_tensor
from kronecell.ops.engine import constant_tensor
from kronecell.plans.lookup import lookup_of
from kronecell.plans.order import optimal
from kronecell.plans.plan import Plan

Layer = TypeVar("Layer", bound="TensorEmbedding")

HELD = 1 << 18  # weights of the largest table that is held dense in a frozen module: a lookup is then one operation


class TensorEmbedding(nn.Module):
    """Indices (...) -> rows (..., N); a drop-in for nn.Embedding(M, N), whose table is the format's matrix.

    Row i is the format's network with its input legs fixed to the digits of i in the base of the modes m: slices are
    picked and contracted. The table may have fewer rows than the format, `num_embeddings`. At `padding_idx` the row is
    zero and gets no gradient. Rows start with entries of rms 1, as nn.Embedding's.

    >>> table = TensorEmbedding("tt:m=10x10x10,n=4x4x4,r=8")
    >>> table(torch.tensor([[0, 999]])).shape, table.num_params
    (torch.Size([1, 2, 64]), 3200)
    """

    def __init__(
        self,
        format: Format | str,
        num_embeddings: int | None = None,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.format = check_format(format)
        if self.format.sparse() is not None:
            raise ShapeError(f"an embedding takes a format without a sparse part, got {self.format}")
        self.num_embeddings = _checked_rows(num_embeddings, self.format)
        self.embedding_dim = self.format.N
        self.padding_idx = _checked_padding(padding_idx, self.num_embeddings)
        shapes = self.format.network().shapes
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self._names = (*shapes,)
        self.lookup = lookup_of(self.format.network())  # how a row is read, and what it costs
        self.frozen = False
        self.frozen_rows: tuple[int, ...] = ()
        self.reset_parameters()

    def factors(self) -> dict[str, Tensor]:
        """The parameters of the network by name."""
        return {name: getattr(self, name) for name in self._names}

    @property
    def num_params(self) -> int:
        """Trained numbers."""
        return self.format.num_params

    @property
    def is_held(self) -> bool:
        """Whether a frozen module holds the table dense."""
        return "frozen_table" in self._buffers

    @torch.no_grad()
    def reset_parameters(self, std: float = 1.0) -> None:
        """New random factors whose table has entries of rms `std`; nothing happens on the meta device."""
        like = getattr(self, self._names[0])
        if not like.is_meta:
            self._store(self.format.init(std=std, dtype=like.dtype))

    def _store(self, factors: Mapping[str, Tensor]) -> None:
        for name in self._names:
            getattr(self, name).copy_(factors[name])

    # Rows --------------------------------------------------------------------------------------------------------

    def forward(self, index: Tensor) -> Tensor:
        """The rows with these numbers, int32 or int64 of any shape."""
        if check_tensor(index, "indices").dtype not in (torch.int64, torch.int32):
            raise ShapeError(f"indices must be int64 or int32, got {index.dtype}; convert them with .long()")
        table = self._buffers.get("frozen_table")
        if table is None and self._many(index):
            table = self._table()
        if table is None:
            rows = self._rows(index.reshape(-1)).reshape(*index.shape, self.embedding_dim)
        else:
            rows = F.embedding(index, table)
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((index == self.padding_idx).unsqueeze(-1), 0.0)

    def _many(self, index: Tensor) -> bool:
        """Whether the whole table takes fewer multiply-adds than so many rows; a graph must not depend on it."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return False
        return index.numel() * self.lookup.macs > self._dense_plan().hoisted_macs

    def _dense_plan(self) -> Plan:
        dense = self.format.network().as_dense()
        return Plan(dense, optimal(dense), order="dense")

    def _rows(self, index: Tensor) -> Tensor:
        """Slices of the factors, contracted."""
        lookup, tensors = self.lookup, self.factors()
        for factor in lookup.network.constants:
            tensors[factor.name] = constant_tensor(factor, lookup.network, tensors[self._names[0]])
        if self.num_embeddings < self.format.M:  # rows that only the format has are out of range, as all beyond it are
            index = index.where(index < self.num_embeddings, self.format.M)
        # The first digit is not taken modulo its size: a number out of range then has no slice, and torch says so.
        digits = [index // below if i == 0 else index // below % size for i, (size, below) in enumerate(lookup.digits)]
        for slices in lookup.slices:
            number = digits[slices.digits[0]]
            for digit in slices.digits[1:]:
                number = number * lookup.digits[digit][0] + digits[digit]
            ordered = tensors[slices.name].permute(slices.order)
            picked = F.embedding(number, ordered.reshape(-1, prod(slices.shape)))
            tensors[slices.name] = picked.reshape(-1, *slices.shape)
        for left, right, equation, result in lookup.products:
            operands = (tensors[left], tensors[right]) if right else (tensors[left],)
            tensors[result] = torch.einsum(equation, *operands)
        return tensors[result].reshape(-1, self.embedding_dim)

    # Dense -------------------------------------------------------------------------------------------------------

    def _table(self) -> Tensor:
        """All rows, that of `padding_idx` too."""
        return self.format.to_dense(self.factors())[: self.num_embeddings]

    def dense_weight(self) -> Tensor:
        """The table (num_embeddings, N), differentiable; every compressed matrix has this method."""
        table = self._table()
        if self.padding_idx is None:
            return table
        keep = torch.arange(self.num_embeddings, device=table.device) != self.padding_idx
        return table.where(keep[:, None], 0.0)

    @torch.no_grad()
    def to_dense(self) -> nn.Embedding:
        """An nn.Embedding with the same rows."""
        table = nn.Embedding.from_pretrained(self.dense_weight(), freeze=False, padding_idx=self.padding_idx)
        return table.train(self.training)

    @classmethod
    def from_dense(cls, table: nn.Embedding, format: Format | str, **fit_options: Any) -> TensorEmbedding:
        """The closest table of this format; `fit_options` go to `format.from_dense`, the error to `.fit_error`."""
        if not isinstance(table, nn.Embedding):
            raise ShapeError(f"from_dense takes a torch.nn.Embedding, got {type(table).__name__}")
        check_compressible(table)
        weight = table.weight
        made = nn.utils.skip_init(
            cls, format, table.num_embeddings, table.padding_idx, device=weight.device, dtype=weight.dtype
        )
        made.fit(weight, **fit_options)
        return made.train(table.training)

    @torch.no_grad()
    def fit(self, weight: Tensor, **fit_options: Any) -> float:
        """Set the factors to the closest to a table; returns |W - W'| / |W|, kept as `fit_error`."""
        expected = (self.num_embeddings, self.embedding_dim)
        if tuple(weight.shape) != expected:
            raise ShapeError(
                f"the table has the wrong shape: expected {expected} for {self.format}, got {tuple(weight.shape)}"
            )
        weight = weight.detach()
        wide = F.pad(weight, (0, 0, 0, self.format.M - self.num_embeddings))
        factors, _ = self.format.from_dense(wide, **fit_options)
        self._store(factors)
        norm = float(torch.linalg.vector_norm(weight, dtype=torch.float64))
        off = float(torch.linalg.vector_norm(self.dense_weight() - weight, dtype=torch.float64))
        self.fit_error = off / norm if norm else 0.0
        return self.fit_error

    # Frozen ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def freeze_products(self, rows: Sequence[int]) -> None:
        """Hold a small table dense; of a large one rows are contracted as before."""
        self.requires_grad_(False)
        self.frozen = True
        self._buffers.pop("frozen_table", None)
        if self.num_embeddings * self.embedding_dim <= HELD:
            self.register_buffer("frozen_table", self._table(), persistent=False)

    def train(self: Layer, mode: bool = True) -> Layer:
        """As torch's; a frozen table refuses to train."""
        if mode and self.frozen:
            raise PlanError("a frozen table does not train: train the module that kc.freeze was called with")
        return super().train(mode)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.format}{padding}"


def is_compressible(table: nn.Embedding) -> bool:
    """Whether its rows mean no more than a format can hold."""
    return table.max_norm is None and (table.padding_idx is None or not bool(table.weight[table.padding_idx].any()))


def check_compressible(table: nn.Embedding) -> None:
    """Refuse a table for which that is not so."""
    if table.max_norm is not None:
        raise ShapeError("a table with max_norm changes when it is read, which a format cannot: set max_norm=None")
    if not is_compressible(table):
        raise ShapeError(
            f"the row of padding_idx={table.padding_idx} is not zero, and a compressed table gives zeros there: "
            "set that row to zero, or padding_idx=None"
        )


def _checked_rows(rows: int | None, format: Format) -> int:
    if rows is None:
        return format.M
    if isinstance(rows, bool) or not isinstance(rows, int) or not 0 < rows <= format.M:
        raise ShapeError(f"num_embeddings must be 1 to {format.M}, the rows of {format}, got {rows!r}")
    return rows


def _checked_padding(index: int | None, rows: int) -> int | None:
    if index is None:
        return None
    if isinstance(index, bool) or not isinstance(index, int) or not -rows <= index < rows:
        raise ShapeError(f"padding_idx must be within the {rows} rows, got {index!r}")
    return index % rows
