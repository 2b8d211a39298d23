"""A plan is a pairwise contraction order with its costs: what is contracted when, what it costs, how it is executed.

Counting convention: one multiply-add is one; the cost of a step is the product of the sizes of all legs it touches.
A step that does not touch x is hoisted: it is done once per weight update, not once per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from kronecell.ops.bytes import SCALE, SHARE, byte_product, read_as_they_lie
from kronecell.errors import PlanError, ShapeError
from kronecell.ops.fold import fold_of
from kronecell.ops.hot import Hot, run_hot
from kronecell.ops.joined import Joined, joined_of
from kronecell.ops.lowering import Program, constant_tensor, lower
from kronecell.plans.network import Network
from kronecell.plans.order import Tree, leaves
from kronecell.ops.products import Products, products_of
from kronecell.plans.steps import Step, steps_of
from kronecell.ops.watched import ordinary

CONVERTED_ELEMENTS = 2**21  # of uint8 input that are numbers at a time, unless SHARE asks for more


@dataclass(frozen=True)
class Plan:
    """A network, an order for it, and the number of rows it is meant for.

    `wide` lets the machine do more multiply-adds than are counted where that saves moving x: products over the gates
    are then taken for all pairs of gates.
    """

    network: Network
    tree: Tree
    rows: int = 1
    order: str = "custom"
    wide: bool = False

    def __post_init__(self) -> None:
        expected, got = sorted(self.network.legs), sorted(leaves(self.tree))
        if expected != got:
            raise PlanError(f"an order must use every tensor exactly once: expected {expected}, got {got}")
        if self.rows < 1:
            raise PlanError(f"rows must be at least 1, got {self.rows}")

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Steps in the order they are executed, hoisted ones first."""
        return steps_of(self.network, self.tree)

    @property
    def macs(self) -> int:
        """Multiply-adds for one row of x, hoisted work excluded."""
        return sum(step.macs for step in self.steps if not step.hoisted)

    @property
    def hoisted_macs(self) -> int:
        """Multiply-adds done once per weight update."""
        return sum(step.macs for step in self.steps if step.hoisted)

    @property
    def flops(self) -> int:
        """2 * macs."""
        return 2 * self.macs

    @property
    def total_macs(self) -> int:
        """Multiply-adds for all rows of this plan, hoisted work included once."""
        return self.hoisted_macs + self.rows * self.macs

    @property
    def peak(self) -> int:
        """Elements of the largest result of a step, for this plan's number of rows (the output counts, x does not)."""
        return max((step.size * (1 if step.hoisted else self.rows) for step in self.steps), default=0)

    @cached_property
    def program(self) -> Program:
        """The steps lowered to permute, reshape and matmul."""
        return lower(self.network, self.steps, self.rows, self.wide)

    @cached_property
    def byte_program(self) -> Program:
        """The same for uint8 input, which is made into numbers a few rows at a time."""
        return lower(self.network, self.steps, self.rows, self.wide, rows_first=True)

    def prepare(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the hoisted steps; the result depends on the weights only and can be kept until they change.

        Under the name of every step that touches x stands its small operand, laid out for the product.
        """
        network = self.network
        tensors: dict[str, Tensor] = {}
        for factor in network.parameters:
            tensor = factors.get(factor.name)
            if tensor is None:
                raise ShapeError(f"factor {factor.name!r} is missing; expected {[*network.shapes]}, got {[*factors]}")
            expected = network.shapes[factor.name]
            if tuple(tensor.shape) != expected:
                raise ShapeError(
                    f"factor {factor.name!r} has the wrong shape: expected {expected} for legs {factor.legs}, "
                    f"got {tuple(tensor.shape)}"
                )
            tensors[factor.name] = tensor
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
            raise ShapeError(
                f"factors must share one floating point dtype, got {sorted(map(str, dtypes))}; convert with .to(dtype)"
            )
        like = next(iter(tensors.values()))
        for factor in network.constants:
            tensors[factor.name] = constant_tensor(factor, network, like)
        made = {}
        if self._products is not None and self._products.suits(tensors):
            made = self._products.run(tensors)
        else:
            for op in self.program.hoisted:
                op.run(tensors)
        for op in self.program.hot:
            tensors[op.out] = made[op.out] if op.out in made else op.lay_out(tensors[op.right])
        return tensors

    @cached_property
    def _products(self) -> Products | None:
        return products_of(self.program.hoisted, self.program.hot)

    def apply(
        self, x: Tensor, prepared: Mapping[str, Tensor], bias: Tensor | None = None, chunk: int | None = None
    ) -> Tensor:
        """Run the steps that touch x (..., M) -> (..., gates * N). A byte b of uint8 input counts as b / 255.

        In chunks of so many rows, intermediates stay in cache; large ones are then made again for the backward.
        """
        if x.ndim == 0 or x.shape[-1] != self._width:
            raise ShapeError(
                f"input has the wrong width: expected (..., {self._width}) for modes "
                f"{'x'.join(map(str, self.network.shape(self.network.inputs)))}, got {tuple(x.shape)}"
            )
        rows = x if x.ndim == 2 else x.reshape(-1, self._width)  # every call counts where there is one row
        if x.dtype == torch.uint8:
            y = self._apply_bytes(rows, prepared, bias, chunk)
        else:
            dtype = prepared[self.network.parameters[0].name].dtype
            if x.dtype != dtype:
                raise ShapeError(
                    f"input has dtype {x.dtype}, the factors {dtype}; convert one with .to(...) (uint8 is fine)"
                )
            hot = self._hot if chunk is None else replace(self._hot, chunk=chunk)
            y = run_hot(hot, rows, [prepared[op.out] for op in hot.ops], bias)
        return y if x.ndim == 2 else y.reshape(*x.shape[:-1], y.shape[-1])

    @cached_property
    def _width(self) -> int:
        return prod(self.network.shape(self.network.inputs))

    @cached_property
    def _hot(self) -> Hot:
        return _hot(self.program)

    @cached_property
    def _byte_hot(self) -> Hot:
        return _hot(self.byte_program)

    def _apply_bytes(
        self, rows: Tensor, prepared: Mapping[str, Tensor], bias: Tensor | None, chunk: int | None
    ) -> Tensor:
        program = self.byte_program
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in (*prepared.values(), bias) if t is not None)
        if not learns and ordinary(rows) and rows.is_cpu:
            own = [prepared[op.out] for op in self.program.hot]
            if program.hot != self.program.hot or not read_as_they_lie(rows, own[0], program.hot[0]):
                return self._apply_converted(rows, own, bias, chunk)
        if program.hot == self.program.hot:  # as nearly always
            small = [prepared[op.out] for op in program.hot]
        else:
            small = [op.lay_out(self._operand(prepared, op.right)) for op in program.hot]
        first, *rest = program.hot
        hot = Hot(tuple(rest), program.last, program.straight)
        fold = self._byte_hot.fold

        def run(part: Tensor) -> Tensor:
            if fold is not None and not learns:
                scaled = [small[0] * SCALE, *small[1:]]
                if fold.suits(part, scaled):
                    return run_hot(self._byte_hot, part, scaled, bias)
            x = byte_product(part, small[0], first)
            if rest:
                return run_hot(hot, x, small[1:], bias)
            y = program.last(x)
            return y if bias is None else y + bias

        if chunk is None or len(rows) <= chunk:
            return run(rows)
        return torch.cat([run(part) for part in rows.split(chunk)])

    def _operand(self, prepared: Mapping[str, Tensor], name: str) -> Tensor:
        """A small operand as its own step makes it: of one that only the kernel made, there is the laid out form."""
        if name in prepared:
            return prepared[name]
        op = next(op for op in self.program.hot if op.right == name)
        return op.right_view.undo(prepared[op.out])

    def _apply_converted(self, rows: Tensor, small: list[Tensor], bias: Tensor | None, chunk: int | None) -> Tensor:
        """Bytes become numbers a few rows at a time, which go through all steps; gradients would have to keep them."""
        elements = max(CONVERTED_ELEMENTS, SHARE * small[0].numel())
        some = max(1, min(len(rows), elements // self._width))
        buffer = small[0].new_empty(some, self._width)
        hot, scaled = replace(self._hot, chunk=chunk), [small[0] * SCALE, *small[1:]]
        parts = [run_hot(hot, buffer[: len(part)].copy_(part), scaled, bias) for part in rows.split(some)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def execute(self, x: Tensor, factors: Mapping[str, Tensor], bias: Tensor | None = None) -> Tensor:
        """x (..., M) times the matrix of the network: (..., gates * N), gate-major. Differentiable in everything."""
        if ordinary(x) and self._joined is not None and self._joined.suits(x, factors, bias):
            return self._joined.run(x, factors, bias)
        return self.apply(x, self.prepare(factors), bias)

    @cached_property
    def _joined(self) -> Joined | None:
        return joined_of(self._products, self._hot, self.network.shapes, self._width)

    def contract(self, factors: Mapping[str, Tensor]) -> Tensor:
        """For a network without input: the tensor with the legs `outputs`."""
        if self.network.inputs:
            raise PlanError("contract() is for networks without input; use execute(x, factors)")
        return self.program.finish(self.prepare(factors))

    def __str__(self) -> str:
        def show(name: str, legs: tuple[str, ...]) -> str:
            return f"{name}[{' '.join(legs)}]"

        rows = [("step", "contract", "result", "size", "multiply-adds", "when")]
        names: dict[str, str] = {}
        for i, step in enumerate(self.steps, 1):
            left, right = names.get(step.left, step.left), names.get(step.right, step.right)
            names[step.name] = f"#{i}"
            contract = f"{show(left, step.left_legs)} {show(right, step.right_legs)}"
            when = "once" if step.hoisted else "each row"
            rows.append((f"#{i}", contract, f"[{' '.join(step.out_legs)}]", f"{step.size:,}", f"{step.macs:,}", when))
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        right_aligned = {3, 4}
        lines = [
            "  ".join(
                cell.rjust(w) if i in right_aligned else cell.ljust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * w for w in widths))
        lines.append(
            f"order {self.order}: {self.macs:,} multiply-adds a row, {self.hoisted_macs:,} once per weight update; "
            f"largest intermediate for {self.rows:,} row(s): {self.peak:,} elements"
        )
        return "\n".join(lines)


def _hot(program: Program) -> Hot:
    return Hot(program.hot, program.last, program.straight, fold=fold_of(program.hot))


def check_tensor(value: object, what: str) -> Tensor:
    """The tensor itself, or a ShapeError that names the argument."""
    if not isinstance(value, torch.Tensor):
        raise ShapeError(f"{what} must be a torch tensor, got {type(value).__name__}; use torch.as_tensor(...)")
    return value
