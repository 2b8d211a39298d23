"""Training of the sparse parts of doped layers: dense at first, then fewer entries, down to the density of each.

    sparsity = train_sparsity(model, SparsitySchedule(end=2000))      # before the optimizer is made
    for x, y in batches:
        ...
        optimizer.step()
        sparsity.step(optimizer)

The density falls by a cubic law (Zhu and Gupta, 2017), and the largest entries stay. Structure and S are dropped in
turn, at a rate that falls to zero: S, while it is dense, would otherwise learn all that the structure is there for
(Thakker et al., MLSys 2021). Nothing is random but what torch's generator draws, and places that are tried anew, which
follow from the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kronecell.errors import KronecellError
from kronecell.formats.places import largest_places
from kronecell.nn.linear import TensorLinear
from kronecell.nn.sparse import SparseMatrix
from kronecell.ops.sparse import values_of
from kronecell.plans.sparse import Sparse


@dataclass(frozen=True)
class SparsitySchedule:
    """When S has how many entries, in steps of the optimizer.

    end      the step from which S has the density of its format, and its places stay
    begin    steps before which S stays dense
    every    steps between two choices of places
    dropout  rate of co-matrix dropout at the first step; it falls to zero at `end`. 0 is off
    regrow   share of the entries that each choice but the last gives to other places, at random; 0 is off
    seed     of these places
    """

    end: int
    begin: int = 0
    every: int = 50
    dropout: float = 0.5
    regrow: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("begin", 0), ("end", self.begin + 1), ("every", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise KronecellError(f"sparsity: {name} must be a whole number of at least {least}, got {value!r}")
        for name in ("dropout", "regrow"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
                raise KronecellError(f"sparsity: {name} must be from 0 to below 1, got {value!r}")

    def is_due(self, step: int) -> bool:
        """Whether places are chosen after this many steps."""
        return self.begin < step <= self.end and ((step - self.begin) % self.every == 0 or step == self.end)

    def density(self, step: int, target: float) -> float:
        """The share of entries after this many steps; it changes where a choice is due."""
        if step >= self.end:
            return target
        done = max(0, step - self.begin) // self.every * self.every / (self.end - self.begin)
        return target + (1.0 - target) * (1.0 - done) ** 3

    def rate(self, step: int) -> float:
        """Of co-matrix dropout."""
        return self.dropout * max(0.0, 1.0 - step / self.end)


class Sparsity:
    """What trains the sparse parts of a model; made by `train_sparsity`."""

    def __init__(self, model: nn.Module, schedule: SparsitySchedule, start: nn.Module | None = None) -> None:
        named = [*model.named_modules()]
        layers = {name: part for name, part in named if isinstance(part, TensorLinear) and part.sparse is not None}
        if not layers:
            raise KronecellError(
                f"train_sparsity found no doped layer in {type(model).__name__}; give one a format such as "
                "'doped:0.02+kcp:K=4,CA=4,CB=2'"
            )
        if any(layer.frozen for layer in layers.values()):
            raise KronecellError("a frozen layer does not train: train the module that kc.freeze was called with")
        self.schedule, self.steps = schedule, 0
        self.parts: list[tuple[SparseMatrix, Sparse]] = []
        for name, layer in layers.items():
            sparse, target = layer.sparse, layer.format.sparse(layer.gates)
            assert sparse is not None and target is not None
            rest = None if start is None else _rest(layer, name, start)
            self.parts.append((sparse, target))
            everywhere = torch.arange(target.places, device=sparse.places.device)
            _move(sparse, everywhere, None)
            if rest is not None:
                sparse.resize(values_of(rest, everywhere, target.block), everywhere)
        self._set_rate()

    @property
    def finished(self) -> bool:
        """Whether every S has the density of its format."""
        return self.steps >= self.schedule.end

    @property
    def density(self) -> float:
        """The share of entries that all S together have now."""
        now = sum(sparse.entries.numel() for sparse, _ in self.parts)
        return now / sum(target.places * target.block for _, target in self.parts)

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, end: bool = False) -> bool:
        """To be called after each step of the optimizer: it gets the parameters that are smaller, with their state.

        True if there are other parameters now. With `end` the schedule is cut short: every S gets its density at once.
        """
        self.steps = max(self.steps + 1, self.schedule.end) if end else self.steps + 1
        self._set_rate()
        if not self.schedule.is_due(self.steps):
            return False
        for number, (sparse, target) in enumerate(self.parts):
            size = self._size(target)
            sizes = torch.zeros(target.places, dtype=sparse.entries.dtype, device=sparse.entries.device)
            sizes[sparse.places] = sparse.entries.square().sum(1)
            if self.schedule.regrow and not self.finished:
                sizes[self._anew(sizes, size, number)] = torch.inf
            _move(sparse, largest_places(sizes, size), optimizer)
        return True

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs beside the state dicts of model and optimizer."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make room for the entries of that step: before the optimizer is made and the model's state dict is loaded."""
        self.steps = int(state["steps"])
        for sparse, target in self.parts:
            _move(sparse, torch.arange(self._size(target).count, device=sparse.places.device), None)
        self._set_rate()

    def _size(self, target: Sparse) -> Sparse:
        share = target.count / target.places
        count = round(self.schedule.density(self.steps, share) * target.places)
        return replace(target, count=max(target.count, count))

    def _set_rate(self) -> None:
        for sparse, _ in self.parts:
            sparse.drop = self.schedule.rate(self.steps)

    def _anew(self, sizes: Tensor, size: Sparse, number: int) -> Tensor:
        """Places that have no entry, drawn from the step and the number of the layer."""
        generator = torch.Generator().manual_seed(self.schedule.seed + 1_000_003 * self.steps + number)
        free = (sizes == 0).nonzero().squeeze(1)
        chosen = torch.randperm(len(free), generator=generator)[: int(self.schedule.regrow * size.count)]
        return free[chosen.to(free.device)]


def train_sparsity(model: nn.Module, schedule: SparsitySchedule, start: nn.Module | None = None) -> Sparsity:
    """Make the sparse part of every doped layer in `model` dense, to be trained down to its density.

    With `start`, a trained model with dense weights under the same names (the one that `model` was fitted to), S starts
    as all that the structure leaves of them: the first loss is that of `start`, and nothing is lost at once.

    Call it before the optimizer is made, then `step(optimizer)` after each of its steps. Until the schedule ends,
    `kc.save` refuses the model, because it is larger than its formats say; state dicts are fine. To resume, load the
    state of this object first, then make the optimizer and load the states of the model and of it.
    """
    return Sparsity(model, schedule, start)


@torch.no_grad()
def _rest(layer: TensorLinear, name: str, start: nn.Module) -> Tensor:
    """What the structure leaves of the dense weight that `start` has in place of this layer."""
    known = dict(start.named_parameters())
    weight = next((known[key] for key in (name, f"{name}.weight".removeprefix(".")) if key in known), None)
    expected = (layer.out_features, layer.in_features)
    if weight is None or tuple(weight.shape) != expected:
        got = "none" if weight is None else str(tuple(weight.shape))
        raise KronecellError(
            f"train_sparsity: start needs a dense weight {expected} named {name or 'weight'!r}, as the doped layer is, "
            f"got {got}; give the trained model that this one was fitted to, or no start"
        )
    return weight - layer.structure_weight()


@torch.no_grad()
def _move(sparse: SparseMatrix, places: Tensor, optimizer: torch.optim.Optimizer | None) -> None:
    """Entries at other places: those that were there keep their value, others start at zero."""
    old, count = sparse.places, sparse.size.places
    before = sparse.entries.shape

    def moved(tensor: Tensor) -> Tensor:
        whole = tensor.new_zeros(count, sparse.size.block).index_copy_(0, old, tensor)
        return whole[places]

    entries = sparse.entries
    sparse.resize(moved(entries), places)
    for group in () if optimizer is None else optimizer.param_groups:
        group["params"] = [sparse.entries if one is entries else one for one in group["params"]]
    state = {} if optimizer is None else optimizer.state.pop(entries, {})
    if optimizer is not None and state:
        optimizer.state[sparse.entries] = {
            name: moved(value) if isinstance(value, Tensor) and value.shape == before else value
            for name, value in state.items()
        }
