"""The paper's parallelism over K: every process holds some branches of a KCP matrix, and their products are summed.

    y = sum over processes p of  sum over branches k of p of (x meets A_k, then B_k)

One all-reduce forward, and one backward for x. With tie="all" the branches of all factors are divided. With tie="pair"
the index k is summed after every pair of modes, so only one pair can be divided without a sum in between: the last one,
which meets x first and does nearly all the work; the factors of the other pairs, a few hundred numbers, are on every
process, and their gradients are summed over the processes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kronecell.errors import PlanError, ShapeError
from kronecell.formats import KCP
from kronecell.nn.linear import TensorLinear
from kronecell.plans.network import Factor, Network
from kronecell.plans.order import Tree

Group = Any  # torch.distributed.ProcessGroup, or None for all processes
Module = TypeVar("Module", bound=nn.Module)


def branch_parallel(module: nn.Module, group: Group = None) -> nn.Module:
    """A copy of `module` (a TensorLinear, or an LSTM or GRU with such inside) with its KCP branches over the processes.

    Call it on every process of `group` with the same weights; every process must then see the same x. Any number of
    processes up to K; where K is not a multiple, the first ones hold one branch more.
    """
    if not dist.is_initialized():
        raise PlanError("branch_parallel needs torch.distributed: call init_process_group first, or use torchrun")
    if isinstance(module, TensorLinear):
        return BranchParallel(module, group)
    found = [name for name, child in module.named_modules() if isinstance(child, TensorLinear) and _is_kcp(child)]
    if not found:
        raise ShapeError(f"branch_parallel found no KCP matrix in {type(module).__name__}")
    module = copy.deepcopy(module)
    for name in found:
        parent = module.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], BranchParallel(module.get_submodule(name), group))  # type: ignore[arg-type]
    return module


class BranchParallel(TensorLinear):
    """A TensorLinear that holds the branches of one process; gives the whole product on every process."""

    def __init__(self, layer: TensorLinear, group: Group = None) -> None:
        if not _is_kcp(layer):
            raise ShapeError(f"only KCP is a sum over branches, got {layer.format}")
        self.whole: KCP = layer.format  # type: ignore[assignment]
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        shard = KCPBranches.of(self.whole, *share(self.whole.K, rank, size))
        like = layer.factors()[layer._names[0]]
        super().__init__(
            shard, layer.bias is not None, layer.order, like.device, like.dtype, gates=layer.gates, shared=layer.shared
        )
        self.process_group = group
        network = self.whole.network(layer.gates, self.shared)
        self.cuts = {factor.name: shard.cut(factor) for factor in network.parameters}
        with torch.no_grad():
            for name, tensor in layer.factors().items():
                cut = self.cuts[name]
                getattr(self, name).copy_(tensor if cut is None else tensor.narrow(*cut))
            if self.bias is not None and layer.bias is not None:
                self.bias.copy_(layer.bias)

    def factors(self) -> dict[str, Tensor]:
        """This process's factors; those that all processes hold get the sum of all processes' gradients."""
        return {
            name: tensor if self.cuts[name] is not None else _sum_gradient(tensor, self.process_group)
            for name, tensor in super().factors().items()
        }

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The sum of all processes' products; the bias is added once."""
        y = _sum_values(super().project(_sum_gradient(x, self.process_group), None), self.process_group)
        return y if bias is None else y + bias.to(y.dtype)

    def reset_parameters(self, std: float | None = None) -> None:
        """Nothing: the factors come from the whole layer; drawing here would set the processes' generators apart."""

    def dense_weight(self) -> Tensor:
        return _sum_values(super().dense_weight(), self.process_group)

    @torch.no_grad()
    def gather(self) -> TensorLinear:
        """The whole layer, on every process; for saving it."""
        like = getattr(self, self._names[0])
        layer = TensorLinear(
            self.whole, self.bias is not None, self.order, like.device, like.dtype, gates=self.gates, shared=self.shared
        )
        for name, target in layer.factors().items():
            cut = self.cuts[name]
            if cut is None:
                target.copy_(getattr(self, name))
            else:
                target.zero_()
                target.narrow(*cut).copy_(getattr(self, name))
                dist.all_reduce(target, group=self.process_group)
        if layer.bias is not None and self.bias is not None:
            layer.bias.copy_(self.bias)
        return layer


def share(K: int, rank: int, size: int) -> tuple[int, int]:
    """The branches first ... stop-1 of one process; the first K mod size processes hold one more."""
    if size > K:
        raise PlanError(f"{size} processes cannot share K = {K} branches; use at most {K}")
    first = rank * (K // size) + min(rank, K % size)
    return first, first + K // size + (rank < K % size)


@dataclass(frozen=True)
class KCPBranches(KCP):
    """The terms of a KCP in which the branch index of the last group of modes is first ... stop-1."""

    first: int = 0
    stop: int = 1

    kind: ClassVar[str] = "kcp branches"

    @staticmethod
    def of(whole: KCP, first: int, stop: int) -> KCPBranches:
        """Some branches of a format."""
        return KCPBranches(**{f.name: getattr(whole, f.name) for f in fields(whole)}, first=first, stop=stop)

    def orders(self) -> dict[str, Tree]:
        return {name: tree for name, tree in super().orders().items() if name != "naive"}

    def _network(self) -> Network:
        network, p = super()._network(), len(self.groups)
        sizes = {**network.sizes, f"k{p}": self.stop - self.first}
        factors = []
        for factor in network.factors:
            side = {f"SA{p}": "CA", f"SB{p}": "CB"}.get(factor.name)
            blocks = factor.blocks if side is None else self.branch_ranks(side)[self.first : self.stop]
            factors.append(Factor(factor.name, factor.legs, factor.constant, blocks))
            if side is not None:
                sizes[factor.legs[0]] = sum(blocks)
        return Network.of(factors, network.inputs, network.outputs, sizes)

    def cut(self, factor: Factor) -> tuple[int, int, int] | None:
        """(dimension, start, length) of these branches in a factor of the whole format; None if it is not divided."""
        p = len(self.groups)
        if int(factor.name[1:]) not in self.groups[-1]:
            return None
        if self.equal_ranks:
            return factor.legs.index(f"k{p}"), self.first, self.stop - self.first
        ranks = self.branch_ranks("C" + factor.name[0])
        leg = factor.legs.index(f"{factor.name[0].lower()}{p}")
        return leg, sum(ranks[: self.first]), sum(ranks[self.first : self.stop])


def _is_kcp(layer: TensorLinear) -> bool:
    return isinstance(layer.format, KCP) and not isinstance(layer, BranchParallel)


def _sum_values(tensor: Tensor, group: Group) -> Tensor:
    """Sum over the processes; the gradient passes as it is, because every process has the same one."""
    return _SumValues.apply(tensor, group)


def _sum_gradient(tensor: Tensor, group: Group) -> Tensor:
    """The tensor itself; its gradient is summed over the processes, because every one has a part of it."""
    return _SumGradient.apply(tensor, group)


class _SumValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
