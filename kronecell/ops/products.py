"""The products of weights of a plan by one call of a compiled kernel, for autograd one operation.

A compressed layer makes a handful of tiny products before it touches x. As operations of torch each is a chain of views
and a product, and as many nodes of the graph again: in a training step they took a tenth of the time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kronecell.ops import compiled
from kronecell.ops.operation import Op, View
from kronecell.ops.watched import autocast_off, numbers, ordinary

MOST = 2**18  # multiply-adds of all products, and elements of one operand: larger ones are for BLAS


@dataclass(frozen=True)
class Products:
    """Hoisted steps as the kernel reads them; the results are the small operands of steps that touch x, laid out."""

    ops: tuple[Op, ...]
    hot: tuple[Op, ...]  # those whose small operand is a result here
    inputs: tuple[str, ...]
    made: tuple[int | None, ...]  # which of the results a step makes, if any
    sources: tuple[frozenset[str], ...]  # the inputs that a result is made of
    shapes: tuple[tuple[int, ...], ...]  # of the results
    # As native/products.c reads them. The sizes are of all tensors, of inputs and then of what the steps make.
    sizes: bytes
    description: bytes
    tables: bytes

    def suits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the kernel takes these inputs."""
        given = [tensors[name] for name in self.inputs]
        return (
            compiled.library is not None
            and ordinary(given[0])
            and numbers(*given)
            and all(tensor.is_contiguous() for tensor in given)
        )

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The small operands of the steps in `hot`, under the names of these."""
        made = _Products.apply(self, *(tensors[name] for name in self.inputs))
        return {op.out: tensor for op, tensor in zip(self.hot, made, strict=True)}

    def differentiable(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The same by operations of torch."""
        tensors = dict(zip(self.inputs, given, strict=True))
        for op in self.ops:
            op.run(tensors)
        return [op.lay_out(tensors[op.right]) for op in self.hot]

    def make(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The small operands of the steps in `hot` by the kernel, which autograd does not see."""
        results = [given[0].new_empty(shape) for shape in self.shapes]
        self._call(given, results, ())
        return results

    def gradients(
        self, given: Sequence[Tensor], wanted: Sequence[bool], upstream: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Those of the inputs, as wanted, by the kernel; `upstream` are those of the results."""
        found = [torch.empty_like(tensor) if want else None for tensor, want in zip(given, wanted, strict=True)]
        self._call(given, [None] * len(upstream), [*found, *upstream])
        return found

    def _call(
        self, given: Sequence[Tensor], results: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
    ) -> None:
        """The results from the inputs, or if there are `gradients`, of inputs and results, the former of these."""
        places = [*given, *(None if i is None else results[i] for i in self.made)]
        of = None
        if gradients:
            count = len(given)
            of = _addresses([*gradients[:count], *(None if i is None else gradients[count + i] for i in self.made)])
        if compiled.library.products(
            self.description, len(self.ops), self.tables, _addresses(places), self.sizes, len(places), of
        ):
            raise MemoryError("the kernel for products of weights found no memory for its buffers")


def suit(hoisted: Sequence[Op], hot: Sequence[Op]) -> bool:
    """Whether the kernel can make the hoisted steps, and BLAS would not be as fast."""
    usual = all(not (op.spread or op.diagonal or op.narrow or op.turned) and op.parts == 1 for op in hoisted)
    if compiled.library is None or not usual or not {op.out for op in hoisted} & {op.right for op in hot}:
        return False
    elements = max(max(prod(op.a.groups), prod(op.b.groups), prod(op.shape)) for op in hoisted)
    return elements <= MOST and sum(prod(op.a.groups) * op.b.groups[-1] for op in hoisted) <= MOST


def products_of(hoisted: Sequence[Op], hot: Sequence[Op]) -> Products | None:
    """The hoisted steps for the kernel, if they suit it."""
    if not suit(hoisted, hot):
        return None
    made = [op.out for op in hoisted]
    wanted = [op for op in hot if op.right in made]
    inputs, elements = [], []
    for op in hoisted:
        for name, view in ((op.left, op.left_view), (op.right, op.right_view)):
            if name not in made:
                inputs.append(name)
                elements.append(prod(view.groups))
    elements += [prod(op.shape) for op in hoisted]
    index = {name: i for i, name in enumerate([*inputs, *made])}
    result = {op.right: i for i, op in enumerate(wanted)}
    layouts = {op.right: op.right_view for op in wanted}
    sources = {name: frozenset([name]) for name in inputs}
    tables: list[np.ndarray] = []
    length = 0
    description: list[int] = []
    for op in hoisted:
        a, b = (op.right, op.left) if op.swapped else (op.left, op.right)
        sources[op.out] = sources[a] | sources[b]
        *batch, rows, summed = op.a.groups
        description += [index[a], index[b], index[op.out], prod(batch), rows, summed, op.b.groups[-1]]
        ends = [_table(op.a), _table(op.b), None]
        if op.out in layouts:  # which says where numbers come from, and is asked where they go
            laid_out = _table(layouts[op.out])
            ends[2] = None if laid_out is None else np.argsort(laid_out)
        for table in ends:
            description.append(-1 if table is None else length)
            if table is not None:
                tables.append(table)
                length += len(table)
    return Products(
        tuple(hoisted),
        tuple(wanted),
        tuple(inputs),
        tuple(result.get(name) for name in made),
        tuple(sources[op.right] for op in wanted),
        tuple(layouts[op.right].groups for op in wanted),
        np.array(elements, "l").tobytes(),
        np.array(description, "l").tobytes(),
        b"".join(table.astype("i").tobytes() for table in tables),
    )


def _table(view: View) -> np.ndarray | None:
    """Where the numbers of an operand lie in its tensor, in the order in which they are read; None if in that."""
    if view.permutation is None:
        return None
    return np.arange(prod(view.legs)).reshape(view.legs).transpose(view.permutation).ravel()


def _addresses(tensors: Sequence[Tensor | None]) -> bytes:
    return struct.pack(f"{len(tensors)}P", *[0 if tensor is None else tensor.data_ptr() for tensor in tensors])


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: Products, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.products = products
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)
        results = products.make(given)
        learning = {name for name, wanted in zip(products.inputs, ctx.needs_input_grad[1:], strict=True) if wanted}
        still = [result for result, names in zip(results, products.sources, strict=True) if not names & learning]
        ctx.mark_non_differentiable(*still)  # else gradients would be made that nobody wants
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        products: Products = ctx.products
        given: tuple[Tensor, ...] = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        known = [gradient for gradient in upstream if gradient is not None]
        if not known:
            return (None,) * (1 + len(given))
        with autocast_off(given[0]):  # the dtype was settled in the forward
            # Hooks of saved tensors may give back what is as good for torch, and not for the kernel.
            plain = not torch.is_grad_enabled() and ordinary(known[0]) and numbers(*known, *given)
            if not plain or not all(tensor.is_contiguous() for tensor in given):
                return None, *differentiated(products.differentiable, given, wanted, upstream)
            above = [None if gradient is None else gradient.contiguous() for gradient in upstream]
            return None, *products.gradients(given, wanted, above)


def differentiated(
    make: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    given: Sequence[Tensor],
    wanted: Sequence[bool],
    upstream: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of what `make` makes, by operations of torch, with a gradient of their own if that is wanted."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases: two inputs may be one and the same tensor, and each wants its own share.
        aliases = [tensor.view_as(tensor) if again else tensor.detach().requires_grad_() for tensor in given]
        pairs = [
            (made, gradient) for made, gradient in zip(make(aliases), upstream, strict=True) if gradient is not None
        ]
        leaves = [alias for alias, want in zip(aliases, wanted, strict=True) if want]
        found = torch.autograd.grad(
            [tensor for tensor, _ in pairs], leaves, [gradient for _, gradient in pairs], create_graph=again,
            allow_unused=True,
        )  # fmt: skip
    rest = iter(found)
    return [next(rest) if want else None for want in wanted]
