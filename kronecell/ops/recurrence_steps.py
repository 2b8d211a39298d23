"""What the recurrences of LSTM and GRU share: the order of their steps, the states before them, products with U."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Optional = Tensor | None


# Steps ------------------------------------------------------------------------------------------------------------


def steps_of(rows: int, batch: int, batch_sizes: Optional, reverse: bool) -> list[tuple[int, int]]:
    """First row and number of rows of every step, in the order in which they run."""
    sizes = [batch] * (rows // max(batch, 1)) if batch_sizes is None else batch_sizes.tolist()
    steps, first = [], 0
    for size in sizes:
        steps.append((first, size))
        first = first + size  # torch.jit.trace counts in tensors, which += would change in the step before
    return steps[::-1] if reverse else steps


def flat_rows(tensor: Tensor, batch_sizes: Optional) -> Tensor:
    """(T, B, n) as (T * B, n); packed data already has this form."""
    return tensor.reshape(-1, tensor.shape[-1]) if batch_sizes is None else tensor


def advanced(state: Tensor, rows: Tensor) -> Tensor:
    """The state after a step that only the first rows of the batch take."""
    return rows if len(rows) == len(state) else torch.cat([rows, state[len(rows) :]])


def gather(parts: Sequence[Tensor], reverse: bool, like: Tensor, width: int) -> Tensor:
    """Rows of all steps in the order of the input."""
    if not parts:
        return like.new_empty(0, width)
    return torch.cat(list(parts[::-1] if reverse else parts))


def states_before(states: Tensor, first_state: Tensor, steps: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """The state that each step started from, for steps in the order in which they ran."""
    previous, size_before = 0, 0
    for first, size in steps:
        some = min(size, size_before)
        yield torch.cat([states[previous : previous + some], first_state[some:size]])
        previous, size_before = first, size


def all_before(states: Tensor, first_state: Tensor, steps: Sequence[tuple[int, int]], reverse: bool) -> Tensor:
    """The same for all rows, in the order of the input."""
    return gather([*states_before(states, first_state, steps)], reverse, states, states.shape[1])


# Products with U --------------------------------------------------------------------------------------------------


def product(h: Tensor, hidden: Sequence[Tensor]) -> Tensor:
    """h U^T for U as [U], [In, Out] or [In, Out, S], a sum."""
    if len(hidden) == 1:
        return h @ hidden[0].t()
    narrow, Out = h @ hidden[0].t(), hidden[1]
    wide = narrow @ Out if Out.dim() == 2 else _by_gate(narrow, Out)
    return wide if len(hidden) == 2 else wide + h @ hidden[2].t()


def _by_gate(x: Tensor, factors: Tensor) -> Tensor:
    """Each gate's columns of x (rows, gates * a) times its own matrix of (gates, a, b)."""
    gates, a, b = factors.shape
    return (x.reshape(-1, gates, a).transpose(0, 1) @ factors).transpose(0, 1).reshape(len(x), gates * b)


def _to_narrow(upstream: Tensor, Out: Tensor) -> Tensor:
    """The gradient of h In^T."""
    return upstream @ Out.t() if Out.dim() == 2 else _by_gate(upstream, Out.transpose(1, 2))


def product_back(upstream: Tensor, hidden: Sequence[Tensor]) -> Tensor:
    """The gradient of h in h U^T."""
    if len(hidden) == 1:
        return upstream @ hidden[0]
    back = _to_narrow(upstream, hidden[1]) @ hidden[0]
    return back if len(hidden) == 2 else back + upstream @ hidden[2]


def hidden_gradients(upstream: Tensor, before: Tensor, hidden: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The gradients of U and nothing, or In and Out, from those of all rows of h U^T and the states h before them."""
    if len(hidden) == 1:
        return upstream.t() @ before, nothing(before)
    In, Out, *_ = hidden
    narrow = before @ In.t()
    if Out.dim() == 2:
        of_out = narrow.t() @ upstream
    else:
        gates, r, size = Out.shape
        of_out = narrow.reshape(-1, gates, r).permute(1, 2, 0) @ upstream.reshape(-1, gates, size).transpose(0, 1)
    return _to_narrow(upstream, Out).t() @ before, of_out


def hidden_fake(hidden: Sequence[Tensor], weights: bool) -> tuple[Tensor, Tensor]:
    """The fake of hidden_gradients: tensors of the same shapes."""
    made = [part.new_empty(part.shape) if weights else nothing(part) for part in hidden]
    return made[0], made[1] if len(made) > 1 else nothing(hidden[0])


def nothing(like: Tensor) -> Tensor:
    """In place of a result that is not wanted."""
    return like.new_empty(0)


def kept(parts: Sequence[Tensor], keep: bool, gates: Tensor, reverse: bool, width: int) -> Tensor:
    if not keep:
        return nothing(gates)
    return gather(parts, reverse, gates, width).reshape(*gates.shape[:-1], width)
