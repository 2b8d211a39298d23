"""A plan lowered to what a machine runs: for every step, how both operands become matrices, and which product is taken.

Data only. `lowering` makes programs, `engine` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

STRAIGHT_DEPTH = 32  # with longer sums, a batched product and a copy are as fast as writing in place


class Merged(NamedTuple):
    """A permutation in which legs that stay together are one; -1 stands for the number of rows.

    Fewer and longer legs make a permuted copy faster, and every call counts where x is small.
    """

    legs: tuple[int, ...]
    permutation: tuple[int, ...]
    back: tuple[int, ...]  # the inverse
    permuted: tuple[int, ...]  # the legs after it


@dataclass(frozen=True)
class View:
    """How an operand becomes a matrix or a batch of matrices: split into legs, permute, merge into groups."""

    legs: tuple[int, ...]
    permutation: tuple[int, ...] | None  # None: already in order
    groups: tuple[int, ...]
    _merged: Merged | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.permutation is not None:
            object.__setattr__(self, "_merged", _merged(self.legs, self.permutation))

    def __call__(self, tensor: Tensor) -> Tensor:
        if self._merged is None:
            return tensor.reshape(self.groups)
        if torch.compiler.is_compiling():  # a graph for every number of rows can only be proved leg by leg
            return tensor.reshape(self.legs).permute(self.permutation or ()).reshape(self.groups)
        tensor = self.permuted(tensor)
        return tensor if self._merged.permuted == self.groups else tensor.reshape(self.groups)

    def permuted(self, tensor: Tensor) -> Tensor:
        """The permutation alone: a view, in some grouping."""
        assert self._merged is not None
        return tensor.reshape(self._merged.legs).permute(self._merged.permutation)

    def undo(self, tensor: Tensor) -> Tensor:
        """From the groups back to the order the operand had; in what grouping is left to the caller."""
        if self._merged is None:
            return tensor
        permuted = self._merged.permuted
        return (tensor if permuted == self.groups else tensor.reshape(permuted)).permute(self._merged.back)


def _merged(legs: tuple[int, ...], permutation: tuple[int, ...]) -> Merged:
    runs: list[list[int]] = []
    for leg in permutation:
        if runs and runs[-1][-1] + 1 == leg:
            runs[-1].append(leg)
        else:
            runs.append([leg])
    sizes = [[legs[leg] for leg in run] for run in runs]
    permuted = tuple(-1 if -1 in together else prod(together) for together in sizes)
    back = sorted(range(len(runs)), key=runs.__getitem__)
    return Merged(tuple(permuted[i] for i in back), _inverse(back), tuple(back), permuted)


def _inverse(permutation: list[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(permutation)), key=permutation.__getitem__))


@dataclass(frozen=True)
class Op:
    """out = a @ b, with both operands viewed as (batch,) rows x columns; `spread` repeats a over the batch of b.

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
    narrow: bool = False  # b is laid out as columns x summed, the layout in which few columns are multiplied fastest
    copied: int = 0  # elements copied to permute x, for the plan's number of rows
    matrices: int = 1  # matrix products started
    parts: int = 1
    transposed: bool = False  # the big operand lies with its two matrix dimensions exchanged

    @property
    def left_view(self) -> View:
        """How the left operand becomes a matrix."""
        return self.b if self.swapped else self.a

    @property
    def right_view(self) -> View:
        """How the right one does."""
        return self.a if self.swapped else self.b

    @property
    def moves_gradient(self) -> bool:
        """Whether the gradient of the big operand is permuted, with a copy, to the layout of that operand."""
        return self.left_view.permutation is not None and not self.transposed

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

    def lay_out(self, right: Tensor) -> Tensor:
        """The right, small operand as the product wants it."""
        small = self.right_view(right)
        return small.contiguous() if self.narrow else small


@dataclass(frozen=True)
class Fold:
    """Sizes of the first two steps where one kernel runs both: x meets few columns, whose places are then summed.

    y (rows, places, columns) = x (rows, places, depth) W^T is by far the largest intermediate of most plans, and the
    second step is z[r, o, c] = sum over p of y[r, p, c] f[p, o, c]: f depends on c by its index among `shared` alone,
    where columns count as (any, shared, inner). In the kernel y stays in cache, and x is read once, for gradients too.
    Where leading legs of x are not summed, each of its parts, of `width` elements, is a row of its own.
    """

    width: int
    places: int
    columns: int
    shared: int
    inner: int
    others: int


@dataclass(frozen=True)
class Program:
    """Hoisted operations, operations that touch x, and the last permutation to (row, outputs)."""

    hoisted: tuple[Op, ...]
    hot: tuple[Op, ...]
    result: str
    last: View
    straight: bool = False  # the last product is a batch over leading outputs, and can be written where it belongs
    fold: Fold | None = None  # the first two of `hot`, if a kernel can run them together
    chunk: int | None = None  # rows at a time
    width: int = 0  # of x
    outputs: int = 0  # elements of a row of the result
    sizes: tuple[int, ...] = ()  # elements that a row has behind every operation of `hot`

    @cached_property
    def hoisted_results(self) -> dict[str, Op]:
        """Results of hoisted operations that a step with x takes, and that step."""
        made = {op.out for op in self.hoisted}
        return {op.right: op for op in self.hot if op.right in made}

    @cached_property
    def reads_bytes(self) -> bool:
        """Whether the first step has a kernel that reads bytes."""
        return self.hot[0].narrow and self.hot[0].a.permutation is None

    @cached_property
    def grouped(self) -> bool:
        """Whether the last step is one short product for every group of outputs, written where it belongs."""
        op = self.hot[-1]
        return self.straight and not op.narrow and op.a.groups[-1] <= STRAIGHT_DEPTH
