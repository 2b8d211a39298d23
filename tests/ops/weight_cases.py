"""Operators on weights: products that need no x, and sparse matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import kronecell as kc
from kronecell.ops.contract import ready
from kronecell.ops.small_products import small_products, small_products_backward
from kronecell.ops.sparse import sparse_back, sparse_gradient, sparse_linear, sparse_prepared
from tests.ops.case import Arguments, Case, change, normal, put

# Small products ------------------------------------------------------------------------------------------------------

FORMATS = {
    "kcp": kc.KCP((3, 4, 5, 6), (2, 2, 2, 2), K=2, CA=2, CB=2),
    "tt": kc.TT((4, 6, 5), (2, 3, 2), r=2),
    "ht": kc.HT((3, 4, 5, 6), (2, 2, 2, 2), r=2),
    "bt": kc.BT((4, 6, 5), (2, 3, 2), r=2, P=2),
}


def hoisted(name: str) -> Callable[[torch.Generator], Arguments]:
    of = ready(FORMATS[name].plan().text)

    def draw(generator: torch.Generator) -> Arguments:
        products = of.products
        assert products is not None
        sizes = products.description[4 : 4 + len(products.inputs)].tolist()
        return [normal(generator, size) for size in sizes], products.description, products.shapes

    return draw


def exact_hoisted(inputs: Sequence[Tensor], description: Tensor, shapes: Sequence[int]) -> list[Tensor]:
    """Number by number, from the description."""
    numbers = description.tolist()
    _, count, products, results = numbers[:4]
    at = 4 + count + products
    rows = [numbers[at + 10 * i : at + 10 * i + 10] for i in range(products)]
    at += 10 * products
    ends = []
    for _ in range(results):
        ends.append((numbers[at], numbers[at + 2 : at + 2 + numbers[at + 1]]))
        at += 2 + numbers[at + 1]
    tensors = [tensor.reshape(-1) for tensor in inputs]

    def table(begin: int, size: int) -> Tensor:
        return torch.arange(size) if begin < 0 else description[at + begin : at + begin + size]

    for a, b, _, batch, lines, summed, columns, of_a, of_b, of_out in rows:
        left = tensors[a][table(of_a, len(tensors[a]))].view(batch, lines, summed)
        right = tensors[b][table(of_b, len(tensors[b]))].view(batch, summed, columns)
        found = torch.einsum("nik,nkj->nij", left, right).reshape(-1)
        tensors.append(torch.zeros_like(found).index_copy(0, table(of_out, len(found)), found))
    return [tensors[tensor].view(shape) for tensor, shape in ends]


def hoisted_gradients(name: str) -> Callable[[torch.Generator], Arguments]:
    def draw(generator: torch.Generator) -> Arguments:
        inputs, description, shapes = hoisted(name)(generator)
        results = exact_hoisted(inputs, description, shapes)
        upstream = [normal(generator, *result.shape) for result in results]
        return upstream, inputs, description, [True] * len(inputs)

    return draw


def exact_hoisted_gradients(
    upstream: Sequence[Tensor], inputs: Sequence[Tensor], description: Tensor, wanted: Sequence[bool]
) -> list[Tensor]:
    _, pull_back = torch.func.vjp(lambda *given: tuple(exact_hoisted(given, description, [])), *inputs)
    return [*pull_back(tuple(upstream))]


HOISTED_BAD = (
    ("an input too few", change(0, lambda inputs: inputs[1:]), "inputs"),
    ("an input too short", change(0, lambda inputs: [inputs[0][1:], *inputs[1:]]), "numbers in input 0"),
    ("another version", change(1, lambda d: d + (torch.arange(len(d)) == 0)), "description"),
    ("a description cut short", change(1, lambda d: d[:-1]), "description"),
    ("shapes", put(2, [1, 1]), "shapes"),
    ("int32", change(1, lambda d: d.int()), "int64"),
)


def hoisted_cases() -> list[Case]:
    found = []
    for name in FORMATS:
        if ready(FORMATS[name].plan().text).products is None:
            continue
        found.append(Case(f"small_products-{name}", small_products, hoisted(name), exact_hoisted, HOISTED_BAD))
        found.append(
            Case(
                f"small_products_backward-{name}",
                small_products_backward,
                hoisted_gradients(name),
                exact_hoisted_gradients,
                (("upstream", change(0, lambda up: [up[0][1:], *up[1:]]), "upstream"),),
            )
        )
    return found


# A sparse matrix ------------------------------------------------------------------------------------------------------


def sparse(rows: int, outputs: int, inputs: int, block: int, share: float, start: bool, prepared: bool) -> Any:
    """x, values, places, outputs, start, prepared."""

    def draw(generator: torch.Generator) -> Arguments:
        everywhere = outputs // block * inputs
        places = torch.randperm(everywhere, generator=generator)[: int(share * everywhere)].sort().values
        first = normal(generator, rows, outputs) if start else None
        x, values = normal(generator, rows, inputs), normal(generator, len(places), block)
        made = sparse_prepared(values, places, outputs, inputs) if prepared else None
        return x, values, places, outputs, first, made

    return draw


def exact_sparse(
    x: Tensor, values: Tensor, places: Tensor, outputs: int, start: Tensor | None, prepared: Tensor | None
) -> Tensor:
    """Entry by entry: what is not stored meets no number of x."""
    inputs, block = x.shape[1], values.shape[1]
    products = x[:, places % inputs, None] * values
    at = (places // inputs * block)[:, None] + torch.arange(block)
    y = x.new_zeros(len(x), outputs).index_add(1, at.reshape(-1), products.flatten(1))
    return y if start is None else y + start


def exact_sparse_back(upstream: Tensor, values: Tensor, places: Tensor, inputs: int) -> Tensor:
    block = values.shape[1]
    at = (places // inputs * block)[:, None] + torch.arange(block)
    products = (upstream[:, at] * values).sum(2)
    return upstream.new_zeros(len(upstream), inputs).index_add(1, places % inputs, products)


def exact_sparse_gradient(upstream: Tensor, x: Tensor, places: Tensor, block: int) -> Tensor:
    inputs = x.shape[1]
    products = torch.einsum("rn,rm->nm", upstream, x).unflatten(0, (-1, block))
    return products[places // inputs, :, places % inputs]


SPARSE_BAD = (
    ("places out of range", change(2, lambda places: places + 10**6), "places"),
    ("places that do not ascend", change(2, lambda places: places.flip(0)), "ascend"),
    ("places as int32", change(2, lambda places: places.int()), "int64"),
    ("too few places", change(2, lambda places: places[1:]), "values"),
    ("a start of another width", put(4, torch.zeros(3, 7)), "start"),
    ("prepared as floats", put(5, torch.ones(99)), "prepared"),
    ("prepared cut short", put(5, torch.ones(9, dtype=torch.int32)), "prepared"),
    ("prepared by something else", put(5, torch.ones(999, dtype=torch.int32)), "prepared"),
)


def sparse_cases() -> list[Case]:
    found = []
    for rows, outputs, inputs, block, share, small in (
        (2, 8, 5, 4, 0.4, True),
        (3, 8, 5, 1, 0.3, True),
        (1, 70, 50, 1, 0.1, False),
        (1, 96, 33, 16, 0.2, False),
        (23, 96, 50, 8, 0.1, False),
        (37, 67, 45, 1, 0.2, False),
        (130, 64, 300, 16, 0.02, False),
        (3, 20, 30, 1, 1.0, False),
        (20, 400, 333, 1, 0.02, False),
        (9, 192, 512, 2, 0.005, False),
        (2, 97, 31, 1, 0.1, False),
        (17, 96, 32, 3, 0.05, False),
        (5, 33, 1, 1, 0.5, False),
        (4, 20, 30, 1, 0.0, False),
    ):
        start = block == 4
        name = f"{rows}x{inputs}-{outputs}-block{block}-{share}"
        for prepared in (False, True):
            draw = sparse(rows, outputs, inputs, block, share, start, prepared)
            found.append(
                Case(
                    f"sparse_linear-{name}" + "-prepared" * prepared,
                    sparse_linear,
                    draw,
                    exact_sparse,
                    SPARSE_BAD if start else (),
                    None if start else 0,
                    small=small,
                )
            )

        def draw_back(generator: torch.Generator, draw: Any = draw, inputs: int = inputs) -> Arguments:
            x, values, places, outputs, *_ = draw(generator)
            return normal(generator, len(x), outputs), values, places, inputs

        def draw_gradient(generator: torch.Generator, draw: Any = draw) -> Arguments:
            x, values, places, outputs, *_ = draw(generator)
            return normal(generator, len(x), outputs), x, places, values.shape[1]

        found.append(Case(f"sparse_back-{name}", sparse_back, draw_back, exact_sparse_back, by_rows=0, small=small))
        found.append(
            Case(f"sparse_gradient-{name}", sparse_gradient, draw_gradient, exact_sparse_gradient, small=small)
        )
    return found
