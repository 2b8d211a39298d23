"""Steps of a plan lowered to permute, reshape and matmul, with as few copies of big tensors as possible.

Every step becomes mm or bmm, as a rule one of them, so the counted multiply-adds are those the machine executes, and
the graph exports and compiles without einsum. An intermediate keeps whatever leg order its matmul produced; which of
the possible layouts each step uses is chosen over the whole chain: one that is free now may cost a copy later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from kronecell.ops.kernels import register_width
from kronecell.ops.program import Fold, Op, Program, View
from kronecell.plans.network import INPUT
from kronecell.plans.plan import Plan, Step

ROW = "row"  # the leg of x that counts rows; its size is only known when x arrives

# Relative prices, in elements moved. Only their ratio matters: starting one matrix of a batched product costs about
# as much as copying a hundred elements, and so do some thousands of multiply-adds. BEAM bounds the search over layouts.
MATRIX_PRICE = 100
MACS_PER_ELEMENT = 32
THIN = 64
BEAM = 24
MOST_PARTS = 16  # products instead of one, to leave their results where the next product wants them
NARROW_COLUMNS, NARROW_ELEMENTS = 64, 2**21  # columns that count as few, elements of x that count as many
FOLD_ELEMENTS = 2**20  # of x; with fewer, it is in cache, and the factors take longer to lay out than the fold saves
FOLD_COLUMNS = 2 * register_width()
FOLD_OTHERS = 16  # with more, a batch of products is as fast
FOLD_FACTORS = 2**15  # elements of f, which is read again for every row
NARROW_LIMIT = 2**19  # elements of a small operand that are permuted for a faster product with a large x


@dataclass(frozen=True)
class _Layouts:
    """Leg sizes with the row leg, and the price of permuting a tensor into a grouping."""

    sizes: dict[str, int]
    wide: bool = False

    def extent(self, legs: Iterable[str]) -> int:
        """Size of a group; -1 when it holds the row leg, whose size is not known."""
        legs = [*legs]
        return -1 if ROW in legs else prod(self.sizes[leg] for leg in legs)

    def volume(self, legs: Iterable[str]) -> int:
        return prod(self.sizes[leg] for leg in legs)

    def view(self, order: Sequence[str], groups: Sequence[Sequence[str]]) -> View:
        wanted = [leg for group in groups for leg in group]
        permutation = tuple(order.index(leg) for leg in wanted)
        shape = tuple(self.extent([leg]) for leg in order)
        merged = tuple(self.extent(group) for group in groups)
        return View(shape, None if permutation == tuple(range(len(order))) else permutation, merged)

    def copies(self, order: Sequence[str], groups: Sequence[Sequence[str]]) -> int:
        """Elements copied to view a contiguous tensor with legs `order` as `groups`: 0 when BLAS takes it as is."""
        real = [leg for leg in order if self.sizes[leg] > 1]
        position = {leg: i for i, leg in enumerate(real)}
        runs = [[position[leg] for leg in group if leg in position] for group in groups]
        contiguous = all(run == [*range(run[0], run[0] + len(run))] for run in runs if run)
        matrix = runs[-2:]  # one of the two matrix dimensions must have stride one
        unit = not real or any(run and run[-1] == len(real) - 1 for run in matrix)
        return 0 if contiguous and unit else 2 * self.volume(order)

    def options(self, step: Step, order: tuple[str, ...], following: Step | None = None) -> list[tuple[int, Op]]:
        """Ways to run a step whose left operand (the big one) has its legs in `order`, with their prices.

        The legs that the small operand adds come in its order, or in the one that the following step wants.
        """
        other = [leg for leg in step.right_legs if leg not in order]
        found = self._ways(step, order, other)
        if following is not None:
            kept, held = {*following.out_legs}, {*following.left_legs} & {*following.right_legs}
            wanted = sorted(other, key=lambda leg: 1 if leg not in held else 0 if leg in kept else 2)
            batch = [leg for leg in wanted if leg in held & kept]
            if wanted != other or (batch and batch != other):
                found += self._ways(step, order, wanted, batch)
        return found

    def _ways(
        self, step: Step, order: tuple[str, ...], other: list[str], batch_next: Sequence[str] = ()
    ) -> list[tuple[int, Op]]:
        """The same for one order of the legs that are added; the first of them may be the batch of what follows."""
        out = set(step.out_legs) | {ROW}
        shared = [leg for leg in order if leg in step.right_legs]
        batch = [leg for leg in shared if leg in out]
        summed = [leg for leg in shared if leg not in out]
        free = [leg for leg in order if leg not in shared]
        found: list[tuple[int, Op]] = []

        def add(
            price: int, big: list[list[str]], small: list[list[str]], swapped: bool, spread: bool, matrices: int
        ) -> None:
            narrow = False
            if swapped:
                a, b = self.view(step.right_legs, small), self.view(order, big)
                legs = (*(big[0] if spread else batch), *other, *big[-1])
            else:
                narrow = not batch and not step.hoisted and self._narrow(step, order, other, summed)
                small = [other, summed] if narrow else small
                a, b = self.view(order, big), self.view(step.right_legs, small)
                legs = (*batch, *free, *other)
            copied = self.copies(order, big)
            transposed = not spread and [*order] == [leg for group in (*big[:-2], big[-1], big[-2]) for leg in group]
            op = Op(
                step.left, step.right, step.name, a, b, legs, swapped, spread, None, narrow, copied, matrices,
                transposed=transposed and [*order] != [leg for group in big for leg in group],
            )  # fmt: skip
            found.append((price + matrices * MATRIX_PRICE + copied, op))

        front = [batch] if batch else []
        matrices = self.volume(batch)
        add(0, [*front, free, summed], [*front, summed, other], swapped=False, spread=False, matrices=matrices)
        # With few rows of the small operand on the left, BLAS reads x transposed and runs at about three quarters.
        slower = self.volume([*order, *other]) // (3 * MACS_PER_ELEMENT) if self.volume(other) < THIN else 0
        add(slower, [*front, summed, free], [*front, other, summed], swapped=True, spread=False, matrices=matrices)
        middle = self._around(order, summed)
        if middle is None:
            return found
        before, after = middle
        if not batch:
            # One small matrix product per leading index leaves x where it is; its backward adds to the gradient of
            # the small operand once per leading index, which is priced too.
            repeats = self.volume(before)
            price = repeats * self.volume([*other, *summed]) // 8
            add(price, [before, summed, after], [other, summed], swapped=True, spread=True, matrices=repeats)
            parts = self.volume(batch_next)
            if 1 < parts <= MOST_PARTS and len(batch_next) < len(other):
                price, op = found[-1]
                legs = (*batch_next, *before, *other[len(batch_next) :], *after)
                price += (parts - 1) * (repeats * MATRIX_PRICE + self.volume(order) // 4)  # x is read again for each
                found.append((price, replace(op, legs=legs, parts=parts, matrices=parts * repeats)))
        elif self.wide and len(batch) == 1 and batch[0] in after and step.hoisted is False:
            found.append(self._wide(step, order, before, summed, after, other, batch[0]))
        return found

    def straight(self, op: Op, outputs: tuple[str, ...]) -> bool:
        """Whether a product is one of batches of rows, with its outputs already in order but for the rows."""
        at = op.legs.index(ROW)
        groups = (self.volume(op.legs[:at]), -1, self.volume(op.legs[at + 1 :]))
        ordered = op.legs[:at] + op.legs[at + 1 :] == outputs
        return ordered and not op.swapped and groups == (*op.a.groups[:-1], op.b.groups[-1])

    def _narrow(self, step: Step, order: Sequence[str], other: list[str], summed: list[str]) -> bool:
        """Whether the small operand is narrow, and lies as columns x summed already or is worth a permuted copy."""

        def real(legs: Iterable[str]) -> list[str]:
            return [leg for leg in legs if self.sizes[leg] > 1]

        lies = real(step.right_legs) == real((*other, *summed))
        limit = NARROW_LIMIT if self.volume(order) >= NARROW_ELEMENTS else NARROW_LIMIT // 4
        return self.volume(other) <= NARROW_COLUMNS and (lies or self.volume(step.right_legs) <= limit)

    def _around(self, order: tuple[str, ...], summed: list[str]) -> tuple[list[str], list[str]] | None:
        """The legs before and after the summed ones, when these stand together in the middle."""
        if not summed:
            return None
        start = order.index(summed[0])
        before, after = [*order[:start]], [*order[start + len(summed) :]]
        together = [*order[start : start + len(summed)]] == summed
        return (before, after) if together and before and after else None

    def _wide(
        self,
        step: Step,
        order: tuple[str, ...],
        before: list[str],
        summed: list[str],
        after: list[str],
        other: list[str],
        shared: str,
    ) -> tuple[int, Op]:
        """All pairs of the shared leg in one product, then the diagonal: more multiply-adds, but x stays in place."""
        b = self.view(order, [before, summed, after])
        a = self.view(step.right_legs, [[shared, *other], summed])
        wide = [*before, "pair", *other, *after]
        sizes = _Layouts({**self.sizes, "pair": self.sizes[shared]})
        shape = tuple(sizes.extent([leg]) for leg in wide)
        legs = tuple(shared if leg == "pair" else leg for leg in wide if leg != shared)
        repeats = self.volume(before)
        extra = sizes.volume([*wide, *summed]) // MACS_PER_ELEMENT
        price = repeats * (MATRIX_PRICE + self.volume([shared, *other, *summed])) + extra + 2 * sizes.volume(wide)
        diagonal = (shape, wide.index("pair"), wide.index(shared))
        copied = self.copies(order, [before, summed, after])
        op = Op(step.left, step.right, step.name, a, b, legs, True, True, diagonal, False, copied, repeats)
        return price + copied, op


@lru_cache(maxsize=4096)
def lower(plan: Plan) -> Program:
    """Choose a layout for every step; the chain of steps that touch x is optimised as a whole."""
    network, steps, rows = plan.network, plan.steps, plan.chunk or plan.rows
    layouts = _Layouts({**network.sizes, ROW: rows}, plan.wide)
    legs = {name: held for name, held in network.legs.items() if name != INPUT}
    hoisted = []
    for step in steps:
        if step.hoisted:
            op = min(layouts.options(_located(step, legs), legs[step.left]), key=lambda option: option[0])[1]
            legs[step.name] = op.legs
            hoisted.append(op)
    hot = [step for step in steps if not step.hoisted]
    if not hot:
        result = steps[-1].name if steps else network.factors[0].name
        last = layouts.view(legs[result], [[leg] for leg in network.outputs])
        return Program(tuple(hoisted), (), result, last)
    order, ops = _chain(layouts, hot, legs, network.inputs, (ROW, *network.outputs))
    return Program(
        tuple(hoisted), ops, hot[-1].name, layouts.view(order, [[ROW], [*network.outputs]]),
        layouts.straight(ops[-1], network.outputs), fold_of(ops, plan.rows * plan.width), plan.chunk, plan.width,
        layouts.volume(network.outputs), tuple(layouts.volume({*op.legs} - {ROW}) for op in ops),
    )  # fmt: skip


def _chain(
    layouts: _Layouts,
    hot: Sequence[Step],
    legs: dict[str, tuple[str, ...]],
    inputs: Sequence[str],
    final: Sequence[str],
) -> tuple[tuple[str, ...], tuple[Op, ...]]:
    """The operations of the steps that touch x, and the order of legs in their result: a beam search over layouts."""
    beam: dict[tuple[str, ...], tuple[int, tuple[Op, ...]]] = {(ROW, *inputs): (0, ())}
    for step, then in zip(hot, [*hot[1:], None], strict=True):
        following: dict[tuple[str, ...], tuple[int, tuple[Op, ...]]] = {}
        for order, (price, ops) in beam.items():
            for extra, op in layouts.options(_located(step, legs), order, then):
                total = price + extra
                if op.legs not in following or total < following[op.legs][0]:
                    following[op.legs] = (total, (*ops, op))
        beam = dict(sorted(following.items(), key=lambda item: item[1][0])[:BEAM])
    move = 2 * layouts.volume(final)
    done = [(price + (0 if order == final else move), order, ops) for order, (price, ops) in beam.items()]
    _, order, ops = min(done, key=lambda item: item[0])
    return order, ops


def fold_of(ops: Sequence[Op], elements: int) -> Fold | None:
    """The first two steps as a fold, if they are one and x has so many elements that the fold pays."""
    if len(ops) < 2 or elements < FOLD_ELEMENTS:
        return None
    first, second = ops[:2]
    as_it_lies = first.narrow and first.a.permutation is None and second.spread and second.b.permutation is None
    if not as_it_lies or second.parts > 1:
        return None
    (_, places, columns), (others, summed) = second.b.groups, second.a.groups
    shared, inner = 1, columns
    if second.diagonal is not None:
        shape, pair, at = second.diagonal
        if pair != 1:  # more than the rows before the places
            return None
        shared, inner = shape[at], prod(shape[at + 1 :])
        others //= shared
    small = columns <= FOLD_COLUMNS and others <= FOLD_OTHERS and places * columns * others <= FOLD_FACTORS
    if not small or summed != places or columns != first.b.groups[0]:
        return None
    return Fold(places * first.b.groups[1], places, columns, shared, inner, others)


def _located(step: Step, legs: dict[str, tuple[str, ...]]) -> Step:
    """The step with x on the left, and with the leg orders its operands really have."""
    left, right = step.left, step.right
    if not step.hoisted and left in legs:  # x is in no table of weights, so the left operand is the small one
        left, right = right, left
    return replace(step, left=left, right=right, left_legs=legs.get(left, ()), right_legs=legs[right])
