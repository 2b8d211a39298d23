"""The matrices of a model that can be compressed, with their names, sizes and weights."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from kronecell.errors import KronecellError
from kronecell.nn.linear import TensorLinear
from kronecell.nn.recurrent import Recurrent

SUFFIXES = {1: ("",), 2: ("", "_reverse")}


@dataclass(frozen=True)
class Matrix:
    """W of a Linear, or W or U of one layer of an LSTM or GRU: `gates` matrices (M, N), once per direction."""

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
        end = "" if self.part == "weight" else f"_l{self.layer}"
        return ".".join(filter(None, (self.module, self.part + end)))

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The parameters inside the module."""
        if self.part == "weight":
            return ("weight",)
        return tuple(f"{self.part}_l{self.layer}{suffix}" for suffix in SUFFIXES[self.directions])

    @property
    def copies(self) -> int:
        """Matrices of this name: one per direction."""
        return self.directions

    @property
    def params(self) -> int:
        """Dense parameters, both directions."""
        return self.copies * self.gates * self.M * self.N

    def weights(self) -> list[Tensor]:
        """One (gates, M, N) per direction, acting as x @ W."""
        found = []
        for name in self.weight_names:
            weight: Tensor = getattr(self.owner, name).detach()  # (gates N, M)
            found.append(weight.reshape(self.gates, self.N, self.M).transpose(1, 2))
        return found

    def matched_by(self, pattern: str) -> bool:
        """The module's name matches its W; a name of a matrix matches that matrix."""
        return fnmatchcase(self.name, pattern) or (self.part != "weight_hh" and fnmatchcase(self.module, pattern))


def matrices_of(model: nn.Module) -> list[Matrix]:
    """Every matrix of the torch.nn LSTM, GRU and Linear modules inside, without subclasses, which may differ."""
    found = []
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            found.append(Matrix(name, "weight", 0, module.in_features, module.out_features, 1, 1, module))
        elif type(module) in (nn.LSTM, nn.GRU):
            assert isinstance(module, (nn.LSTM, nn.GRU))
            gates = 4 if isinstance(module, nn.LSTM) else 3
            directions = 2 if module.bidirectional else 1
            out = module.proj_size or module.hidden_size
            for layer in range(module.num_layers):
                width = module.input_size if layer == 0 else directions * out
                sizes = {"weight_ih": width, "weight_hh": out}
                for part, M in sizes.items():
                    found.append(Matrix(name, part, layer, M, module.hidden_size, gates, directions, module))
    return found


def dense_modules(model: nn.Module, patterns: list[str] | None) -> tuple[nn.Module, dict[str, nn.Module]]:
    """The model with our own matched layers in their dense form, so that they can be compressed, and those layers.

    Without patterns only layers that hold no compressed matrix are taken: what is compressed stays as it is.
    """
    taken: dict[str, nn.Module] = {}
    for name, module in [*model.named_modules()]:
        ours = isinstance(module, Recurrent) or (isinstance(module, TensorLinear) and module.gates == 1)
        parent = model.get_submodule(name.rpartition(".")[0]) if name else None
        if not ours or isinstance(parent, Recurrent):
            continue
        if patterns is None:
            matched = not any(isinstance(part, TensorLinear) for part in module.modules())
        else:
            matched = any(fnmatchcase(name, p) or p.startswith(f"{name}.") for p in patterns) or not name
        if matched:
            assert isinstance(module, (Recurrent, TensorLinear))
            taken[name] = module
            dense = module.to_dense()
            if parent is None:
                return dense, taken
            setattr(parent, name.rpartition(".")[2], dense)
    return model, taken


def check_untied(model: nn.Module, matrices: list[Matrix]) -> None:
    """Refuse a weight that another module uses too: compression would untie them."""
    uses: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), set()).add(name)
    for matrix in matrices:
        for weight in matrix.weight_names:
            parameter = getattr(matrix.owner, weight)
            owners = {name.rpartition(".")[0] for name in uses[id(parameter)]}
            modules = {id(model.get_submodule(owner)) for owner in owners}
            if len(modules) > 1:
                raise KronecellError(
                    f"{matrix.name} shares its weight with {', '.join(sorted(owners - {matrix.module}))}; compressing "
                    f"it would break the tie: untie them first, or leave it out of the rules"
                )


def stacked(weights: list[Tensor]) -> Tensor:
    """All directions and gates as one (copies * gates, M, N)."""
    return torch.cat(weights)
