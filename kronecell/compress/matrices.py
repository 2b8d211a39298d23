"""The matrices of a model that can be compressed, with their names, sizes and weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from kronecell.errors import KronecellError
from kronecell.nn.cells import GRUCell, LSTMCell
from kronecell.nn.embedding import TensorEmbedding, is_compressible
from kronecell.nn.linear import TensorLinear
from kronecell.nn.quantize import bytes_of
from kronecell.nn.quantized import Integers, QuantizedEmbedding, QuantizedLinear
from kronecell.nn.recurrent import Recurrent
from kronecell.nn.rnn import GRU, LSTM

SUFFIXES = {1: ("",), 2: ("", "_reverse")}
RECURRENT: dict[type[nn.Module], type[Recurrent]] = {
    nn.LSTM: LSTM, nn.GRU: GRU, nn.LSTMCell: LSTMCell, nn.GRUCell: GRUCell,
    LSTM: LSTM, GRU: GRU, LSTMCell: LSTMCell, GRUCell: GRUCell,
}  # fmt: skip
WILD = frozenset("*?[")
TABLES = (nn.Embedding, TensorEmbedding, QuantizedEmbedding)


@dataclass(frozen=True)
class Matrix:
    """W of a Linear, the rows of an Embedding, or W or U of one layer of an LSTM or GRU.

    That is `gates` matrices (M, N), once per direction.
    """

    module: str  # the module's name in the model; "" for the model itself
    part: str  # weight, weight_ih or weight_hh
    layer: int
    M: int
    N: int
    gates: int
    directions: int
    owner: nn.Module

    @property
    def name(self) -> str:
        """Such as head.weight or rnn.weight_hh_l0; the latter stands for both directions."""
        return ".".join(filter(None, (self.module, self.part + self._end)))

    @property
    def _end(self) -> str:
        cell = isinstance(self.owner, (nn.RNNCellBase, LSTMCell, GRUCell))
        return "" if self.part == "weight" or cell else f"_l{self.layer}"

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The parameters inside the module."""
        return tuple(self.part + self._end + suffix for suffix in SUFFIXES[self.directions])

    @property
    def copies(self) -> int:
        """Matrices of this name: one per direction."""
        return self.directions

    @property
    def params(self) -> int:
        """Dense parameters, both directions."""
        return self.copies * self.gates * self.M * self.N

    @property
    def is_table(self) -> bool:
        """Whether rows are looked up and not multiplied."""
        return isinstance(self.owner, TABLES)

    @property
    def takes_format(self) -> bool:
        """Whether a format can stand for it: not for a table whose rows mean more."""
        return not isinstance(self.owner, nn.Embedding) or is_compressible(self.owner)

    def parts(self) -> list[Any]:
        """What holds the weights: one parameter or layer per direction."""
        if isinstance(self.owner, (TensorLinear, TensorEmbedding, Integers)):
            return [self.owner]
        return [getattr(self.owner, name) for name in self.weight_names]

    @property
    def is_compressed(self) -> bool:
        """Whether it is a format or integers already."""
        return isinstance(self.parts()[0], nn.Module)

    @property
    def stored_params(self) -> int:
        """Parameters as they are now: fewer than dense where it is compressed already."""
        return sum(stored(part)[0] for part in self.parts())

    @property
    def stored_bytes(self) -> int:
        """Bytes as they are now."""
        return sum(stored(part)[1] for part in self.parts())

    @torch.no_grad()
    def weights(self) -> list[Tensor]:
        """One (gates, M, N) per direction, acting as x @ W."""
        found = []
        for part in self.parts():
            weight = dense_weight(part)
            if not self.is_table:
                weight = weight.reshape(self.gates, self.N, -1)[:, :, : self.M].transpose(1, 2)
            found.append(weight.reshape(self.gates, self.M, self.N))
        return found

    def matched_by(self, pattern: str) -> bool:
        """The module's name matches its W; a name of a matrix matches that matrix.

        What is compressed already is matched by its name alone: a pattern with * or ? leaves it as it is.
        """
        if self.is_compressed and WILD & {*pattern}:
            return False
        return fnmatchcase(self.name, pattern) or (self.part != "weight_hh" and fnmatchcase(self.module, pattern))


def dense_weight(part: Any) -> Tensor:
    """In torch's layout, detached."""
    weight: Tensor = part if isinstance(part, Tensor) else part.dense_weight()
    return weight.detach()


def stored(part: Tensor | nn.Module) -> tuple[int, int]:
    """Parameters and bytes of a weight, of its factors or of its integers, biases not counted."""
    if isinstance(part, Integers):
        return part.num_weights, part.num_bytes
    if isinstance(part, TensorEmbedding):
        return part.num_params, bytes_of(part)
    if isinstance(part, TensorLinear):
        params = sum(tensor.numel() for tensor in part.factors().values())
        params += 0 if part.sparse is None else part.sparse.size.num_values
        bias = 0 if part.bias is None else part.bias.numel() * part.bias.element_size()
        return params, bytes_of(part) - bias
    assert isinstance(part, Tensor)
    return part.numel(), part.numel() * part.element_size()


def matrices_of(model: nn.Module) -> list[Matrix]:
    """Every matrix inside LSTM, GRU, their cells, Linear and Embedding, torch's and ours, without subclasses."""
    found: list[Matrix] = []
    inside: list[str] = []  # names of our recurrent layers: what is in them is theirs
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}." if outer else "") and name != outer for outer in inside):
            continue
        kind: Any = type(module)
        layer: Any = module
        if kind in (nn.Linear, QuantizedLinear) or (kind is TensorLinear and layer.gates == 1):
            found.append(Matrix(name, "weight", 0, layer.in_features, layer.out_features, 1, 1, module))
        elif kind in TABLES:
            found.append(Matrix(name, "weight", 0, layer.num_embeddings, layer.embedding_dim, 1, 1, module))
        elif kind in RECURRENT:
            inside.append(name)
            found += _recurrent(name, layer, RECURRENT[kind].GATES)
    return found


def _recurrent(name: str, module: Any, gates: int) -> list[Matrix]:
    directions = 2 if getattr(module, "bidirectional", False) else 1
    out = getattr(module, "proj_size", 0) or module.hidden_size
    found = []
    for layer in range(getattr(module, "num_layers", 1)):
        width = module.input_size if layer == 0 else directions * out
        for part, M in (("weight_ih", width), ("weight_hh", out)):
            found.append(Matrix(name, part, layer, M, module.hidden_size, gates, directions, module))
    return found


def skipped(model: nn.Module) -> list[str]:
    """Modules with large weights that no rule can reach, with their kinds."""
    known = {id(matrix.owner) for matrix in matrices_of(model)}
    found: list[str] = []
    inside: list[str] = []
    for name, module in model.named_modules():
        if id(module) in known or any(name.startswith(f"{outer}.") or not outer for outer in inside):
            inside += [name] if id(module) in known else []
            continue
        large = [p for p in module.parameters(recurse=False) if p.ndim >= 2 and p.numel() > LARGE]
        if large:
            found.append(f"{name or 'the model'} ({type(module).__name__}, {sum(p.numel() for p in large):,} weights)")
    return found


LARGE = 4096  # weights that are worth a word if they are skipped


def dense(model: nn.Module) -> nn.Module:
    """A copy with nothing compressed; recurrent layers stay this package's, whose arguments a model may use."""
    return _with_dense(copy.deepcopy(model))


def _with_dense(module: nn.Module) -> nn.Module:
    if isinstance(module, (Recurrent, TensorLinear, TensorEmbedding)):
        plain: Any = module.to_dense()
        return type(module).from_dense(plain) if isinstance(module, Recurrent) else plain
    for name, child in [*module.named_children()]:
        setattr(module, name, _with_dense(child))
    return module


def tied(model: nn.Module) -> set[int]:
    """Parameters that several modules use, by identity."""
    uses: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses.setdefault(id(parameter), set()).add(id(module))
    return {parameter for parameter, modules in uses.items() if len(modules) > 1}


def check_untied(model: nn.Module, matrices: list[Matrix]) -> None:
    """Refuse a weight that another module uses too: compression would untie them."""
    uses: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), set()).add(name)
    for matrix in matrices:
        for parameter in matrix.parts():
            if isinstance(parameter, nn.Module):
                continue
            owners = {name.rpartition(".")[0] for name in uses[id(parameter)]}
            modules = {id(model.get_submodule(owner)) for owner in owners}
            if len(modules) > 1:
                raise KronecellError(
                    f"{matrix.name} shares its weight with {', '.join(sorted(owners - {matrix.module}))}; compressing "
                    f"it would break the tie: untie them first, or leave it out of the rules"
                )
