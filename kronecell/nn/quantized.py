"""Weights that are stored as integers: a matrix as a layer, and a factor of a tensor network. See quantize.py."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronecell.errors import PlanError, ShapeError
from kronecell.nn.rounding import check_finite, chosen_group, rounded
from kronecell.ops.engine import BYTE
from kronecell.ops.quantized import dequantized, pack, quantized_linear, row_bytes

Layer = TypeVar("Layer", bound="Integers")


class QuantizedHidden(NamedTuple):
    """U of a recurrence as integers."""

    scales: Tensor  # first: callers that ask hidden[0] for its dtype get that of the computation
    integers: Tensor
    bits: int
    group: int
    columns: int

    def stored(self) -> tuple[Tensor, Tensor, int, int]:
        """As the operators take it."""
        return self.integers, self.scales, self.bits, self.group

    def dense(self) -> Tensor:
        """As floats."""
        return dequantized(self.integers, self.scales, self.bits, self.group, self.columns)


class Integers(nn.Module):
    """A matrix (rows, columns) of integers of 3 to 8 bits with scales: one a row (group 0), or one a group of a row."""

    integers: Tensor
    scales: Tensor

    def __init__(self, rows: int, columns: int, bits: int, group: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.rows, self.columns, self.bits, self.group = rows, columns, bits, group
        self.error = 0.0  # relative, of what was rounded
        kind = torch.int8 if bits == 8 else torch.uint8
        groups = -(-columns // group) if group else 1
        self.register_buffer("integers", torch.empty(rows, row_bytes(columns, bits), dtype=kind, device=device))
        self.register_buffer("scales", torch.empty(rows, groups, dtype=dtype, device=device))

    @torch.no_grad()
    def store(self, weight: Tensor) -> None:
        """Round these weights."""
        integers, scales = rounded(weight, self.bits, self.group)
        self.integers.copy_(pack(integers, self.bits))
        self.scales.copy_(scales)
        norm = float(torch.linalg.vector_norm(weight, dtype=torch.float64))
        off = float(torch.linalg.vector_norm(self.matrix() - weight, dtype=torch.float64))
        self.error = off / norm if norm else 0.0

    def layout(self) -> dict[str, Any]:
        """What makes room for the same integers, and their error."""
        return {"bits": self.bits, "group": self.group, "error": self.error}

    def matrix(self) -> Tensor:
        """The weights (rows, columns) as floats."""
        return dequantized(self.integers, self.scales, self.bits, self.group, self.columns)

    @property
    def num_bytes(self) -> int:
        """Of integers and scales."""
        return self.integers.numel() + self.scales.numel() * self.scales.element_size()

    @property
    def num_weights(self) -> int:
        """Weights that the integers stand for."""
        return self.rows * self.columns

    def train(self: Layer, mode: bool = True) -> Layer:
        """As torch's; integers refuse to train."""
        if mode:
            raise PlanError("a quantized module does not train: train the module that kc.quantize was called with")
        return super().train(mode)

    def bits_text(self) -> str:
        """For people."""
        return f"{self.bits} bits, {f'a scale for {self.group} columns' if self.group else 'a scale a row'}"


class QuantizedLinear(Integers):
    """(..., columns) -> (..., rows): torch.nn.Linear with integers as weights, computed in floats.

    `weight` is made anew at each access: the floats that the integers stand for.
    """

    bias: nn.Parameter | None

    def __init__(
        self, rows: int, columns: int, bits: int, group: int, bias: bool = False, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(rows, columns, bits, group, device, dtype)
        self.in_features, self.out_features = columns, rows
        if bias:
            self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype), requires_grad=False)
        else:
            self.register_parameter("bias", None)
        self.training = False

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, bits: int, group: int | None, name: str) -> QuantizedLinear:
        """A matrix of torch's layout, rounded; without a group, the one that is chosen by error."""
        weight = weight.detach()
        check_finite(weight, name)
        group = chosen_group(weight, bits) if group is None else _within(group, weight)
        rows, columns = weight.shape
        layer = cls(rows, columns, bits, group, bias is not None, weight.device, weight.dtype)
        layer.store(weight)
        if bias is not None:
            with torch.no_grad():
                layer.bias.copy_(bias)  # type: ignore[union-attr]
        return layer

    @property
    def weight(self) -> Tensor:
        """The dequantised weights, made anew."""
        return self.matrix()

    def dense_weight(self) -> Tensor:
        """The same; every compressed matrix has this method."""
        return self.matrix()

    def hidden(self) -> QuantizedHidden:
        """For the recurrences."""
        return QuantizedHidden(self._buffers["scales"], self._buffers["integers"], self.bits, self.group, self.columns)  # type: ignore[arg-type]

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T plus the layer's bias, or plus the one given."""
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ShapeError(f"input has the wrong width: expected (..., {self.in_features}), got {tuple(x.shape)}")
        x = x.to(self.scales.dtype) * BYTE if x.dtype == torch.uint8 else x
        return quantized_linear(
            x, self.integers, self.scales, self.bias if bias is None else bias, self.bits, self.group
        )

    @torch.no_grad()
    def to_dense(self) -> nn.Linear:
        """An nn.Linear with the same function."""
        weight = self.matrix()
        linear = nn.utils.skip_init(
            nn.Linear, self.columns, self.rows, self.bias is not None, device=weight.device, dtype=weight.dtype
        )
        linear.weight.copy_(weight)
        if self.bias is not None:
            linear.bias.copy_(self.bias)
        return linear.eval()

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}, {self.bits_text()}"


class QuantizedEmbedding(Integers):
    """torch.nn.Embedding with integers as weights; a small table is held as floats, too, which no file has."""

    def __init__(self, rows: int, columns: int, bits: int, group: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__(rows, columns, bits, group, device, dtype)
        self.num_embeddings, self.embedding_dim = rows, columns
        self.register_buffer("table", None, persistent=False)
        self.register_load_state_dict_post_hook(_hold_table)
        self.training = False

    @classmethod
    def of(cls, table: nn.Embedding, bits: int, group: int | None, name: str) -> QuantizedEmbedding:
        """A table, rounded row by row."""
        weight = table.weight.detach()
        check_finite(weight, name)
        group = chosen_group(weight, bits) if group is None else group
        made = cls(weight.shape[0], weight.shape[1], bits, group, weight.device, weight.dtype)
        made.store(weight)
        _hold_table(made)
        return made

    @property
    def weight(self) -> Tensor:
        """The dequantised rows, made anew."""
        return self.matrix()

    def dense_weight(self) -> Tensor:
        """The same; every compressed matrix has this method."""
        return self.matrix()

    def forward(self, index: Tensor) -> Tensor:
        """The rows of these numbers, as floats."""
        table = self._buffers["table"]
        if table is not None:
            return F.embedding(index, table)
        each = index.reshape(-1)
        rows = dequantized(self.integers[each], self.scales[each], self.bits, self.group, self.columns)
        return rows.reshape(*index.shape, self.columns)

    @torch.no_grad()
    def to_dense(self) -> nn.Embedding:
        """An nn.Embedding with the same rows."""
        return nn.Embedding.from_pretrained(self.matrix(), freeze=False)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.bits_text()}"


HELD = 1 << 18  # weights of the largest table that is held as floats: a lookup is then one operation, not twenty


def _hold_table(module: Any, _: Any = None) -> None:
    """Make the floats of a small table from its integers, also when those were loaded."""
    if module.num_weights <= HELD and not module.integers.is_meta:
        module.table = module.matrix()


class QuantizedFactor(Integers):
    """A tensor whose rows are along one of its legs, or which is a single row (leg -1)."""

    def __init__(
        self, shape: tuple[int, ...], leg: int, bits: int, group: int, device: Any = None, dtype: Any = None
    ) -> None:
        rows = shape[leg] if leg >= 0 else 1
        super().__init__(rows, prod(shape) // max(rows, 1), bits, group, device, dtype)
        self.shape, self.leg = shape, leg
        self.training = False

    @classmethod
    def of(cls, tensor: Tensor, bits: int, group: int | None, name: str) -> QuantizedFactor:
        """A factor, rounded along the leg of least error for its size."""
        tensor = tensor.detach()
        check_finite(tensor, name)
        legs = [-1, *(leg for leg, size in enumerate(tensor.shape) if size > 1 and tensor.numel() // size >= LONG)]
        found: list[tuple[float, int, QuantizedFactor]] = []
        for leg in legs:
            matrix = _as_matrix(tensor, leg)
            own = chosen_group(matrix, bits) if group is None else _within(group, matrix)
            made = cls((*tensor.shape,), leg, bits, own, tensor.device, tensor.dtype)
            made.store(matrix)
            found.append((made.error * 2 ** (8 * made.num_bytes / tensor.numel()), len(found), made))
        return min(found)[2]

    def layout(self) -> dict[str, Any]:
        """The same with the leg."""
        return super().layout() | {"leg": self.leg}

    def factor(self) -> Tensor:
        """The tensor as floats."""
        if self.leg <= 0:
            return self.matrix().reshape(self.shape)
        rest = [size for leg, size in enumerate(self.shape) if leg != self.leg]
        return self.matrix().reshape(self.shape[self.leg], *rest).movedim(0, self.leg).contiguous()

    def extra_repr(self) -> str:
        return f"{self.shape}, {self.bits_text()}"


def _within(group: int, matrix: Tensor) -> int:
    """A group of all columns, or more than there are, is a row."""
    return group if group < matrix.shape[1] else 0


LONG = 16  # weights of a row of a factor, at least: a scale is as large as four integers of 8 bits


def _as_matrix(tensor: Tensor, leg: int) -> Tensor:
    return tensor.reshape(1, -1) if leg < 0 else tensor.movedim(leg, 0).reshape(tensor.shape[leg], -1)


def integer_weights(module: nn.Module) -> int:
    """Weights that all integers inside a module stand for."""
    return sum(part.num_weights for part in module.modules() if isinstance(part, Integers))
