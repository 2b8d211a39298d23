"""A product with a tensor network as a chain: x meets one small operand after the other.

The order is that of a plan. What needs no x is computed here, at export, in double precision. Legs of x that are summed
late can be loops around the steps before: for every index only a slice of the intermediates exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from kronecell.nn.linear import TensorLinear
from kronecell.nn.quantized import QuantizedFactor
from kronecell.ops.choose import candidates
from kronecell.ops.engine import constant_tensor
from kronecell.ops.quantized import row_bytes
from kronecell.plans.network import INPUT
from kronecell.plans.plan import Plan

# Weights of integers that are made floats at a time, where an operand is larger.
LARGEST_ROW = {"size": 2**7, "balance": 2**9, "speed": 2**11}


@dataclass(frozen=True)
class Operand:
    """A small operand: floats that may lie in any order, or a factor of integers, whose legs lie as they are stored."""

    name: str
    legs: tuple[str, ...]
    values: Tensor | None  # with these legs, in double precision
    factor: QuantizedFactor | None
    largest: int  # weights of integers that are made floats at a time

    def elements(self, sizes: Mapping[str, int]) -> int:
        """How many weights."""
        return prod(sizes[leg] for leg in self.legs)

    def lead(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Of integers: the first legs, for each of whose indices the others are made floats at once."""
        left = self.elements(sizes)
        for number, leg in enumerate(self.legs):
            if left <= self.largest:
                return self.legs[:number]
            left //= sizes[leg]
        return self.legs[:-1]

    def num_bytes(self, sizes: Mapping[str, int]) -> int:
        """Of the array, and of the scales of integers."""
        if self.factor is None:
            return 4 * self.elements(sizes)
        rows = self.rows(sizes)
        return rows * row_bytes(self.elements(sizes) // rows, self.factor.bits) + 4 * self.factor.scales.numel()

    def rows(self, sizes: Mapping[str, int]) -> int:
        """Of integers: rows that start at a byte of their own; those of the factor, or parts of these."""
        return max(prod(sizes[leg] for leg in self.lead(sizes)), self.factor.rows if self.factor else 1)


@dataclass(frozen=True)
class Chain:
    """Operands in the order in which x meets them, and the legs behind each of these products."""

    order: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: dict[str, int]
    operands: tuple[Operand, ...]
    legs: tuple[tuple[str, ...], ...]  # of x, and behind every step
    macs: int

    @property
    def num_bytes(self) -> int:
        """Of all operands."""
        return sum(operand.num_bytes(self.sizes) for operand in self.operands)

    def removed(self, leg: str) -> int:
        """The step that sums a leg of x."""
        return next(i for i, legs in enumerate(self.legs) if leg not in legs) - 1

    def loop_order(self) -> tuple[str, ...]:
        """Legs of x that can be loops around steps, those that are summed last first."""
        order = {leg: (-self.removed(leg), place) for place, leg in enumerate(self.inputs) if self.sizes[leg] > 1}
        return tuple(sorted((leg for leg in order if self.removed(leg) > 0), key=lambda leg: order[leg]))

    def depth(self, step: int, loops: tuple[str, ...]) -> int:
        """How many of these loops are around a step."""
        return sum(self.removed(leg) >= step for leg in loops)

    def size(self, step: int, loops: tuple[str, ...]) -> int:
        """Elements behind a step, inside the loops that are around the next one."""
        around = {leg for leg in loops if self.removed(leg) > step}
        return prod(self.sizes[leg] for leg in self.legs[step + 1] if leg not in around)


def chain_of(plan: Plan, layer: TensorLinear, largest: int) -> Chain:
    """The chain of a plan for the weights of a layer; at most `largest` integers are made floats at a time."""
    network = plan.network
    stored = getattr(layer, "quantized", None) or {}
    tensors = {name: tensor.detach().double() for name, tensor in layer.factors().items()}
    like = next(iter(tensors.values()))
    for factor in network.constants:
        tensors[factor.name] = constant_tensor(factor, network, like)
    legs = {factor.name: factor.legs for factor in network.factors}
    letters = {leg: i for i, leg in enumerate(network.sizes)}
    operands: list[Operand] = []
    behind: list[tuple[str, ...]] = [network.inputs]
    hot = {INPUT}
    for step in plan.steps:
        if step.hoisted:
            sides = [
                part for name in (step.left, step.right) for part in (tensors[name], [*map(letters.get, legs[name])])
            ]
            tensors[step.name] = torch.einsum(*sides, [letters[leg] for leg in step.out_legs])
            legs[step.name] = step.out_legs
            continue
        name = step.left if step.right in hot else step.right
        if name in stored:
            operands.append(Operand(name, _stored_legs(stored[name], legs[name]), None, stored[name], largest))
        else:
            operands.append(Operand(name, legs[name], tensors[name], None, largest))
        hot.add(step.name)
        behind.append(step.out_legs)
    chain = Chain(
        plan.order, network.inputs, network.outputs, dict(network.sizes), tuple(operands), tuple(behind), plan.macs
    )
    for place in range(len(operands)):
        chain = _with_long_rows(chain, place)
    return chain


def _with_long_rows(chain: Chain, place: int) -> Chain:
    """The same chain with a leg in two, where rows of an operand of integers are much shorter than they may be."""
    operand, sizes = chain.operands[place], chain.sizes
    if operand.factor is None or not operand.lead(sizes):
        return chain
    *before, leg = operand.lead(sizes)
    row = operand.elements(sizes) // prod(sizes[other] for other in (*before, leg))
    inner = max(n for n in range(1, sizes[leg] + 1) if sizes[leg] % n == 0 and n * row <= max(row, operand.largest))
    of_scales = {of.legs[0] for of in chain.operands if of.factor is not None and of.factor.rows > 1}
    if inner in (1, sizes[leg]) or leg in of_scales:
        return chain
    first, second = f"{leg}_outer", f"{leg}_inner"

    def renamed(legs: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for old in legs for name in ((first, second) if old == leg else (old,)))

    def values(of: Operand) -> Tensor | None:
        shape = [size for old in of.legs for size in ((sizes[leg] // inner, inner) if old == leg else (sizes[old],))]
        return None if of.values is None else of.values.reshape(shape)

    operands = tuple(replace(of, legs=renamed(of.legs), values=values(of)) for of in chain.operands)
    sizes = {**sizes, first: sizes[leg] // inner, second: inner}
    legs = tuple(renamed(some) for some in chain.legs)
    return replace(
        chain, inputs=renamed(chain.inputs), outputs=renamed(chain.outputs), sizes=sizes, operands=operands, legs=legs
    )


def _stored_legs(factor: QuantizedFactor, legs: tuple[str, ...]) -> tuple[str, ...]:
    if factor.leg < 0:
        return legs
    return (legs[factor.leg], *(leg for place, leg in enumerate(legs) if place != factor.leg))


MOST_BYTES = 2**26  # of products of weights that are computed to be judged


def chains_of(layer: TensorLinear, prefer: str) -> list[Chain]:
    """All orders that a layer may run in: that which it was given, or all that are known for one row."""
    if layer.order != "auto":
        plans = [layer.format.plan(layer.order, 1, gates=layer.gates, shared=layer.shared)]
    else:
        with torch.no_grad():
            found = candidates(layer.product(1))
        plans = [plan for plan in found.values() if plan.chunk is None and not plan.wide]
    small = [plan for plan in plans if 4 * max((s.size for s in plan.steps if s.hoisted), default=0) <= MOST_BYTES]
    return [chain_of(plan, layer, LARGEST_ROW[prefer]) for plan in small or plans]
