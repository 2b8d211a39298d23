"""kc.quantize: a module for inference whose weights are integers of 3 to 8 bits, with their scales.

Dense matrices (W and U of LSTM and GRU, Linear, Embedding) run as integers, which are converted in registers:
everything is computed in floats, inputs and states are never rounded. Factors of compressed matrices are stored as
integers; their products are floats that are held as kc.freeze holds them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from kronecell.errors import PlanError, ShapeError
from kronecell.nn.cells import GRUCell, LSTMCell
from kronecell.nn.embedding import TensorEmbedding
from kronecell.nn.freeze import ROWS
from kronecell.nn.linear import TensorLinear
from kronecell.nn.quantized import Integers, QuantizedEmbedding, QuantizedFactor, QuantizedLinear
from kronecell.nn.recurrent import Recurrent
from kronecell.nn.rnn import GRU, LSTM
from kronecell.nn.sparse import SparseMatrix
from kronecell.ops.quantized import BITS

SMALL = 256  # weights of a matrix or factor that stays as it is: it would save less than a kilobyte
OURS: dict[type[nn.Module], type[Recurrent]] = {
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.LSTMCell: LSTMCell,
    nn.GRUCell: GRUCell,
}
Group = int | str | None
Bits = int | Mapping[str, int]
Factored = TensorLinear | TensorEmbedding | SparseMatrix


@dataclass(frozen=True)
class MatrixReport:
    """One matrix or factor: how it is stored, its bytes before and after, and its relative error."""

    name: str
    shape: tuple[int, ...]
    bits: int
    group: int  # columns with one scale; 0 for a whole row
    bytes_before: int
    bytes_after: int
    error: float

    def row(self) -> tuple[str, ...]:
        """For the table."""
        shape = " x ".join(map(str, self.shape))
        scales = f"group of {self.group}" if self.group else "row"
        sizes = f"{self.bytes_before:,}", f"{self.bytes_after:,}", f"{self.bytes_before / self.bytes_after:.1f}"
        return self.name, shape, str(self.bits), scales, *sizes, f"{self.error:.2%}"


@dataclass(frozen=True)
class Quantization:
    """What kc.quantize did: every matrix, and the bytes of the whole model with what stayed floats."""

    matrices: tuple[MatrixReport, ...]
    bytes_before: int
    bytes_after: int

    @classmethod
    def of(cls, module: nn.Module) -> Quantization:
        """Of a module with integers."""
        matrices = tuple(_report(name, part) for name, part in module.named_modules() if isinstance(part, Integers))
        after = bytes_of(module)
        saved = sum(matrix.bytes_before - matrix.bytes_after for matrix in matrices)
        return cls(matrices, after + saved, after)

    @property
    def ratio(self) -> float:
        """How many times smaller the whole model is."""
        return self.bytes_before / max(self.bytes_after, 1)

    def record(self) -> dict[str, Any]:
        """In JSON's types."""
        return {
            "matrices": [asdict(matrix) | {"shape": [*matrix.shape]} for matrix in self.matrices],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }

    def __str__(self) -> str:
        whole = f"{self.bytes_before:,}", f"{self.bytes_after:,}", f"{self.ratio:.1f}"
        lines: list[tuple[str, ...]] = [("matrix", "shape", "bits", "a scale per", "bytes", "now", "ratio", "error")]
        lines += [matrix.row() for matrix in self.matrices]
        lines.append(("whole model", "", "", "", *whole, ""))
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )


@torch.no_grad()
def quantize(module: nn.Module, bits: Bits = 8, group: Group = None) -> Any:
    """A copy of `module` in eval mode with integers as weights; its `quantization` is a report that prints a table.

    `bits` is 3 to 8, or {pattern of names: bits}, such as {"*": 8, "rnn.weight_hh_l*": 4}: the last pattern that
    matches a matrix or a module around it counts, and what none matches stays floats. `group` is "row" (one scale for
    each output), a number of columns that share a scale, or None: chosen for every matrix by its error for its size.
    The scale of the least squared error is taken.

    Linear, Embedding, LSTM, GRU and the cells of torch.nn and of this package are quantized wherever they are inside;
    torch.nn's recurrent layers become this package's. Biases, everything else and matrices of at most 256 weights stay
    as they are. The copy refuses to train; `to_dense()` of a layer, and `dequantize`, give floats again.

    >>> small = quantize(nn.LSTM(32, 32))
    >>> print(small.quantization)
    matrix        shape     bits  a scale per   bytes    now  ratio  error
    ...
    """
    check_options(module, bits, group)
    if is_quantized(module):
        raise PlanError("the module is quantized already: quantize the module that it came from")
    copied = copy.deepcopy(module).eval().requires_grad_(False)
    rounding = _Rounding(bits, 0 if group == "row" else group, _tied(copied))  # type: ignore[arg-type]
    return with_report(rounding.convert(copied, ""))


def with_report(module: nn.Module) -> Any:
    """The module with its report."""
    module.quantization = Quantization.of(module)  # type: ignore[assignment]
    return module


def is_quantized(module: nn.Module) -> bool:
    """Whether there are integers inside."""
    return any(isinstance(part, Integers) for part in module.modules())


def check_options(module: Any, bits: Any, group: Any) -> None:
    """Refuse what is not a module, bits or a group."""
    if not isinstance(module, nn.Module):
        raise ShapeError(f"quantize takes a torch module, got {type(module).__name__}")
    if isinstance(bits, Mapping):
        names = [name for name, _ in module.named_modules()] + [name for name, _ in module.named_parameters()]
        for pattern in bits:
            if not any(_matches(name, str(pattern)) for name in names):
                raise ShapeError(
                    f"bits: {pattern!r} matches nothing in the module; its parts have names such as {names[-1]}"
                )
    for number in bits.values() if isinstance(bits, Mapping) else [bits]:
        if isinstance(number, bool) or not isinstance(number, int) or number not in BITS:
            raise ShapeError(f"bits must be a whole number from 3 to 8, got {number!r}")
    whole = isinstance(group, int) and not isinstance(group, bool) and group > 0
    if not (whole or group is None or group == "row"):
        raise ShapeError(f'group must be "row", a number of columns or None, got {group!r}')


class _Rounding:
    """The way through a model; every weight becomes integers."""

    def __init__(self, bits: Bits, group: int | None, tied: frozenset[int] = frozenset()) -> None:
        self.bits, self.group, self.tied = bits, group, tied
        self.done: dict[int, nn.Module] = {}  # by the identity of the module: one in two places stays one

    def convert(self, module: nn.Module, name: str) -> nn.Module:
        """The module with integers, changed in place where it can be."""
        found = self.done.get(id(module))
        if found is None:
            found = self.done[id(module)] = self._convert(module, name)
            self.done[id(found)] = found
        return found

    def _convert(self, module: nn.Module, name: str) -> nn.Module:
        if type(module) is nn.Linear:
            return self.matrix(module.weight, module.bias, name) or module
        if type(module) is nn.Embedding:
            return self.embedding(module, name) or module
        if type(module) in OURS:
            module = _ours(module)
        if isinstance(module, Recurrent):
            for part, weight in [*module.named_parameters(recurse=False)]:
                integers = self.matrix(weight, None, _joined(name, part)) if weight.ndim == 2 else None
                if integers is not None:
                    delattr(module, part)
                    setattr(module, part, integers)
        if isinstance(module, (TensorLinear, TensorEmbedding)):
            self.factors(module, name)
            if isinstance(module, TensorLinear) and module.sparse is not None:
                self.factors(module.sparse, _joined(name, "sparse"))
        else:
            for part, child in [*module.named_children()]:
                setattr(module, part, self.convert(child, _joined(name, part)))
        if isinstance(module, (TensorLinear, TensorEmbedding, Recurrent)):
            hold(module)
        return module

    def matrix(self, weight: Tensor, bias: Tensor | None, name: str) -> QuantizedLinear | None:
        """A matrix as integers; None where it is small."""
        bits = self.bits_of(name)
        if weight.numel() <= SMALL or not bits:
            return None
        _check_dtype(weight, name)
        return QuantizedLinear.of(weight, bias, bits, self.group, name)

    def embedding(self, table: nn.Embedding, name: str) -> QuantizedEmbedding | None:
        """A table as integers; None where it is small, also a matrix of another module, or changed when it is read."""
        bits = self.bits_of(name)
        if table.weight.numel() <= SMALL or not bits or id(table.weight) in self.tied or table.max_norm is not None:
            return None
        _check_dtype(table.weight, name)
        return QuantizedEmbedding.of(table, bits, self.group, name)

    def bits_of(self, name: str) -> int:
        """Of a matrix or factor; 0 where it stays floats."""
        if not isinstance(self.bits, Mapping):
            return self.bits
        return next((bits for pattern, bits in [*self.bits.items()][::-1] if _matches(name, pattern)), 0)

    def factors(self, layer: Factored, name: str) -> None:
        """The factors of a compressed matrix, or the values of a sparse one, as integers."""
        made: dict[str, QuantizedFactor] = {}
        for part, factor in layer.factors().items():
            bits = self.bits_of(_joined(name, part))
            if factor.numel() > SMALL and bits:
                _check_dtype(factor, _joined(name, part))
                made[part] = QuantizedFactor.of(factor, bits, self.group, _joined(name, part))
        with_integers(layer, made)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern names this part or a module around it."""
    steps = name.split(".")
    return any(fnmatchcase(".".join(steps[:count]), pattern) for count in range(len(steps) + 1))


def _tied(module: nn.Module) -> frozenset[int]:
    """Parameters that several modules use."""
    uses: dict[int, set[int]] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            uses.setdefault(id(parameter), set()).add(id(part))
    return frozenset(parameter for parameter, modules in uses.items() if len(modules) > 1)


def _report(name: str, part: Integers) -> MatrixReport:
    """A line of the table."""
    shape = part.shape if isinstance(part, QuantizedFactor) else (part.rows, part.columns)
    before = part.num_weights * part.scales.element_size()
    name = name.replace("quantized.", "")
    return MatrixReport(name, shape, part.bits, part.group, before, part.num_bytes, part.error)


def with_integers(layer: Factored, factors: Mapping[str, QuantizedFactor]) -> None:
    """Put factors of integers into a layer; the floats that they stand for are buffers that no file has."""
    if not factors:
        return
    layer.quantized = nn.ModuleDict(dict(factors))
    for name, factor in factors.items():
        delattr(layer, name)
        layer.register_buffer(name, factor.factor(), persistent=False)


def hold(module: TensorLinear | TensorEmbedding | Recurrent) -> None:
    """Hold products of weights, now and whenever a state dict is loaded."""
    module.of_integers = True  # type: ignore[assignment]
    module.register_load_state_dict_post_hook(_loaded)
    if not any(tensor.is_meta for tensor in module.state_dict().values()):
        module.freeze_products(ROWS)


def _loaded(module: Any, _: Any) -> None:
    """Make the floats of a module anew from integers that were loaded. Children come before what they are in."""
    if not module.of_integers:  # but of floats again
        return
    for part in (module, getattr(module, "sparse", None)):
        for name, factor in (getattr(part, "quantized", None) or {}).items():
            setattr(part, name, factor.factor())
    module.frozen = type(module.frozen)()
    module.freeze_products(ROWS)


def _ours(module: nn.Module) -> nn.Module:
    layer: Any = OURS[type(module)]
    return layer.from_dense(module).eval().requires_grad_(False)


def _check_dtype(weight: Tensor, name: str) -> None:
    if weight.is_meta:
        raise ShapeError(f"{name or 'the weight'} is on the meta device: it has no numbers that could be rounded")
    if weight.dtype not in (torch.float32, torch.float64):
        raise ShapeError(f"{name or 'the weight'} has dtype {weight.dtype}: quantize takes float32 or float64")


def _joined(outer: str, inner: str) -> str:
    return f"{outer}.{inner}" if outer else inner


def bytes_of(module: nn.Module) -> int:
    """Of all parameters and of the buffers that are saved; what is in two places counts once."""
    tensors = {(t.data_ptr(), t.numel(), t.dtype): t for t in module.state_dict().values() if t.numel()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


# Back, and files --------------------------------------------------------------------------------------------------


def layout(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Everything of integers inside a module by name: what `with_layout` needs to make room for it."""
    parts = module.named_modules(remove_duplicate=False)
    return {name: part.layout() for name, part in parts if isinstance(part, Integers)}


@torch.no_grad()
def with_layout(module: nn.Module, wanted: Mapping[str, Mapping[str, Any]]) -> Any:
    """The module, changed in place, with room for integers where `wanted` has them in place of floats."""
    made = _Room(wanted).convert(module.eval().requires_grad_(False), "")
    found = layout(made)
    if found != wanted:
        missing = sorted({*found} ^ {*wanted}) or [name for name in found if found[name] != wanted[name]]
        raise ShapeError(f"the module has no place for the integers of {', '.join(missing[:5])}")
    return made


class _Room(_Rounding):
    """The same way through a model, with nothing to round."""

    def __init__(self, wanted: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(8, 0)
        self.wanted = wanted

    def matrix(self, weight: Tensor, bias: Tensor | None, name: str) -> QuantizedLinear | None:
        how = self.wanted.get(name)
        if how is None:
            return None
        rows, columns = weight.shape
        layer = QuantizedLinear(rows, columns, how["bits"], how["group"], bias is not None, weight.device, weight.dtype)
        layer.error = how["error"]
        return layer

    def embedding(self, table: nn.Embedding, name: str) -> QuantizedEmbedding | None:
        how = self.wanted.get(name)
        if how is None:
            return None
        like = table.weight
        made = QuantizedEmbedding(like.shape[0], like.shape[1], how["bits"], how["group"], like.device, like.dtype)
        made.error = how["error"]
        return made

    def factors(self, layer: Factored, name: str) -> None:
        made = {}
        for part, factor in layer.factors().items():
            how = self.wanted.get(_joined(name, f"quantized.{part}"))
            if how is not None:
                shape, leg = (*factor.shape,), how["leg"]
                if not -1 <= leg < len(shape):
                    raise ShapeError(f"{_joined(name, part)} has no leg {leg}")
                made[part] = QuantizedFactor(shape, leg, how["bits"], how["group"], factor.device, factor.dtype)
                made[part].error = how["error"]
        with_integers(layer, made)


@torch.no_grad()
def dequantize(module: nn.Module) -> Any:
    """A copy with the floats that the integers stand for: ordinary layers of torch.nn and of this package."""
    made = _floats(copy.deepcopy(module))
    if hasattr(made, "quantization"):
        del made.quantization
    return made


def _floats(module: nn.Module) -> nn.Module:
    if isinstance(module, (QuantizedLinear, QuantizedEmbedding)):
        return module.to_dense()
    if isinstance(module, (TensorLinear, TensorEmbedding)):
        for part in filter(None, (module, getattr(module, "sparse", None))):
            for name, tensor in part.factors().items():
                if not isinstance(tensor, nn.Parameter):
                    delattr(part, name)
                    part.register_parameter(name, nn.Parameter(tensor))
            part.quantized = None
        return _thawed(module)
    for name, child in [*module.named_children()]:
        if isinstance(module, Recurrent) and isinstance(child, QuantizedLinear):
            delattr(module, name)
            module.register_parameter(name, nn.Parameter(child.matrix()))
        else:
            setattr(module, name, _floats(child))
    return _thawed(module) if isinstance(module, Recurrent) else module


def _thawed(module: Any) -> Any:
    module.frozen = type(module.frozen)()
    module.of_integers = False
    for name in [name for name, _ in module.named_buffers(recurse=False) if name.startswith("frozen_")]:
        delattr(module, name)
    return module.requires_grad_(True)
