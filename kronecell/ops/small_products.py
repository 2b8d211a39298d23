"""All hoisted products of weights of a plan in one call.

A compressed layer computes a handful of tiny products before it touches x. Each as an operation of torch is a chain of
views and a product, and in training as many nodes of autograd's graph again: that was a tenth of a training step.

What to compute is a description, one tensor of int64 (csrc/small_products.cpp reads and checks the same):

    version, inputs, products, results
    the size of every tensor: inputs, then what the products compute, in order
    for every product: a, b, out, batch, rows, summed, columns, and where its three tables begin, or -1
    for every result: its tensor, its number of dimensions, their sizes
    the tables: where numbers of a and b lie in the order in which they are read, and where those of out go
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kronecell.ops.program import Op, Program, View
from kronecell.ops.registration import operator

VERSION = 1
MOST = 2**18  # multiply-adds of all products, and elements of one operand: larger ones are for BLAS


@dataclass(frozen=True)
class Products:
    """Hoisted steps as the kernel reads them; the results are the small operands of steps with x, laid out."""

    inputs: tuple[str, ...]
    description: Tensor
    shapes: list[int]  # of the results: for each the number of dimensions and their sizes


def products_of(program: Program) -> Products | None:
    """The hoisted steps for the kernel, if they are small."""
    hoisted, results = program.hoisted, program.hoisted_results
    usual = all(not (op.spread or op.diagonal or op.narrow or op.transposed) and op.parts == 1 for op in hoisted)
    if not usual or not results or not _small(hoisted):
        return None
    made = [op.out for op in hoisted]
    sizes: dict[str, int] = {}
    for op in hoisted:
        for name, view in ((op.left, op.left_view), (op.right, op.right_view)):
            if name not in made:
                sizes[name] = prod(view.groups)
    inputs = (*sizes,)
    sizes.update((op.out, prod(op.shape)) for op in hoisted)
    place = {name: i for i, name in enumerate(sizes)}
    rows: list[int] = []
    tables: list[int] = []
    for op in hoisted:
        a, b = (op.right, op.left) if op.swapped else (op.left, op.right)
        *batch, lines, summed = op.a.groups
        rows += [place[a], place[b], place[op.out], prod(batch), lines, summed, op.b.groups[-1]]
        moved = _table(results[op.out].right_view) if op.out in results else None
        for table in (_table(op.a), _table(op.b), _inverse(moved)):
            rows.append(-1 if table is None else len(tables))
            tables += table or []
    groups = {op.out: results[op.out].right_view.groups for op in hoisted if op.out in results}
    shapes: list[int] = []
    ends: list[int] = []
    for name in results:  # in the order of the steps with x
        ends += [place[name], len(groups[name]), *groups[name]]
        shapes += [len(groups[name]), *groups[name]]
    head = [VERSION, len(inputs), len(hoisted), len(results)]
    # Not torch.tensor: a plan that is met first while something traces, or under torch.device("meta"), would keep a
    # tensor without numbers.
    numbers = array("q", [*head, *sizes.values(), *rows, *ends, *tables])
    return Products(inputs, torch.frombuffer(numbers, dtype=torch.int64), shapes)


def _small(ops: Sequence[Op]) -> bool:
    elements = max(max(prod(op.a.groups), prod(op.b.groups), prod(op.shape)) for op in ops)
    return elements <= MOST and sum(prod(op.a.groups) * op.b.groups[-1] for op in ops) <= MOST


def _table(view: View) -> list[int] | None:
    """Where the numbers of an operand lie in its tensor, in the order in which they are read; None if in that."""
    if view.permutation is None:
        return None
    # Not torch: a tracer (export, compile) would record these calls instead of running them.
    numbers = np.arange(prod(view.legs)).reshape(view.legs).transpose(view.permutation)
    found: list[int] = numbers.reshape(-1).tolist()
    return found


def _inverse(table: list[int] | None) -> list[int] | None:
    return None if table is None else sorted(range(len(table)), key=table.__getitem__)


# The operators -----------------------------------------------------------------------------------------------------


def _small_products(inputs: Sequence[Tensor], description: Tensor, shapes: Sequence[int]) -> list[Tensor]:
    """The results that a description asks for."""
    numbers = iter(description.tolist())
    _, input_count, product_count, result_count = (next(numbers) for _ in range(4))
    sizes = [next(numbers) for _ in range(input_count + product_count)]
    rows = [[next(numbers) for _ in range(10)] for _ in range(product_count)]
    results = []
    for _ in range(result_count):
        tensor, dims = next(numbers), next(numbers)
        results.append((tensor, [next(numbers) for _ in range(dims)]))
    tables = torch.tensor([*numbers], dtype=torch.int64, device=inputs[0].device)
    tensors = [tensor.reshape(-1) for tensor in inputs]

    def gathered(tensor: int, begin: int) -> Tensor:
        return tensors[tensor] if begin < 0 else tensors[tensor][tables[begin : begin + sizes[tensor]]]

    for a, b, out, batch, lines, summed, columns, of_a, of_b, of_out in rows:
        left = gathered(a, of_a).reshape(batch, lines, summed)
        found = torch.bmm(left, gathered(b, of_b).reshape(batch, summed, columns)).reshape(-1)
        tensors.append(found if of_out < 0 else found[tables[of_out : of_out + sizes[out]].argsort()])
    return [tensors[tensor].reshape(shape).clone() for tensor, shape in results]


def _fake(inputs: Sequence[Tensor], description: Tensor, shapes: Sequence[int]) -> list[Tensor]:
    found, at = [], 0
    while at < len(shapes):
        stop = at + 1 + shapes[at]
        found.append(inputs[0].new_empty(shapes[at + 1 : stop]))
        at = stop
    return found


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    given, description, _ = inputs
    ctx.shapes = [made.shape for made in output]
    ctx.save_for_backward(description, *given)


def _gradient(ctx: Any, upstream: Sequence[Tensor | None]) -> tuple[list[Tensor | None], None, None]:
    description, *inputs = ctx.saved_tensors
    wanted = [*ctx.needs_input_grad[0]]
    # A result without a gradient is an empty tensor.
    above = [inputs[0].new_empty(0) if gradient is None else gradient for gradient in upstream]
    found = small_products_backward(above, inputs, description, wanted)
    return [gradient if want else None for gradient, want in zip(found, wanted, strict=True)], None, None


def _small_products_backward(
    upstream: Sequence[Tensor], inputs: Sequence[Tensor], description: Tensor, wanted: Sequence[bool]
) -> list[Tensor]:
    """Gradients of the inputs from those of the results; a gradient of shape (0,) is zeros, or is not wanted."""
    made, pull_back = torch.func.vjp(lambda *given: tuple(_small_products(given, description, ())), *inputs)  # type: ignore[misc]
    above = tuple(
        gradient if gradient.numel() else torch.zeros_like(result)
        for gradient, result in zip(upstream, made, strict=True)
    )
    found = pull_back(above)
    return [gradient.clone() if want else gradient.new_empty(0) for gradient, want in zip(found, wanted, strict=True)]


def _backward_fake(
    upstream: Sequence[Tensor], inputs: Sequence[Tensor], description: Tensor, wanted: Sequence[bool]
) -> list[Tensor]:
    return [torch.empty_like(given) if want else given.new_empty(0) for given, want in zip(inputs, wanted, strict=True)]


small_products = operator(
    "small_products(Tensor[] inputs, Tensor description, int[] shapes) -> Tensor[]",
    _small_products,
    _fake,
    setup=_setup,
    backward=_gradient,
)
small_products_backward = operator(
    "small_products_backward(Tensor[] upstream, Tensor[] inputs, Tensor description, bool[] wanted) -> Tensor[]",
    _small_products_backward,
    _backward_fake,
)
