"""Alternating least squares for any network.

Every factor occurs once, so the dense tensor is linear in each: W' = <E, F> with the environment E, the contraction of
all other factors. The best F solves G F = R with G = <E, E> over the legs F does not hold alone and R = <E, W>; both
are contractions of ordinary networks, planned once. Legs of F that only W holds besides (its modes) are right-hand
sides, a gate leg that others hold too is a batch. Each update minimises a convex quadratic, so the error cannot rise;
the step is solved in residual form, which keeps it accurate next to an exact solution, and refused if it does not help.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor

from kronecell.ops.execute import contract_network
from kronecell.plans.network import Factor, Network
from kronecell.plans.order import CONNECTED_LIMIT, Tree, greedy, optimal
from kronecell.plans.plan import Plan

TARGET = "W"  # the name of the dense tensor in the right-hand side's network
FROZEN = "inputs"  # the name of calibration inputs in a network: a factor that takes part and never changes
SOLVABLE = 4096  # unknowns per right-hand side up to which a factor's system is solved; larger factors keep their start
SEARCHED = 1 << 20  # elements of W from which the best contraction order is worth a search of up to a second
QUICK = 5  # tensors up to which the best order is found in no time
CUTOFF = 1e-14  # eigenvalues of G below this part of the largest are directions the error does not see


@dataclass(frozen=True)
class Environment:
    """The least-squares system of one factor of a dense network (one without x)."""

    network: Network
    name: str

    @cached_property
    def factor(self) -> Factor:
        return next(f for f in self.network.factors if f.name == self.name)

    @cached_property
    def others(self) -> tuple[Factor, ...]:
        return tuple(f for f in self.network.factors if f.name != self.name)

    @cached_property
    def legs(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """The factor's legs in three kinds: batch (outer, held by others too), own (outer, only here), bonds."""
        outer, elsewhere = {*self.network.outputs}, {leg for f in self.others for leg in f.legs}
        batch = tuple(leg for leg in self.factor.legs if leg in outer and leg in elsewhere)
        own = tuple(leg for leg in self.factor.legs if leg in outer and leg not in elsewhere)
        bonds = tuple(leg for leg in self.factor.legs if leg not in outer)
        return batch, own, bonds

    @cached_property
    def rhs(self) -> Plan:
        """<E, W> with the legs (batch, own, bonds)."""
        factors = (Factor(_free_name(self.network), self.network.outputs), *self.others)
        batch, own, bonds = self.legs
        network = Network.of(factors, (), (*batch, *own, *bonds), self.network.sizes)
        return Plan(network, _tree(network, prod(network.shape(self.network.outputs)) > SEARCHED), order="environment")

    @cached_property
    def gram(self) -> Plan:
        """<E, E> with the legs (batch, bonds, bonds')."""
        batch, _, bonds = self.legs
        outer, sizes, copies = {*self.network.outputs}, dict(self.network.sizes), []
        for f in self.others:
            legs = tuple(leg if leg in outer else f"{leg}'" for leg in f.legs)
            sizes.update({new: self.network.sizes[old] for old, new in zip(f.legs, legs, strict=True)})
            copies.append(Factor(f"{f.name}'", legs, f.constant, f.blocks))
        outputs = (*batch, *bonds, *(f"{leg}'" for leg in bonds))
        network = Network.of((*self.others, *copies), (), outputs, sizes)
        return Plan(network, gram_tree(network), order="gram")

    @property
    def peak(self) -> int:
        """Elements of the largest intermediate."""
        return max(self.rhs.peak, self.gram.peak)

    def system(self, W: Tensor, factors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """R (batch, own, bonds) and G (batch, bonds, bonds) as matrices, in float64."""
        batch, own, bonds = (prod(self.network.shape(legs)) for legs in self.legs)
        low = {f.name: factors[f.name].to(W.dtype) for f in self.others if f.constant is None}
        R = contract_network(self.rhs, low | {_free_name(self.network): W}).reshape(batch, own, bonds).double()
        return R, self.gram_matrix(factors)

    def gram_matrix(self, factors: Mapping[str, Tensor]) -> Tensor:
        """G (batch, bonds, bonds) in float64."""
        batch, _, bonds = (prod(self.network.shape(legs)) for legs in self.legs)
        doubles = {f.name: factors[f.name].double() for f in self.others if f.constant is None}
        both = doubles | {f"{n}'": t for n, t in doubles.items()}
        return contract_network(self.gram, both).reshape(batch, bonds, bonds)

    def pack(self, tensor: Tensor) -> Tensor:
        """The factor as (batch, own, bonds)."""
        batch, own, bonds = self.legs
        order = [self.factor.legs.index(leg) for leg in (*batch, *own, *bonds)]
        return tensor.permute(order).reshape(*(prod(self.network.shape(legs)) for legs in self.legs))

    def unpack(self, matrix: Tensor) -> Tensor:
        """Back to the factor's own legs."""
        batch, own, bonds = self.legs
        legs = (*batch, *own, *bonds)
        return matrix.reshape(self.network.shape(legs)).permute([legs.index(leg) for leg in self.factor.legs])


def solve_step(R: Tensor, G: Tensor, F: Tensor) -> tuple[Tensor, float]:
    """The step D that minimises |E (F + D) - W|, and by how much it lowers the squared error (never below 0)."""
    residual = R - F @ G
    values, vectors = torch.linalg.eigh(G)
    keep = values > CUTOFF * values[..., -1:].clamp_min(torch.finfo(G.dtype).tiny)
    inverse = torch.where(keep, 1 / torch.where(keep, values, 1.0), 0.0)
    step = ((residual @ vectors) * inverse.unsqueeze(-2)) @ vectors.mT
    gain = float((2 * residual - step @ G).mul(step).sum())
    return (step, gain) if gain > 0 else (torch.zeros_like(step), 0.0)


@lru_cache(maxsize=64)
def environments(network: Network) -> tuple[Environment, ...]:
    """The systems of the factors of a dense network that can change; their plans are made once and kept."""
    every = (Environment(network, f.name) for f in network.parameters if f.name != FROZEN)
    return tuple(e for e in every if prod(network.shape(e.legs[2])) <= SOLVABLE)


@dataclass(frozen=True)
class Half:
    """W contracted with the factors outside `names`: a smaller target that serves the systems of all of `names`."""

    network: Network
    names: tuple[str, ...]

    @cached_property
    def outside(self) -> tuple[Factor, ...]:
        """Factors to contract: not in the half, and not a constant that touches it."""
        held = {leg for f in self.network.factors if f.name in self.names for leg in f.legs}
        return tuple(
            f for f in self.network.factors if f.name not in self.names and not (f.constant and held & {*f.legs})
        )

    @cached_property
    def plan(self) -> Plan:
        """The contraction; its open legs are those the half still holds."""
        target = Factor(_free_name(self.network), self.network.outputs)
        inside = {leg for f in self.network.factors if f not in self.outside for leg in f.legs}
        touched = [*self.network.outputs, *(leg for f in self.outside for leg in f.legs)]
        legs = tuple(dict.fromkeys(leg for leg in touched if leg in inside))
        network = Network.of((target, *self.outside), (), legs, self.network.sizes)
        return Plan(network, _tree(network, prod(network.shape(self.network.outputs)) > SEARCHED), order="half")

    @cached_property
    def systems(self) -> tuple[Plan, ...]:
        """For every factor of the half: the rest of the half contracted with the smaller target."""
        plans = []
        for name in self.names:
            environment = Environment(self.network, name)
            kept = [f for f in self.network.factors if f not in self.outside and f.name != name]
            target = Factor(_free_name(self.network), self.plan.network.outputs)
            batch, own, bonds = environment.legs
            network = Network.of((target, *kept), (), (*batch, *own, *bonds), self.network.sizes)
            plans.append(Plan(network, _tree(network, False), order="half environment"))
        return tuple(plans)


@lru_cache(maxsize=64)
def halves(network: Network) -> tuple[Half, ...]:
    """Two halves of the factors that can change, or none where contracting one half would not make W smaller."""
    names = tuple(environment.name for environment in environments(network))
    middle = (len(names) + 1) // 2
    if len(names) < 3:
        return ()
    parts = (Half(network, names[:middle]), Half(network, names[middle:]))
    size = prod(network.shape(network.outputs))
    useful = all(2 * prod(network.shape(part.plan.network.outputs)) <= size for part in parts)
    return parts if useful and all(2 * part.plan.peak <= 3 * size for part in parts) else ()


def _sweep_by_halves(network: Network, W: Tensor, factors: dict[str, Tensor]) -> float:
    """As `sweep`, but W itself is contracted twice and not once per factor."""
    squared, target = 0.0, _free_name(network)
    table = {environment.name: environment for environment in environments(network)}
    for half in halves(network):
        outside = {f.name: factors[f.name].to(W.dtype) for f in half.outside if f.constant is None}
        reduced = contract_network(half.plan, outside | {target: W})
        for name, plan in zip(half.names, half.systems, strict=True):
            environment = table[name]
            low = {f.name: factors[f.name].to(W.dtype) for f in plan.network.parameters if f.name != target}
            R = contract_network(plan, low | {target: reduced}).double()
            G = environment.gram_matrix(factors)
            F = environment.pack(factors[name].double())
            F = F + solve_step(R.reshape(F.shape), G, F)[0]
            factors[name] = environment.unpack(F)
            squared = float((F @ G - 2 * R.reshape(F.shape)).mul(F).sum())
    balance(factors)
    return squared


def sweep(network: Network, W: Tensor, factors: dict[str, Tensor]) -> float:
    """Update every factor once, in place (float64); returns the squared error after the last update.

    The value is |W|^2 - 2 <R, F> + <F, G F>: exact to about 1e-16 |W|^2, so its root to 1e-8 |W|.
    """
    if halves(network):
        return _sweep_by_halves(network, W, factors)
    squared = 0.0
    for environment in environments(network):
        R, G = environment.system(W, factors)
        F = environment.pack(factors[environment.name].double())
        step, _ = solve_step(R, G, F)
        F = F + step
        factors[environment.name] = environment.unpack(F)
        squared = float((F @ G - 2 * R).mul(F).sum())
    balance(factors)
    return squared


def balance(factors: dict[str, Tensor]) -> None:
    """Give all factors the same norm; the product stays, and no Gram matrix drifts out of range."""
    norms = {name: float(torch.linalg.vector_norm(tensor)) for name, tensor in factors.items() if name != FROZEN}
    if all(0 < norm < float("inf") for norm in norms.values()):
        mean = torch.tensor([*norms.values()], dtype=torch.float64).log().mean().exp()
        for name, norm in norms.items():
            factors[name] = factors[name] * (mean / norm)


def gram_tree(network: Network) -> Tree:
    """The order for a product of two copies of the factors: small tensors, so a quick search is enough."""
    return _tree(network, False)


def _tree(network: Network, search: bool) -> Tree:
    """The best order where the contraction is worth the search, else a greedy one (a fit makes dozens of plans).

    Greedy also takes networks that fall into parts, as those of KCP's groups do.
    """
    count = len(network.factors)
    return optimal(network) if count <= (CONNECTED_LIMIT if search else QUICK) else greedy(network, 1)


def _free_name(network: Network) -> str:
    """A name for the target that no factor has (Dense and others use W themselves)."""
    name = TARGET
    while any(f.name == name for f in network.factors):
        name += "_"
    return name
