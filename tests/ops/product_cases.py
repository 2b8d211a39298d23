"""Products with x: of few columns, of matrices, two in one, one for each group.

`kernel` cases are large enough that the compiled kernel runs, not torch's product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kronecell.ops import kernels
from tests.ops.case import Arguments, Case, change, normal, put

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
