"""The product operators as a table: how inputs are drawn, what they are in plain einsum, what must raise.

`kernel` cases are large enough that the compiled kernel runs, not torch's product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kronecell as kc
from kronecell.ops import kernels
from kronecell.ops.contract import ready
from kronecell.ops.small_products import small_products, small_products_backward
from kronecell.ops.sparse import sparse_back, sparse_gradient, sparse_linear

Arguments = tuple[Any, ...]
Change = Callable[[Arguments], Arguments]


@dataclass(frozen=True)
class Case:
    """One call of an operator. `exact` is the dense oracle, which is called with float64."""

    name: str
    operator: Any
    draw: Callable[[torch.Generator], Arguments]
    exact: Callable[..., Any]
    bad: tuple[tuple[str, Change, str], ...] = ()  # what is wrong, a change of the arguments, words of the error
    by_rows: int | None = None  # which argument has rows that must not depend on each other
    threads: bool = True  # whether the result has the same bits for any number of threads
    differentiable: bool = True  # more than once, through the operator's own gradient
    small: bool = True  # small enough for numerical derivatives
    outputs: int | None = None  # the first results that have gradients; None: all

    def __str__(self) -> str:
        return self.name


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def change(place: int, how: Callable[[Any], Any]) -> Change:
    """The arguments with one of them changed."""
    return lambda args: (*args[:place], how(args[place]), *args[place + 1 :])


def put(place: int, value: Any) -> Change:
    """The arguments with one of them replaced."""
    return change(place, lambda _: value)


# x times few columns -------------------------------------------------------------------------------------------------


def product(rows: int, depth: int, columns: int, bytes_: bool = False) -> Callable[[torch.Generator], Arguments]:
    def draw(generator: torch.Generator) -> Arguments:
        if bytes_:
            x = torch.randint(0, 256, (rows, depth), generator=generator, dtype=torch.uint8)
        else:
            x = normal(generator, rows, depth)
        return x, normal(generator, columns, depth)

    return draw


def sums(rows: int, depth: int, columns: int, bytes_: bool = False) -> Callable[[torch.Generator], Arguments]:
    def draw(generator: torch.Generator) -> Arguments:
        x, _ = product(rows, depth, columns, bytes_)(generator)
        return x, normal(generator, rows, columns)

    return draw


PRODUCT_BAD = (
    ("one dimension", change(0, lambda x: x[0]), "expected x of shape"),
    ("depths differ", change(1, lambda w: w[:, 1:]), "expected x of shape"),
    ("weight of three dimensions", change(1, lambda w: w[None]), "expected weight of shape"),
)
SUMS_BAD = (
    ("rows differ", change(0, lambda x: x[1:]), "expected x of shape"),
    ("upstream of one dimension", change(1, lambda g: g[0]), "expected upstream of shape"),
)
# Rows, depth, columns: every kernel for few columns, with tails; long rows, short ones, some that compete in cache.
SHAPES = [
    *[(735, 361, columns) for columns in (2, 3, 4, 5, 8, 11, 16)],
    *[(2917, 361, columns) for columns in (2, 4, 7, 8, 13, 16, 17, 25, 32)],
    *[(37449, 7 + 1, 5), (4099, 64, 4), (4097, 256, 8), (300, 4100, 4), (800, 1441, 9)],
    *[(40, 30, 70), (1, 700, 3), (9, 5, 1)],
]


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("rk,ck->rc", x, weight)


def exact_sums(x: Tensor, upstream: Tensor) -> Tensor:
    return torch.einsum("rc,rk->ck", upstream, x)


def takes_kernel(rows: int, depth: int, columns: int) -> bool:
    """Whether x is so large that no other product than ours is taken, on any processor."""
    width = kernels.register_width()
    enough = rows * depth >= (2**18 if width == 16 else 2**20)
    return enough and columns <= 2 * width and 64 <= depth < 4096 and (depth % 256 != 0 or columns <= 4)


def narrow_cases() -> list[Case]:
    found = []
    for rows, depth, columns in SHAPES:
        for bytes_ in (False, True):
            small = rows * depth < 3000
            name = f"{rows}x{depth}x{columns}{'-bytes' if bytes_ else ''}"
            found.append(
                Case(
                    f"few_columns-{name}",
                    kernels.few_columns,
                    product(rows, depth, columns, bytes_),
                    exact_product,
                    PRODUCT_BAD,
                    by_rows=0 if takes_kernel(rows, depth, columns) else None,
                    threads=takes_kernel(rows, depth, columns),
                    small=small,
                )
            )
            found.append(
                Case(
                    f"column_sums-{name}",
                    kernels.column_sums,
                    sums(rows, depth, columns, bytes_),
                    exact_sums,
                    SUMS_BAD,
                    threads=False,
                    small=small,
                )
            )
    return found


# Products of matrices ------------------------------------------------------------------------------------------------


def matrices(*shape: int) -> Callable[[torch.Generator], Arguments]:
    *batch, rows, depth, columns = shape

    def draw(generator: torch.Generator) -> Arguments:
        return normal(generator, *batch, rows, depth), normal(generator, *batch, depth, columns)

    return draw


MATRIX_BAD = (
    ("depths differ", change(1, lambda b: b[..., 1:, :]), "shapes do not fit"),
    ("dimensions differ", change(1, lambda b: b[None]), "expected two matrices"),
    ("vectors", lambda args: (args[0].flatten(), args[1].flatten()), "expected two matrices"),
)


def matrix_cases() -> list[Case]:
    shapes = [(3, 4, 5), (2, 3, 4, 5), (200, 500, 70), (5, 33, 40, 61), (3, 100, 9, 600), (1, 8, 8, 1031)]
    return [
        Case(
            f"bmm-{'x'.join(map(str, shape))}",
            kernels.bmm,
            matrices(*shape),
            torch.matmul,
            MATRIX_BAD,
            threads=False,
            small=shape[-1] < 10,
        )
        for shape in shapes
    ]


# Two products in one -------------------------------------------------------------------------------------------------


def folded(rows: int, sizes: tuple[int, ...], keep: bool, bytes_: bool) -> Callable[[torch.Generator], Arguments]:
    places, depth, columns, shared, inner, others = sizes

    def draw(generator: torch.Generator) -> Arguments:
        x, weight = product(rows, places * depth, columns, bytes_)(generator)
        return x, weight[:, :depth].clone(), normal(generator, shared * others, places), places, shared, inner, keep

    return draw


def exact_fold(
    x: Tensor, weight: Tensor, factors: Tensor, places: int, shared: int, inner: int, keep: bool
) -> list[Tensor]:
    rows, (columns, depth) = len(x), weight.shape
    parts, groups = x.view(rows, places, depth), factors.view(shared, -1, places)
    split = weight.view(-1, shared, inner, depth)
    z = torch.einsum("rpk,agik,gop->rgoai", parts, split, groups).reshape(rows, -1)
    y = torch.einsum("rpk,ck->rpc", parts, weight).reshape(-1, columns)
    return [z, y, torch.einsum("lp,rpk->rlk", factors, parts)] if keep else [z]


def fold_gradient(rows: int, sizes: tuple[int, ...]) -> Callable[[torch.Generator], Arguments]:
    places, _, columns, shared, inner, others = sizes

    def draw(generator: torch.Generator) -> Arguments:
        x, weight, factors, *_ = folded(rows, sizes, True, False)(generator)
        _, y, v = exact_fold(x, weight, factors, places, shared, inner, True)
        upstream = normal(generator, rows, others * columns)
        return upstream, y.contiguous(), v.contiguous(), weight, factors, places, shared, inner

    return draw


def exact_fold_gradient(
    upstream: Tensor, y: Tensor, v: Tensor, weight: Tensor, factors: Tensor, places: int, shared: int, inner: int
) -> list[Tensor]:
    rows, (columns, depth), others = len(upstream), weight.shape, len(factors) // shared
    above = upstream.view(rows, shared, others, -1, inner)
    of_weight = torch.einsum("rgoai,rgok->agik", above, v.view(rows, shared, others, depth))
    of_factors = torch.einsum("rgoai,rpagi->gop", above, y.view(rows, places, -1, shared, inner))
    return [of_weight.reshape(columns, depth), of_factors.reshape(factors.shape)]


FOLD_BAD = (
    ("width of x", change(0, lambda x: x[:, 1:]), "expected x of shape"),
    ("places of the factors", change(2, lambda f: f[:, 1:]), "expected factors of shape"),
    ("no places", put(3, 0), "at least 1"),
    ("shared does not divide", put(4, 7), "cannot be"),
    ("inner does not divide", put(5, 11), "cannot be"),
    ("weight of one dimension", change(1, lambda w: w[0]), "expected weight of shape"),
)
FOLD_GRADIENT_BAD = (
    ("upstream", change(0, lambda g: g[:, 1:]), "expected upstream of shape"),
    ("y", change(1, lambda y: y[1:]), "expected y of shape"),
    ("v", change(2, lambda v: v[:, :, 1:]), "expected v of shape"),
    ("an empty v", change(2, lambda v: v.new_empty(0)), "expected v of shape"),
)
# places, depth, columns, shared, inner, others: rows that share a register, none that do, tails everywhere.
FOLDS = [
    (9, 5, 4, 1, 4, 2),
    (40, 97, 4, 1, 4, 4),
    (64, 130, 16, 4, 2, 3),
    (33, 101, 8, 2, 2, 5),
    (50, 96, 5, 5, 1, 2),
    (17, 99, 3, 1, 1, 1),
    (24, 100, 2, 2, 1, 16),
    (20, 98, 40, 1, 40, 2),
]


def fold_cases() -> list[Case]:
    found = []
    for sizes in FOLDS:
        for rows in (1, 3, 37):
            name = f"{rows}x{'x'.join(map(str, sizes))}"
            small = rows == 3 and sizes[0] * sizes[1] < 100
            for keep, bytes_ in ((False, False), (True, False), (True, True)):
                found.append(
                    Case(
                        f"fold-{name}{'-keep' if keep else ''}{'-bytes' if bytes_ else ''}",
                        kernels.fold,
                        folded(rows, sizes, keep, bytes_),
                        exact_fold,
                        FOLD_BAD,
                        by_rows=0 if rows > 3 and sizes[2] <= 2 * kernels.register_width() else None,
                        small=small,
                        outputs=1,
                    )
                )
            found.append(
                Case(
                    f"fold_backward-{name}",
                    kernels.fold_backward,
                    fold_gradient(rows, sizes),
                    exact_fold_gradient,
                    FOLD_GRADIENT_BAD,
                    small=small,
                )
            )
    return found


# One product for each group ------------------------------------------------------------------------------------------


def groups(sizes: tuple[int, ...], bias: bool) -> Callable[[torch.Generator], Arguments]:
    count, rows, depth, columns = sizes

    def draw(generator: torch.Generator) -> Arguments:
        a = normal(generator, rows, count, depth).permute(1, 0, 2)
        return a, normal(generator, count, depth, columns), normal(generator, count * columns) if bias else None

    return draw


def exact_grouped(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.einsum("grk,gkj->rgj", a, weight).reshape(a.shape[1], weight.shape[0] * weight.shape[2])
    return y if bias is None else y + bias


def group_gradients(sizes: tuple[int, ...]) -> Callable[[torch.Generator], Arguments]:
    def draw(generator: torch.Generator) -> Arguments:
        a, weight, _ = groups(sizes, False)(generator)
        return normal(generator, sizes[1], sizes[0] * sizes[3]), a, weight, [True, True, True]

    return draw


def exact_group_gradients(upstream: Tensor, a: Tensor, weight: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    above = upstream.view(a.shape[1], a.shape[0], weight.shape[2])
    return [
        torch.einsum("rgj,gkj->grk", above, weight),
        torch.einsum("grk,rgj->gkj", a, above),
        torch.einsum("rc->c", upstream),
    ]


GROUPED_BAD = (
    ("groups differ", change(1, lambda w: w[1:]), "expected weight of shape"),
    ("a matrix", change(0, lambda a: a[0]), "expected a of shape"),
)
GROUPS = [(2, 3, 4, 5), (4, 50, 16, 64), (3, 29, 7, 37), (1, 13, 33, 40), (2, 100, 70, 19), (4, 5, 1, 1)]


def grouped_cases() -> list[Case]:
    found = []
    for sizes in GROUPS:
        name, small = "x".join(map(str, sizes)), sizes == GROUPS[0]
        for bias in (False, True):
            bad = GROUPED_BAD
            if bias:
                bad = (*bad, ("bias too short", change(2, lambda b: b[1:]), "expected bias of shape"))
            found.append(
                Case(
                    f"grouped-{name}{'-bias' if bias else ''}",
                    kernels.grouped,
                    groups(sizes, bias),
                    exact_grouped,
                    bad,
                    small=small,
                )
            )
        found.append(
            Case(
                f"grouped_backward-{name}",
                kernels.grouped_backward,
                group_gradients(sizes),
                exact_group_gradients,
                (
                    ("upstream", change(0, lambda g: g[:, 1:]), "expected upstream of shape"),
                    ("wanted", put(3, [True]), "(three|3)"),
                ),
                small=small,
            )
        )
    return found


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


def sparse(rows: int, outputs: int, inputs: int, block: int, share: float, start: bool) -> Any:
    """x, values, places, outputs, start."""

    def draw(generator: torch.Generator) -> Arguments:
        everywhere = outputs // block * inputs
        places = torch.randperm(everywhere, generator=generator)[: int(share * everywhere)].sort().values
        first = normal(generator, rows, outputs) if start else None
        return normal(generator, rows, inputs), normal(generator, len(places), block), places, outputs, first

    return draw


def exact_sparse(x: Tensor, values: Tensor, places: Tensor, outputs: int, start: Tensor | None) -> Tensor:
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
    ):
        start = block == 4
        draw = sparse(rows, outputs, inputs, block, share, start)
        name = f"{rows}x{inputs}-{outputs}-block{block}"
        found.append(
            Case(
                f"sparse_linear-{name}",
                sparse_linear,
                draw,
                exact_sparse,
                SPARSE_BAD if start else (),
                None if start else 0,
                small=small,
            )
        )

        def draw_back(generator: torch.Generator, draw: Any = draw, inputs: int = inputs) -> Arguments:
            x, values, places, outputs, _ = draw(generator)
            return normal(generator, len(x), outputs), values, places, inputs

        def draw_gradient(generator: torch.Generator, draw: Any = draw) -> Arguments:
            x, values, places, outputs, _ = draw(generator)
            return normal(generator, len(x), outputs), x, places, values.shape[1]

        found.append(Case(f"sparse_back-{name}", sparse_back, draw_back, exact_sparse_back, by_rows=0, small=small))
        found.append(
            Case(f"sparse_gradient-{name}", sparse_gradient, draw_gradient, exact_sparse_gradient, small=small)
        )
    return found


CASES = [*narrow_cases(), *matrix_cases(), *fold_cases(), *grouped_cases(), *hoisted_cases(), *sparse_cases()]
