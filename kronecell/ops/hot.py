"""The steps that touch x, run one after the other; for autograd they are one operation with a backward of its own.

Autograd would walk through a node for every view and permutation, and it cannot know which form of a small product is
fast. In chunks, only x is saved and what is small beside it: other intermediates are made again, a few rows at a time,
while they are in cache. The backward is itself made of differentiable operations; for a second derivative all
intermediates are made again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kronecell.ops import last
from kronecell.ops.fold import Fold
from kronecell.ops.matrices import add_product, multiply
from kronecell.ops.operation import Op, View
from kronecell.ops.space import Lender, Slot, Space
from kronecell.ops.watched import autocast_off, ordinary, unwatched

LARGE = 2**20  # elements of x: with fewer, fresh memory costs less than to look for used one
KEPT_PART = 2  # in chunks, intermediates up to 1 / KEPT_PART of the size of x are kept for the backward


@dataclass(frozen=True)
class Hot:
    """The steps, the permutation after the last, and whether that one can be written straight into its place."""

    ops: tuple[Op, ...]
    last: View
    straight: bool
    chunk: int | None = None  # rows at a time
    fold: Fold | None = None  # the first two steps, if a kernel can make them together


def run_hot(hot: Hot, x: Tensor, small: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """x (rows, M) through all steps, whose other operands, laid out, are `small`, plus the bias."""
    inputs = (x, *small) if bias is None else (x, *small, bias)
    if not ordinary(x):
        return _run(hot, x, small, bias, straight=False)
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        return _Hot.apply(hot, x, bias, *small)
    return _run(hot, x, small, bias, hot.straight)


def _run(
    hot: Hot,
    x: Tensor,
    small: Sequence[Tensor],
    bias: Tensor | None,
    straight: bool,
    kept: _Kept | None = None,
    v: Tensor | None = None,
) -> Tensor:
    if hot.chunk is None or len(x) <= hot.chunk:
        return _whole(hot, x, small, bias, straight)
    parts = x.split(hot.chunk)
    if not straight and not ordinary(x):
        whole = replace(hot, chunk=None)
        return torch.cat([_run(whole, part, small, bias, straight) for part in parts])
    space, result, done = _scratch.space if _keeps(x, *small) else Space(), None, 0
    for part in parts:
        place = None if v is None else v[done : done + len(part)]
        keep = kept is not None and len(small) > 1 and kept.wanted[1]
        y, lefts = _forward(hot, part, small, bias, straight, space.next_chunk(), keep, place)
        if kept is not None:
            kept.add(lefts, done, x)
        result = y.new_empty(len(x), y.shape[1]) if result is None else result
        result[done : done + len(part)] = y
        done += len(part)
    space.keep_some()
    assert result is not None
    return result


def _whole(hot: Hot, x: Tensor, small: Sequence[Tensor], bias: Tensor | None, straight: bool) -> Tensor:
    """All rows at once, without gradients; intermediates are in memory that is used again, the result is not."""
    # A tracer first of all: it would take a look at sizes for a condition.
    if not ordinary(x) or hot.fold is not None or x.numel() < LARGE or not _keeps(x, *small):
        return _forward(hot, x, small, bias, straight)[0]
    return _in(_scratch.space, hot, x, small, bias, straight)[0]


def _in(
    space: Space,
    hot: Hot,
    x: Tensor,
    small: Sequence[Tensor],
    bias: Tensor | None,
    straight: bool,
    keep: bool = True,
    v: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """As `_forward`, in the memory of a space; the result is not: others will have it. Not for a fold that is all."""
    lefts = _lefts(hot, len(hot.ops) - 1, x, small, space.next_chunk(), keep, v)
    y = _end(hot, _there(lefts[-1]), small[-1], bias, straight)
    space.keep_some()
    return y, lefts


class _Kept:
    """Of the intermediates of all chunks, those that the backward reads and that are small beside x."""

    def __init__(self, wanted: Sequence[bool]) -> None:
        self.wanted = wanted
        self.buffers: list[Tensor | None] = [None] * len(wanted)

    def add(self, lefts: Sequence[Tensor | None], start: int, x: Tensor) -> None:
        """What x was before every step, for the chunk from row `start` on."""
        rows = len(_there(lefts[0]))
        for i, left in enumerate(lefts[1:], 1):
            if left is None or not self.wanted[i]:
                continue
            each, taken = left.numel() // rows, sum(buffer.shape[1] for buffer in self.buffers if buffer is not None)
            if start == 0 and taken + each <= x.shape[1] // KEPT_PART:
                self.buffers[i] = left.new_empty(len(x), each)
            buffer = self.buffers[i]
            if buffer is not None:
                buffer[start : start + rows].view(left.shape).copy_(left)


def _forward(
    hot: Hot,
    x: Tensor,
    small: Sequence[Tensor],
    bias: Tensor | None,
    straight: bool,
    space: Space | None = None,
    keep: bool = False,
    v: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """All steps, with what x is before each; without `keep` the first of these intermediates may be missing."""
    folds_last = hot.fold is not None and len(hot.ops) == 2 and hot.fold.suits(x, small)
    lefts = _lefts(hot, len(hot.ops) - (not folds_last), x, small, space, keep, v)
    if folds_last:
        y = hot.last(_there(lefts.pop()))
        return y if bias is None else y + bias, lefts
    return _end(hot, _there(lefts[-1]), small[-1], bias, straight, space), lefts


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _end(
    hot: Hot, left: Tensor, operand: Tensor, bias: Tensor | None, straight: bool, space: Space | None = None
) -> Tensor:
    """The last step with its permutation and the bias."""
    op = hot.ops[-1]
    if not straight:
        y = hot.last(op.product(left, operand, space))
        return y if bias is None else y + bias
    a, b = op.bring(left, space), operand
    if a.shape[1] == 1:  # a batch of single rows is made where it belongs anyway
        y = torch.bmm(a, b) if bias is None else torch.baddbmm(bias.reshape(len(a), 1, -1), a, b)
        return y.reshape(1, len(a) * b.shape[2])
    if last.suits(a, b, bias):
        return last.product(a, b, bias)
    y = a.new_empty(a.shape[1], a.shape[0], b.shape[2])
    place = y.transpose(0, 1)
    if bias is None:
        multiply(a, b, place)
    else:
        add_product(place.copy_(bias.reshape(len(a), 1, -1)), a, b)
    return y.reshape(len(y), len(a) * b.shape[2])


class _Scratch(threading.local):
    """What a call makes and needs no longer afterwards is made in the same memory every time."""

    def __init__(self) -> None:
        self.space = Space()
        self.lender = Lender()  # of what autograd keeps


_scratch = _Scratch()


def lender() -> Lender:
    """The memory of this thread for what autograd keeps."""
    return _scratch.lender


def _keeps(*tensors: Tensor | None) -> bool:
    """Whether memory like that of these may be used again by anybody: not a tracer's, nor one that is locked later.

    On a GPU it may be in use by another stream, and fresh memory costs nothing there.
    """
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    return unwatched(*given) and all(tensor.is_cpu for tensor in given)


class _Hot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hot: Hot, x: Tensor, bias: Tensor | None, *small: Tensor) -> Tensor:
        ctx.hot = hot
        ctx.shape = x.shape[1:]  # behind bytes, x is the result of the first product and has not a line for each row
        of_x, _, *of_small = ctx.needs_input_grad[1:]
        # Only what the backward reads: a left operand for the gradient of the small one, the small one to go further
        # left, and what is before the last of those gradients to make its left operand again.
        first = x if any(of_small) else None
        operands = [t if i < _last(of_small) or of_x or any(of_small[:i]) else None for i, t in enumerate(small)]
        folds = hot.fold is not None and not of_x and all(of_small[:2]) and hot.fold.suits(x, small)
        lends = lender() if x.numel() >= LARGE and _keeps(x, *small) else None
        v = hot.fold.room(x, lends) if hot.fold is not None and folds else None
        if hot.chunk is not None and len(x) > hot.chunk:
            kept = _Kept(of_small)
            y = _run(hot, x, small, bias, hot.straight, kept, v)
            middle = kept.buffers[1:]
        else:
            keep = len(small) > 1 and of_small[1]
            if lends is not None and (hot.fold is None or len(hot.ops) > 2):
                y, lefts = _in(lends, hot, x, small, bias, hot.straight, keep, v)
            else:
                y, lefts = _forward(hot, x, small, bias, hot.straight, None, keep, v)
            middle = [left if wanted else None for left, wanted in zip(lefts[1:], of_small[1:], strict=True)]
        ctx.save_for_backward(first, v, *operands, *middle)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with autocast_off(gradients[0]):  # the dtype was settled in the forward
            return _Hot._backward(ctx, gradients[0])

    @staticmethod
    def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hot: Hot = ctx.hot
        x, v, *others = ctx.saved_tensors
        small, middle = others[: len(hot.ops)], others[len(hot.ops) :]
        of_x, of_bias, *of_small = ctx.needs_input_grad[1:]
        gradient = upstream.contiguous()  # that of a sum has one element in memory, which BLAS copies each time
        total: list[Tensor | None] = [None] * (len(small) + 1)  # and that of the bias
        rows, parts = len(gradient), list[Tensor]()
        chunk = rows if hot.chunk is None or torch.is_grad_enabled() else hot.chunk
        plain = ordinary(gradient) and torch._C._has_storage(gradient)  # a batch of gradients has none of its own
        space = None
        if plain and (chunk < rows or not of_x) and _keeps(gradient, x, *others):
            space = _scratch.space
        elif plain and chunk < rows:
            space = Space()
        for start in range(0, max(rows, 1), max(chunk, 1)):
            now = slice(start, start + chunk)
            if space is not None:
                space.next_chunk()
            lefts, turned, upward = [x, *middle], v, gradient
            if chunk < rows:
                lefts, upward = [None if left is None else left[now] for left in lefts], gradient[now]
                turned = None if v is None else v[now]
            if x is not None and (torch.is_grad_enabled() or hot.chunk is not None):
                lefts = _remade(hot, lefts, small, of_small, space)
            flat = _backward(hot, lefts, turned, small, upward, of_x, [*of_small, of_bias], total, space)
            if flat is not None:
                flat = flat.reshape(-1, *ctx.shape)
                parts.append(flat if space is None else flat.clone())
        if space is not None:
            space.keep_some(learning=True)
        whole = None
        if of_x:
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return None, whole, total.pop(), *total


def _last(flags: Sequence[bool]) -> int:
    """The last step whose operand wants a gradient; 0 if none does."""
    return max((i for i, flag in enumerate(flags) if flag), default=0)


def _remade(
    hot: Hot,
    lefts: Sequence[Tensor | None],
    small: Sequence[Tensor | None],
    of_small: Sequence[bool],
    space: Space | None,
) -> list[Tensor | None]:
    """What x is before every step whose operand wants a gradient, where it was not kept.

    For a gradient of the gradient, all are made again.
    """
    ready = [left is not None and not torch.is_grad_enabled() for left in lefts]
    again = _last([wanted and not there for wanted, there in zip(of_small, ready, strict=True)])
    made = _lefts(hot, again, _there(lefts[0]), small, space)
    made += [None] * (len(lefts) - len(made))
    for i, left in enumerate(lefts):
        if i and ready[i]:
            made[i] = _there(left).reshape(hot.ops[i - 1].shape)
    return made


def _lefts(
    hot: Hot,
    steps: int,
    x: Tensor,
    small: Sequence[Tensor | None],
    space: Space | None = None,
    keep: bool = True,
    v: Tensor | None = None,
) -> list[Tensor | None]:
    """x, and what it is after every one of the first steps; what follows from it at once may be left out."""
    lefts: list[Tensor | None] = [x]
    if steps > 1 and hot.fold is not None and hot.fold.suits(x, small):
        lefts += hot.fold.run(x, small, keep, v, space)
    elif hot.fold is not None and v is not None:
        hot.fold.turn(x, _there(small[1]), v)
    for op, operand in zip(hot.ops[len(lefts) - 1 : steps], small[len(lefts) - 1 : steps], strict=True):
        lefts.append(op.product(_there(lefts[-1]), _there(operand), space))
    return lefts


def _backward(
    hot: Hot,
    lefts: Sequence[Tensor | None],
    v: Tensor | None,
    small: Sequence[Tensor | None],
    gradient: Tensor,
    of_x: bool,
    of_small: Sequence[bool],
    total: list[Tensor | None],
    space: Space | None,
) -> Tensor | None:
    """The gradient of x, if wanted, from that of the result; v is that of the fold, if it was made.

    Those of the small operands, and of the bias as the last of them, are added to `total`.
    """
    steps = len(small)
    further = of_x or any(of_small[: steps - 1])
    ended = _end_backward(hot, lefts, small[-1], gradient, further, of_small, total)
    if ended is not None:
        steps, gradient = steps - 1, ended
        if not further or not steps:
            return gradient if further else None
        gradient = gradient.reshape(hot.ops[steps - 1].shape)
    else:
        if of_small[-1]:
            total[-1] = gradient.sum(0) if total[-1] is None else total[-1].add_(gradient.sum(0))
        gradient = hot.last.undo(gradient).reshape(hot.ops[-1].shape)
    for i in reversed(range(steps)):
        op, left, operand = hot.ops[i], lefts[i] if i < len(lefts) else None, small[i]
        if i == 1 and hot.fold is not None and v is not None:
            gradient = gradient.contiguous()
            if hot.fold.suits_backward(left, v, gradient):
                total[:2] = hot.fold.gradients(_there(left), v, _there(operand), gradient, total[:2])
                return None
        whole = op.product_gradient(gradient)
        if of_small[i]:
            total[i] = op.small_gradient(_there(left), whole, total[i], space)
        if not of_x and not any(of_small[:i]):
            return None
        gradient = op.big_gradient(_there(operand), whole, space)
        if i:
            gradient = _regrouped(gradient, hot.ops[i - 1].shape, space, (op.out, "regrouped"))
    return gradient


def _end_backward(
    hot: Hot,
    lefts: Sequence[Tensor | None],
    operand: Tensor | None,
    gradient: Tensor,
    further: bool,
    of_small: Sequence[bool],
    total: list[Tensor | None],
) -> Tensor | None:
    """The last step back by its kernel, if that can do it: the gradient of what comes in, made only if `further`."""
    left = lefts[-1] if len(lefts) == len(hot.ops) else None
    if not hot.straight or left is None or operand is None or torch.is_grad_enabled() or not ordinary(left):
        return None
    op = hot.ops[-1]
    a = op.bring(left)
    if not last.suits(a, operand, gradient, last.MOST_DEPTH_BACK):
        return None
    for i, shape in ((-2, operand.shape), (-1, gradient.shape[1:])):
        if of_small[i] and total[i] is None:
            total[i] = operand.new_zeros(shape)
    of_a = torch.empty_like(a)  # in the order in which `a` lies
    wanted = [total[i] if of_small[i] else None for i in (-2, -1)]
    last.gradients(a, operand, gradient, of_a if further else None, *wanted)
    return op.a.undo(of_a)


def _regrouped(tensor: Tensor, shape: tuple[int, ...], space: Space | None, slot: Slot) -> Tensor:
    """tensor.reshape(shape), which may have to copy."""
    if space is not None and not tensor.is_contiguous():
        tensor = space.copy(slot, tensor)
    return tensor.reshape(shape)
