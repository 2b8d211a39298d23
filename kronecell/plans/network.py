"""A tensor network written down as data: factors with named legs, each leg with a size. Integers only, no tensors.

A leg held by two tensors is a bond; a leg held by more (the CP index, the branch index k, the gate index g) is
a hyperedge, and is summed in the step after which no other factor needs it. The input x holds the `inputs` legs,
the result y the `outputs` legs, both in C order (last leg fastest).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from kronecell.errors import PlanError, ShapeError

INPUT = "x"  # the name of the input in every contraction order
GATE = "g"  # the leg that with_gates adds


@dataclass(frozen=True)
class Factor:
    """One node: a parameter tensor, or a constant that the mathematics needs and that is not trained.

    Constants: "ones" is the vector i of Algorithm 1, "delta" the superdiagonal kernel of a CP, "blocks" the 0/1
    matrix (sum(blocks), len(blocks)) saying which column of stacked branches belongs to which branch.
    """

    name: str
    legs: tuple[str, ...]
    constant: str | None = None
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Network:
    """Factors, the legs of x and y, and the size of every leg; immutable and hashable, so plans can be cached."""

    factors: tuple[Factor, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    leg_sizes: tuple[tuple[str, int], ...]

    @staticmethod
    def of(
        factors: Iterable[Factor], inputs: Iterable[str], outputs: Iterable[str], sizes: Mapping[str, int]
    ) -> Network:
        """Build and validate; `sizes` may hold more legs than are used."""
        factors = tuple(factors)
        used = {leg for f in factors for leg in f.legs} | {*inputs} | {*outputs}
        missing = sorted(used - set(sizes))
        if missing:
            raise ShapeError(f"network legs {missing} have no size; give sizes for every leg")
        return Network(factors, tuple(inputs), tuple(outputs), tuple((leg, int(sizes[leg])) for leg in sorted(used)))

    def __post_init__(self) -> None:
        names = [f.name for f in self.factors]
        if len(set(names)) != len(names) or INPUT in names:
            raise ShapeError(f"factor names must be distinct and none may be {INPUT!r}, got {names}")
        bad = {leg: size for leg, size in self.leg_sizes if size < 1}
        if bad:
            raise ShapeError(f"leg sizes must be at least 1, got {bad}")
        holders: Counter[str] = Counter()
        for legs in [*(f.legs for f in self.factors), self.inputs, self.outputs]:
            if len(set(legs)) != len(legs):
                raise ShapeError(f"a tensor cannot hold a leg twice, got legs {legs}")
            holders.update(legs)
        lone = sorted(leg for leg, count in holders.items() if count < 2)
        if lone:
            raise ShapeError(f"legs {lone} are held by one tensor only; a leg must join two (sum it with a constant)")

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Leg name -> size."""
        return dict(self.leg_sizes)

    @cached_property
    def legs(self) -> dict[str, tuple[str, ...]]:
        """Name of a tensor (factors, and x if there are inputs) -> its legs."""
        table = {f.name: f.legs for f in self.factors}
        return table | ({INPUT: self.inputs} if self.inputs else {})

    @cached_property
    def parameters(self) -> tuple[Factor, ...]:
        """The factors that are trained, in order."""
        return tuple(f for f in self.factors if f.constant is None)

    @cached_property
    def constants(self) -> tuple[Factor, ...]:
        """The factors that are fixed by the mathematics."""
        return tuple(f for f in self.factors if f.constant is not None)

    def shape(self, legs: Iterable[str]) -> tuple[int, ...]:
        """Sizes of the given legs."""
        return tuple(self.sizes[leg] for leg in legs)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> shape of its tensor."""
        return {f.name: self.shape(f.legs) for f in self.parameters}

    @property
    def num_params(self) -> int:
        """Sum over the trained factors of the product of their leg sizes."""
        return sum(prod(shape) for shape in self.shapes.values())

    def with_gates(self, gates: int, on: Iterable[str] | None = None) -> Network:
        """One more leg g on the named factors (all trained ones when None), and first in the output.

        Factors without g are shared by the gates. One gate changes nothing.
        """
        if gates < 1:
            raise ShapeError(f"gates must be at least 1, got {gates}")
        names = [f.name for f in self.parameters]
        chosen = set(names if on is None else on)
        unknown = sorted(chosen - set(names))
        if unknown or not chosen:
            raise PlanError(f"unshared factors {unknown or '()'} do not exist; choose at least one of {names}")
        if gates == 1:
            return self
        factors = tuple(
            Factor(f.name, (GATE, *f.legs), f.constant, f.blocks) if f.name in chosen else f for f in self.factors
        )
        return Network.of(factors, self.inputs, (GATE, *self.outputs), {**self.sizes, GATE: gates})

    def as_dense(self) -> Network:
        """The same factors without x: contracting them gives the tensor (outputs' gate leg, inputs, outputs)."""
        gate = tuple(leg for leg in self.outputs if leg == GATE)
        rest = tuple(leg for leg in self.outputs if leg != GATE)
        return Network(self.factors, (), (*gate, *self.inputs, *rest), self.leg_sizes)

    def squared(self) -> Network:
        """Two copies of the factors joined at the outer legs: contracts to the squared Frobenius norm, per gate."""
        outer = {*self.inputs, *self.outputs}
        sizes = dict(self.sizes)
        copies = []
        for f in self.factors:
            legs = tuple(leg if leg in outer else f"{leg}'" for leg in f.legs)
            sizes.update({new: self.sizes[old] for old, new in zip(f.legs, legs, strict=True)})
            copies.append(Factor(f"{f.name}'", legs, f.constant, f.blocks))
        gate = tuple(leg for leg in self.outputs if leg == GATE)
        return Network.of((*self.factors, *copies), (), gate, sizes)
