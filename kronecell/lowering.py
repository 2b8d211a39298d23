"""Steps of a plan lowered to permute, reshape and one matmul each, with as few copies of big tensors as possible.

Every step becomes mm or bmm, as a rule one of them, so the counted multiply-adds are those the machine executes, and
the graph exports and compiles without einsum. An intermediate keeps whatever leg order its matmul produced; which of
the possible layouts each step uses is chosen over the whole chain: one that is free now may cost a copy later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from kronecell import compiled
from kronecell.narrow import COLUMNS, ELEMENTS, compiled_faster, narrow, narrow_gradient
from kronecell.network import INPUT, Factor, Network
from kronecell.space import Slot, Space
from kronecell.steps import Step

ROW = "row"  # the leg of x that counts rows; its size is only known when x arrives

# Relative prices, in elements moved. Only their ratio matters: starting one matrix of a batched product costs about
# as much as copying a hundred elements, and so do some thousands of multiply-adds. BEAM bounds the search over layouts.
MATRIX_PRICE = 100
MACS_PER_ELEMENT = 32
THIN = 64
BEAM = 24
MOST_PARTS = 16  # products instead of one, to leave their results where the next product wants them
MANY = 2**19  # elements of gradients, one per leading index, from which they are summed as they are made
NARROW_LIMIT = 2**19  # elements of a small operand that are permuted for a faster product with a large x


@dataclass(frozen=True)
class View:
    """How an operand becomes a matrix or a batch of matrices: split into legs, permute, merge into groups."""

    legs: tuple[int, ...]
    permutation: tuple[int, ...] | None  # None: already in order
    groups: tuple[int, ...]

    def __call__(self, tensor: Tensor) -> Tensor:
        if self.permutation is not None:
            tensor = tensor.reshape(self.legs).permute(self.permutation)
        return tensor.reshape(self.groups)

    def undo(self, tensor: Tensor) -> Tensor:
        """From the groups back to the order the operand had; in what grouping is left to the caller."""
        if self.permutation is None:
            return tensor
        order = sorted(range(len(self.permutation)), key=self.permutation.__getitem__)
        return tensor.reshape([self.legs[i] for i in self.permutation]).permute(order)


@dataclass(frozen=True)
class Op:
    """out = a @ b, with both operands brought to (batch,) rows x columns; `spread` repeats a over the batch of b.

    With `parts`, a spread product is made for one part of the rows of a after the other, and these are the leading
    index of the result: as the next product wants it, if that is a batch over them.

    `diagonal` is for the wide form: the product was taken for all pairs of a shared leg, and only the equal ones count.
    """

    left: str
    right: str
    out: str
    a: View
    b: View
    legs: tuple[str, ...]
    swapped: bool = False  # a is the view of the right operand
    spread: bool = False
    diagonal: tuple[tuple[int, ...], int, int] | None = None  # shape of the wide result, the two positions of the leg
    narrow: bool = False  # b is brought to columns x summed, the layout in which few columns are multiplied fastest
    copied: int = 0  # elements copied to bring x into place, for the plan's number of rows
    matrices: int = 1  # matrix products started
    parts: int = 1
    turned: bool = False  # the big operand lies with its two matrix dimensions the other way round

    def run(self, tensors: dict[str, Tensor]) -> None:
        """Compute `out` from `left` and `right`."""
        tensors[self.out] = self.product(tensors[self.left], self.lay_out(tensors[self.right]))

    def lay_out(self, right: Tensor) -> Tensor:
        """The right, small operand as the product wants it."""
        small = (self.a if self.swapped else self.b)(right)
        return small.contiguous() if self.narrow else small

    def bring(self, left: Tensor, space: Space | None = None) -> Tensor:
        """The left, big operand as the product wants it."""
        view = self.b if self.swapped else self.a
        if space is None or not self.copied or view.permutation is None:
            return view(left)
        if self.out not in space.brought:
            permuted = left.reshape(view.legs).permute(view.permutation)
            space.brought[self.out] = space.copy((self.out, "brought"), permuted).view(view.groups)
        return space.brought[self.out]

    def product(self, left: Tensor, small: Tensor, space: Space | None = None) -> Tensor:
        """The contraction of the left operand and the right one, laid out; with a `space` it is not differentiable."""
        big = self.bring(left, space)
        a, b = (small, big) if self.swapped else (big, small)
        slot = (self.out, "product")
        if self.parts > 1:
            return self._in_parts(a, b, space, slot)
        if self.spread:
            a = a.unsqueeze(0).expand(b.shape[0], -1, -1)
        if self.narrow:
            return narrow(a, b, None if space is None else space.take(slot, (len(a), len(b)), a))
        result = matmul(a, b, space, slot)
        if self.diagonal is not None:
            shape, *pair = self.diagonal
            result = torch.diagonal(result.reshape(shape), 0, *pair).movedim(-1, pair[0]).contiguous()
        return result

    def _in_parts(self, a: Tensor, b: Tensor, space: Space | None, slot: Slot) -> Tensor:
        """out[p, i] = a[p] b[i] for the parts p of a."""
        pieces = [piece.unsqueeze(0).expand(len(b), -1, -1) for piece in a.chunk(self.parts)]
        if space is None:
            return torch.stack([torch.bmm(piece, b) for piece in pieces])
        result = space.take(slot, (self.parts, len(b), len(a) // self.parts, b.shape[2]), b)
        for piece, place in zip(pieces, result, strict=True):
            torch.bmm(piece, b, out=place)
        return result

    def product_into(self, left: Tensor, small: Tensor, result: Tensor) -> None:
        """The same, written into `result`; not differentiable."""
        made = narrow(self.a(left), small, result) if self.narrow else self.product(left, small)
        if made is not result:
            result.copy_(made)

    @property
    def moves_gradient(self) -> bool:
        """Whether the gradient of the big operand is copied to where that lies."""
        return (self.b if self.swapped else self.a).permutation is not None and not self.turned

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result, with -1 where the rows are."""
        if self.diagonal is not None:
            shape, _, second = self.diagonal
            return (*shape[:second], *shape[second + 1 :])
        if self.narrow:
            return (self.a.groups[0], self.b.groups[0])
        if self.parts > 1:
            return (self.parts, self.b.groups[0], self.a.groups[0] // self.parts, self.b.groups[2])
        return (*(self.b.groups[:1] if self.spread else ()), *self.a.groups[:-1], self.b.groups[-1])

    def product_gradient(self, gradient: Tensor) -> Tensor:
        """Gradient of the matrix product from that of the result: what the two below take."""
        if self.diagonal is None:
            return gradient
        shape, *pair = self.diagonal
        sizes = [*gradient.shape]
        sizes.insert(pair[1], shape[pair[1]])
        whole = gradient.new_zeros(sizes)
        torch.diagonal(whole, 0, *pair).movedim(-1, pair[0]).copy_(gradient)
        return whole.reshape(self.b.groups[0], self.a.groups[0], self.b.groups[2])

    def small_gradient(
        self, left: Tensor, gradient: Tensor, total: Tensor | None = None, space: Space | None = None
    ) -> Tensor:
        """Gradient of the right operand as laid out; added to `total`, in place, if that is given."""
        big = self.bring(left, space)
        if self.parts > 1:
            totals = [None] * self.parts if total is None else total.chunk(self.parts)
            slot = (self.out, "parts")
            found = [
                self._spread_gradient(big, of, whole, space, slot) for of, whole in zip(gradient, totals, strict=True)
            ]
            return torch.cat(found) if total is None else total
        if self.spread:
            return self._spread_gradient(big, gradient, total, space, (self.out, "parts"))
        if self.narrow:
            return narrow_gradient(big, gradient, total)
        a, b = (gradient, big.mT) if self.swapped else (big.mT, gradient)
        if total is None:
            return a @ b
        return total.addmm_(a, b) if a.ndim == 2 else total.baddbmm_(a, b)

    @staticmethod
    def _spread_gradient(b: Tensor, gradient: Tensor, total: Tensor | None, space: Space | None, slot: Slot) -> Tensor:
        """The same where out[i] = a b[i]."""
        rows, summed = gradient.shape[1], b.shape[1]
        if len(b) * rows * summed > MANY:  # a gradient for every i would be large
            total = gradient.new_zeros(rows, summed) if total is None else total
            return total.addbmm_(gradient, b.mT)
        part = matmul(b, gradient.mT, space, slot).sum(0).t()  # transposing the gradient costs less than transposing b
        return part.contiguous() if total is None else total.add_(part)

    def big_gradient(self, small: Tensor, gradient: Tensor, space: Space | None = None) -> Tensor:
        """Gradient of the left operand, with its legs in their order but in any grouping."""
        slot = (self.out, "gradient")
        if self.turned:  # so is its gradient made
            factors = (gradient.mT, small) if self.swapped else (small.mT if self.narrow else small, gradient.mT)
            return matmul(*factors, space, slot)
        if not self.swapped:
            return self.a.undo(matmul(gradient, small if self.narrow else small.mT, space, slot))
        a = small.mT
        if self.parts > 1:
            pieces = [piece.expand(gradient.shape[1], -1, -1) for piece in a.chunk(self.parts, -1)]
            products = [torch.bmm(piece, of) for piece, of in zip(pieces, gradient, strict=True)]
            return self.b.undo(torch.stack(products).sum(0))
        return self.b.undo(matmul(a.expand(len(gradient), -1, -1) if self.spread else a, gradient, space, slot))


def matmul(a: Tensor, b: Tensor, space: Space | None, slot: Slot) -> Tensor:
    """The product of two matrices or of two batches of them, in the memory of a slot if there is a space."""
    multiply = torch.mm if a.ndim == 2 else torch.bmm
    if space is None:
        return multiply(a, b)
    return multiply(a, b, out=space.take(slot, (*a.shape[:-1], b.shape[-1]), a))


@dataclass(frozen=True)
class Program:
    """Hoisted operations, operations that touch x, and the last permutation to (row, outputs)."""

    hoisted: tuple[Op, ...]
    hot: tuple[Op, ...]
    result: str
    last: View
    straight: bool = False  # the last product is a batch over leading outputs, and can be written where it belongs

    def finish(self, tensors: dict[str, Tensor]) -> Tensor:
        return self.last(tensors[self.result])


def constant_tensor(factor: Factor, network: Network, like: Tensor) -> Tensor:
    """The tensor of a constant factor, on the device and in the dtype of the parameters."""
    shape = network.shape(factor.legs)
    if factor.constant == "ones":
        return torch.ones(shape, dtype=like.dtype, device=like.device)
    if factor.constant == "blocks":
        columns = [torch.ones(size, 1, dtype=like.dtype, device=like.device) for size in factor.blocks]
        return torch.block_diag(*columns)
    tensor = torch.zeros(shape, dtype=like.dtype, device=like.device)
    index = torch.arange(shape[0], device=like.device)
    tensor[(index,) * len(shape)] = 1
    return tensor


@dataclass(frozen=True)
class _Layouts:
    """Leg sizes with the row leg, and the price of bringing a tensor into a grouping."""

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
        """Elements copied to bring a contiguous tensor with legs `order` into `groups`: 0 when BLAS takes it as is."""
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
            turned = not spread and [*order] == [leg for group in (*big[:-2], big[-1], big[-2]) for leg in group]
            op = Op(
                step.left, step.right, step.name, a, b, legs, swapped, spread, None, narrow, copied, matrices,
                turned=turned and [*order] != [leg for group in big for leg in group],
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
        """Whether the small operand is narrow, and lies as columns x summed already or is worth being brought there."""

        def real(legs: Iterable[str]) -> list[str]:
            return [leg for leg in legs if self.sizes[leg] > 1]

        lies = real(step.right_legs) == real((*other, *summed))
        limit = NARROW_LIMIT if self.volume(order) >= ELEMENTS else NARROW_LIMIT // 4
        columns, depth = self.volume(other), self.volume(summed)
        wider = compiled.library is not None and compiled_faster(self.volume(order), depth, columns)
        return (columns <= COLUMNS or wider) and (lies or self.volume(step.right_legs) <= limit)

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


def lower(network: Network, steps: Sequence[Step], rows: int, wide: bool = False, rows_first: bool = False) -> Program:
    """Choose a layout for every step; the chain of steps that touch x is optimised as a whole.

    `rows_first` keeps rows the leading index of the first product, so that it can be made a few rows at a time.
    """
    layouts = _Layouts({**network.sizes, ROW: rows}, wide)
    legs = {name: held for name, held in network.legs.items() if name != INPUT}
    hoisted = []
    for step in steps:
        if step.hoisted:
            op = min(layouts.options(_located(step, legs), legs[step.left]), key=lambda option: option[0])[1]
            legs[step.name] = op.legs
            hoisted.append(op)
    hot = [step for step in steps if not step.hoisted]
    final = (ROW, *network.outputs) if hot else network.outputs
    groups = [[ROW], [*network.outputs]] if hot else [[leg] for leg in network.outputs]
    result = hot[-1].name if hot else (steps[-1].name if steps else network.factors[0].name)
    if hot:
        beam: dict[tuple[str, ...], tuple[int, tuple[Op, ...]]] = {(ROW, *network.inputs): (0, ())}
        for step, then in zip(hot, [*hot[1:], None], strict=True):
            following: dict[tuple[str, ...], tuple[int, tuple[Op, ...]]] = {}
            for order, (price, ops) in beam.items():
                for extra, op in layouts.options(_located(step, legs), order, then):
                    if rows_first and step is hot[0] and (op.legs[0] != ROW or op.diagonal is not None):
                        continue
                    total = price + extra
                    if op.legs not in following or total < following[op.legs][0]:
                        following[op.legs] = (total, (*ops, op))
            beam = dict(sorted(following.items(), key=lambda item: item[1][0])[:BEAM])
        done = [
            (price + (0 if order == final else 2 * layouts.volume(order)), order, ops)
            for order, (price, ops) in beam.items()
        ]
        _, order, ops = min(done, key=lambda item: item[0])
    else:
        order, ops = legs[result], ()
    straight = bool(ops) and layouts.straight(ops[-1], network.outputs)
    return Program(tuple(hoisted), ops, result, layouts.view(order, groups), straight)


def _located(step: Step, legs: dict[str, tuple[str, ...]]) -> Step:
    """The step with x on the left, and with the leg orders its operands really have."""
    left, right = step.left, step.right
    if not step.hoisted and left in legs:  # x is in no table of weights, so the left operand is the small one
        left, right = right, left
    return replace(step, left=left, right=right, left_legs=legs.get(left, ()), right_legs=legs[right])
