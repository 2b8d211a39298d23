"""Levenberg-Marquardt on all factors at once, for networks with few parameters.

Alternating least squares crawls where factors compensate each other (CP, BT and KCP know such swamps). The Gauss-Newton
matrix J^T J couples all pairs of factors; each of its blocks is again a contraction of a network (two copies, one
without F, the other without F'), so J itself, of size |W| x parameters, is never formed. A step is taken only if the
error falls, so this refinement is monotone too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor

from kronecell.formats.fitting.als import FROZEN, Environment, balance, environments, gram_tree
from kronecell.formats.fitting.options import FitOptions
from kronecell.ops.execute import contract_network
from kronecell.plans.network import Factor, Network
from kronecell.plans.plan import Plan

FIRST_DAMPING = 1e-3
LAST_DAMPING = 1e12
NEAR_EXACT = 2e-8  # relative error below which |W|^2 - 2 <W, W'> + |W'|^2 has no digits left


@dataclass(frozen=True)
class Block:
    """The block of J^T J that couples factors `row` and `column` of a dense network."""

    row: Environment
    column: Environment

    @cached_property
    def legs(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Output legs: those both factors hold as outer legs (the gate), the row's others, the column's others."""
        outer = {*self.row.network.outputs}
        common = tuple(leg for leg in self.row.factor.legs if leg in outer and leg in self.column.factor.legs)
        row = tuple(leg for leg in self.row.factor.legs if leg not in common)
        column = tuple(leg if leg in outer else f"{leg}'" for leg in self.column.factor.legs if leg not in common)
        return common, row, column

    @cached_property
    def plan(self) -> Plan:
        network = self.row.network
        outer, sizes, copies = {*network.outputs}, dict(network.sizes), []
        for f in self.column.others:
            legs = tuple(leg if leg in outer else f"{leg}'" for leg in f.legs)
            sizes.update({new: network.sizes[old] for old, new in zip(f.legs, legs, strict=True)})
            copies.append(Factor(f"{f.name}'", legs, f.constant, f.blocks))
        sizes |= {f"{leg}'": size for leg, size in network.sizes.items()}
        common, row, column = self.legs
        doubled = Network.of((*self.row.others, *copies), (), (*common, *row, *column), sizes)
        return Plan(doubled, gram_tree(doubled), order="curvature")

    def matrix(self, factors: dict[str, Tensor]) -> Tensor:
        """(row parameters, column parameters), both in the order of the factor's own legs (a gate leg is first)."""
        common, row, column = (prod(self.plan.network.shape(legs)) for legs in self.legs)
        both = factors | {f"{name}'": tensor for name, tensor in factors.items()}
        block = contract_network(self.plan, both).reshape(common, row, column)
        return block[0] if common == 1 else torch.block_diag(*block)  # gates do not couple


@dataclass(frozen=True)
class Curvature:
    """J^T J of a dense network."""

    network: Network

    @cached_property
    def blocks(self) -> tuple[tuple[Block, ...], ...]:
        """Blocks above the diagonal, by row."""
        rows = environments(self.network)
        return tuple(tuple(Block(row, column) for column in rows[i + 1 :]) for i, row in enumerate(rows))

    def matrix(self, factors: dict[str, Tensor], grams: list[Tensor]) -> Tensor:
        """(parameters, parameters), factor by factor, each in the order of its legs."""
        sizes = [factors[e.name].numel() for e in environments(self.network)]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        total = torch.zeros(sum(sizes), sum(sizes), dtype=torch.float64, device=grams[0].device)
        for i, (environment, row) in enumerate(zip(environments(self.network), self.blocks, strict=True)):
            a = slice(starts[i], starts[i] + sizes[i])
            total[a, a] = _diagonal_block(environment, grams[i])
            for j, block in enumerate(row, i + 1):
                b = slice(starts[j], starts[j] + sizes[j])
                total[a, b] = block.matrix(factors)
                total[b, a] = total[a, b].mT
        return total


@lru_cache(maxsize=32)
def curvature(network: Network) -> Curvature:
    """The curvature of a network; its plans are made once and kept."""
    return Curvature(network)


def newton(
    network: Network, W: Tensor, factors: dict[str, Tensor], norm: float, iterations: int, options: FitOptions
) -> float:
    """Refine the factors in place (float64); returns the relative error, never above that of the start."""
    balance(factors)
    systems, error = _systems(network, W, factors, norm)
    damping = FIRST_DAMPING
    for _ in range(iterations):
        if error < NEAR_EXACT:
            break
        H = curvature(network).matrix(factors, [G for _, G in systems])
        gradient = _gradient(network, systems, factors)
        scale = float(H.diagonal().mean())
        previous = error
        while damping < LAST_DAMPING:
            trial = _step(network, factors, H, gradient, damping * scale)
            if trial is not None:
                trial_error = plain_error(network, W, trial, norm)
                if trial_error < error:
                    factors.update(trial)
                    balance(factors)
                    error, damping = trial_error, max(damping / 5, 1e-15)
                    break
            damping *= 4
        if previous - error <= options.tolerance * max(error, 1e-6):
            break
        systems, _ = _systems(network, W, factors, norm)
    return error


def _step(
    network: Network, factors: dict[str, Tensor], H: Tensor, gradient: Tensor, damping: float
) -> dict[str, Tensor] | None:
    """Factors after one damped Gauss-Newton step, or None when the damped matrix is not positive definite."""
    damped = H.clone()
    damped.diagonal().add_(damping)
    triangle, info = torch.linalg.cholesky_ex(damped)
    if int(info):
        return None
    step = torch.cholesky_solve(gradient[:, None], triangle)[:, 0]
    trial, start = {}, 0
    for environment in environments(network):
        factor = factors[environment.name]
        trial[environment.name] = factor + step[start : start + factor.numel()].reshape(factor.shape)
        start += factor.numel()
    return factors | trial


def _systems(
    network: Network, W: Tensor, factors: dict[str, Tensor], norm: float
) -> tuple[list[tuple[Tensor, Tensor]], float]:
    systems = [environment.system(W, factors) for environment in environments(network)]
    last = environments(network)[-1]
    return systems, _error_of(last, *systems[-1], factors, norm)


def plain_error(network: Network, W: Tensor, factors: dict[str, Tensor], norm: float) -> float:
    """|W - W'| / |W| from norms and the inner product; W' is not formed."""
    last = Environment(network, next(f.name for f in reversed(network.parameters) if f.name != FROZEN))
    last = next((e for e in environments(network) if e.name == last.name), last)
    return _error_of(last, *last.system(W, factors), factors, norm)


def _error_of(environment: Environment, R: Tensor, G: Tensor, factors: dict[str, Tensor], norm: float) -> float:
    F = environment.pack(factors[environment.name])
    return max(0.0, norm**2 + float((F @ G - 2 * R).mul(F).sum())) ** 0.5 / (norm or 1.0)


def _gradient(network: Network, systems: list[tuple[Tensor, Tensor]], factors: dict[str, Tensor]) -> Tensor:
    """J^T (W - W')."""
    parts = []
    for environment, (R, G) in zip(environments(network), systems, strict=True):
        F = environment.pack(factors[environment.name])
        parts.append(environment.unpack(R - F @ G).reshape(-1))
    return torch.cat(parts)


def _diagonal_block(environment: Environment, G: Tensor) -> Tensor:
    """G (batch, bonds, bonds) with an identity over the factor's own legs, in the order of the factor's legs."""
    batch, own, bonds = environment.legs
    count = prod(environment.network.shape(own))
    full = torch.block_diag(
        *(torch.kron(torch.eye(count, dtype=G.dtype, device=G.device), part) for part in G.contiguous())
    )
    packed = torch.arange(full.shape[0], device=G.device).reshape(environment.network.shape((*batch, *own, *bonds)))
    order = [(*batch, *own, *bonds).index(leg) for leg in environment.factor.legs]
    index = packed.permute(order).reshape(-1)
    return full[index][:, index]
