"""Runs programs: forward, backward, and the hoisted steps that need no x.

There is one route. A step is a product of two matrices (`products`); the first two are one kernel where the program has
a fold, and the last is written straight into the result where its layout allows. The backward saves what the forward
made, small intermediates only where rows are run in chunks; the others are computed again while they are in cache.

With `plain` a function is made of differentiable operations of torch alone: the references of the operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kronecell.ops.kernels import fold, fold_backward, grouped, grouped_backward, keeps_v
from kronecell.ops.products import Kernels, Plain, Room, big_gradient, product, product_gradient, small_gradient
from kronecell.ops.program import Program
from kronecell.plans.network import Factor, Network

BYTE = 1 / 255  # a byte b of uint8 input counts as b / 255, as everywhere in imaging
BYTE_ELEMENTS = 2**18  # of uint8 input that are converted at a time, where no kernel reads bytes


# Weights ---------------------------------------------------------------------------------------------------------


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


def run_hoisted(program: Program, tensors: Mapping[str, Tensor], plain: bool = False) -> dict[str, Tensor]:
    """All tensors, with the results of the hoisted steps among them."""
    found, by = dict(tensors), Plain() if plain else Kernels()
    for op in program.hoisted:
        found[op.out] = product(op, found[op.left], op.lay_out(found[op.right]), by)
    return found


def hoisted_gradients(
    program: Program, tensors: Mapping[str, Tensor], upstream: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients of everything that the hoisted steps read, from those of their results, which may be regrouped."""
    values, by = run_hoisted(program, tensors), Kernels()
    made = {op.out: op for op in program.hoisted}
    gradients = {name: gradient.reshape(made[name].shape) for name, gradient in upstream.items()}
    for op in reversed(program.hoisted):
        whole = product_gradient(op, gradients[op.out])
        small = op.lay_out(values[op.right])
        of_small = op.right_view.undo(small_gradient(op, values[op.left], whole, by))
        gradients[op.left] = big_gradient(op, small, whole, by).reshape(values[op.left].shape).contiguous()
        gradients[op.right] = of_small.reshape(values[op.right].shape).contiguous()
    return gradients


# Reference -------------------------------------------------------------------------------------------------------


def reference(program: Program, x: Tensor, operands: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The result of `forward`, all rows at once, one product of torch for each step."""
    operands = operands if x.dtype != torch.uint8 else _scaled(operands)
    left = x.to(operands[0].dtype) if x.dtype == torch.uint8 else x
    for op, operand in zip(program.hot, operands, strict=True):
        left = product(op, left, operand, Plain())
    y = program.last(left)
    return y if bias is None else y + bias


# Forward ---------------------------------------------------------------------------------------------------------


def forward(
    program: Program, x: Tensor, operands: Sequence[Tensor], bias: Tensor | None, keep: bool
) -> tuple[Tensor, list[Tensor]]:
    """x (rows, M) through all steps that touch it, plus the bias; and what the backward saves, if `keep`."""
    operands = operands if x.dtype != torch.uint8 else _scaled(operands)
    rows = _rows_at_once(program, x)
    if rows is None and (program.chunk is None or not keep):
        y, lefts, sums = _forward(program, x, operands, bias, keep, Kernels())
        kept = zip((*lefts[1:], *sums), saved_shapes(program, x, keep), strict=True) if keep else ()
        return y, [left.reshape(shape) for left, shape in kept]
    like = operands[0]
    saved = [like.new_empty(shape) for shape in saved_shapes(program, x, keep)]
    y, by = like.new_empty(len(x), program.outputs), Kernels(Room())
    for start in range(0, len(x), rows or max(1, len(x))):
        now = slice(start, start + (rows or len(x)))
        y[now], lefts, sums = _forward(program, x[now], operands, bias, keep, by)
        for whole, part in zip(saved, (*lefts[1:], *sums), strict=False):
            if whole.numel() and part.numel():
                place = whole[now]
                place.copy_(part.reshape(place.shape))
    return y, saved


def saved_shapes(program: Program, x: Tensor, keep: bool) -> list[tuple[int, ...]]:
    """Shapes of what `forward` saves: what x is before every step but the first, and the sums of a fold.

    In chunks, what would take more memory than x is not saved, as (0,), but computed again.
    """
    if not keep:
        return []
    rows, taken = x.shape[0], 0
    shapes: list[tuple[int, ...]] = []
    in_chunks = program.chunk is not None
    for each in program.sizes[:-1]:
        fits = not in_chunks or taken + each <= program.width
        taken += each if fits else 0
        shapes.append((rows, each) if fits else (0,))
    return shapes if program.fold is None else [*shapes, _sums_shape(program, x)]


def _sums_shape(program: Program, x: Tensor) -> tuple[int, ...]:
    of = program.fold
    assert of is not None
    if not keeps_v(x.reshape(-1, of.width), of.places, of.shared, of.others):
        return (0,)
    return (x.shape[0], program.width // of.places * of.shared * of.others)


def _scaled(operands: Sequence[Tensor]) -> Sequence[Tensor]:
    """Bytes count as numbers from 0 to 1: the division is made in the first operand, which is small."""
    return [operands[0] * BYTE, *operands[1:]]


def _rows_at_once(program: Program, x: Tensor) -> int | None:
    """Rows of a chunk; None for all rows at once."""
    rows = program.chunk
    if x.dtype == torch.uint8 and not program.reads_bytes:
        converted = max(1, BYTE_ELEMENTS // program.width)
        rows = converted if rows is None else min(rows, converted)
    return rows if rows is not None and rows < len(x) else None


def _forward(
    program: Program, x: Tensor, operands: Sequence[Tensor], bias: Tensor | None, keep: bool, by: Kernels
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The result; what x is before every step; and the sums of x that the gradient of a fold needs, if there is one."""
    if x.dtype == torch.uint8 and not program.reads_bytes:
        x = x.to(operands[0].dtype)
    lefts, sums, hot = [x], list[Tensor](), program.hot
    if program.fold is not None:
        of = program.fold
        parts = x.reshape(-1, of.width)
        z, y, made = fold.kernel(parts, operands[0], operands[1].contiguous(), of.places, of.shared, of.inner, keep)
        lefts, sums = [x, y, z.reshape(hot[1].shape)], [made]
    for op, operand in zip(hot[len(lefts) - 1 : -1], operands[len(lefts) - 1 : -1], strict=True):
        lefts.append(product(op, lefts[-1], operand, by))
    if len(lefts) > len(hot):  # the fold was all
        result = program.last(lefts.pop())
        return (result if bias is None else result + bias), lefts, sums
    left, operand = lefts[-1], operands[-1]
    if program.grouped:
        return grouped.kernel(by.arrange(hot[-1].a, left, hot[-1].out, "left"), operand, bias), lefts, sums
    result = program.last(product(hot[-1], left, operand, by))
    return (result if bias is None else result + bias), lefts, sums


# Backward --------------------------------------------------------------------------------------------------------


def backward(
    program: Program,
    upstream: Tensor,
    x: Tensor,
    operands: Sequence[Tensor],
    saved: Sequence[Tensor],
    wanted: Sequence[bool],
    plain: bool = False,
) -> list[Tensor]:
    """Gradients of x, of every operand and of the bias, as wanted; an unwanted one has no elements.

    What is not saved is computed again.
    """
    scaled = x.dtype == torch.uint8
    operands = _scaled(operands) if scaled else operands
    of_x, *of_small, of_bias = wanted
    upstream = upstream.contiguous()  # that of a sum has one element in memory, which BLAS copies each time
    rows = _rows_at_once(program, x)
    by: Plain = Plain() if plain else Kernels(None if rows is None else Room())
    parts: list[Tensor] = []
    totals: list[Tensor] = []
    for start in range(0, len(x), rows or max(1, len(x))):
        now = slice(start, start + (rows or len(x)))
        part = [line[now] if line.numel() else line for line in saved]
        lefts, sums = _lefts(program, x[now], operands, part, of_small, by)
        found = _backward(program, upstream[now], lefts, sums, operands, [of_x, *of_small, of_bias], by)
        if of_x:
            of_rows = found[0].reshape(-1, program.width)
            parts.append(of_rows if rows is None or plain else of_rows.clone())
        totals = [total + new for total, new in zip(totals, found[1:], strict=True)] if totals else found[1:]
    empty = upstream.new_empty(0)
    if not len(x):
        shapes = [tensor.shape for tensor in operands] + [upstream.shape[1:]]
        totals = [upstream.new_zeros(shape) for shape in shapes]
        parts = [upstream.new_zeros(x.shape)]
    if scaled and of_small[0]:
        totals[0] = totals[0] * BYTE
    gradients = [total if want else empty for total, want in zip(totals, [*of_small, of_bias], strict=True)]
    return [torch.cat(parts) if of_x and len(parts) > 1 else parts[0] if of_x else empty, *gradients]


def _lefts(
    program: Program,
    x: Tensor,
    operands: Sequence[Tensor],
    saved: Sequence[Tensor],
    of_small: Sequence[bool],
    by: Plain,
) -> tuple[list[Tensor], Tensor | None]:
    """What x is before every step whose operand wants a gradient, saved or computed again; and the sums of a fold."""
    hot = program.hot
    last = max((i for i, flag in enumerate(of_small) if flag), default=0)
    if x.dtype == torch.uint8 and (not isinstance(by, Kernels) or not program.reads_bytes):
        x = x.to(operands[0].dtype)
    lefts = [x]
    for i in range(1, last + 1):
        if saved and saved[i - 1].numel():
            lefts.append(saved[i - 1].reshape(hot[i - 1].shape))
        else:
            lefts.append(product(hot[i - 1], lefts[-1], operands[i - 1], by))
    sums = saved[-1] if program.fold is not None and saved and saved[-1].numel() else None
    return lefts, sums


def _backward(
    program: Program,
    gradient: Tensor,
    lefts: Sequence[Tensor],
    sums: Tensor | None,
    operands: Sequence[Tensor],
    wanted: Sequence[bool],
    by: Plain,
) -> list[Tensor]:
    """Gradients of x, the operands and the bias for some rows; what is not wanted has no elements."""
    of_x, *of_small, of_bias = wanted
    hot, empty = program.hot, gradient.new_empty(0)
    found = [empty] * (len(hot) + 2)
    last = len(hot) - 1
    further = [of_x or any(of_small[:i]) for i in range(len(hot))]
    if program.grouped and len(lefts) == len(hot) and isinstance(by, Kernels):
        op, flags = hot[last], [further[last], of_small[last], of_bias]
        of_a, found[last + 1], found[-1] = grouped_backward.kernel(gradient, op.a(lefts[last]), operands[last], flags)
        if not further[last]:
            return found
        gradient = op.a.undo(of_a)
        gradient = gradient.reshape(hot[last - 1].shape) if last else gradient
        last -= 1
    else:
        found[-1] = gradient.sum(0) if of_bias else empty
        gradient = program.last.undo(gradient).reshape(hot[last].shape)
    for i in range(last, -1, -1):
        op = hot[i]
        if i == 1 and sums is not None and all(of_small[:2]) and not of_x:
            of = program.fold
            assert of is not None
            v = sums.reshape(-1, of.shared * of.others, of.width // of.places)
            gradient = gradient.reshape(len(v), -1)
            found[1], found[2] = fold_backward.kernel(
                gradient, lefts[1], v, operands[0], operands[1].contiguous(), of.places, of.shared, of.inner
            )
            return found
        whole = product_gradient(op, gradient)
        if of_small[i]:
            found[i + 1] = small_gradient(op, lefts[i], whole, by)
        if not further[i]:
            return found
        gradient = big_gradient(op, operands[i], whole, by)
        if i:
            gradient = by.regroup(gradient, hot[i - 1].shape, op.out)
    found[0] = gradient
    return found
