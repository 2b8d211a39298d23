"""Balanced modes: a width written as a product of d factors of about the same size."""

from __future__ import annotations

from functools import lru_cache
from itertools import count

from kronecell.errors import ShapeError

SMALL = 8  # a factor up to this size is never too large
IMBALANCE = 3.0  # the largest factor may be this many times the d-th root of the size


def factorize(size: int, d: int) -> tuple[int, ...]:
    """d factors, ascending, whose product is `size`, with the smallest possible sum (the sum is what cores cost).

    A size without balanced factors, such as a large prime, is refused with the nearest sizes that have them.

    >>> factorize(57600, 4)
    (15, 15, 16, 16)
    """
    _check(size, d)
    factors = _smallest_sum(size, d, 1)
    if factors is None or not _balanced(factors, size, d):
        below = next((s for s in range(size - 1, 0, -1) if factorizes(s, d)), 1)
        above = padded_size(size, d)
        shown = "x".join(map(str, factors or (size,)))
        raise ShapeError(
            f"size {size} has no {d} balanced factors (the best are {shown}); the nearest sizes that have are {below} "
            f"and {above}: change the layer, pad its input with zeros to {above}, choose another number of modes, "
            f"or give the modes yourself"
        )
    return factors


def factorizes(size: int, d: int) -> bool:
    """Whether `factorize` accepts this size."""
    factors = _smallest_sum(size, d, 1)
    return factors is not None and _balanced(factors, size, d)


def padded_size(size: int, d: int) -> int:
    """The smallest size, at least `size`, that factorises well: what zero-padding needs.

    >>> padded_size(257, 4)
    264
    """
    _check(size, d)
    return next(s for s in count(size) if factorizes(s, d))


def _check(size: int, d: int) -> None:
    for name, value in (("size", size), ("d", d)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ShapeError(f"factorize: {name} must be a positive integer, got {value!r}")


def _balanced(factors: tuple[int, ...], size: int, d: int) -> bool:
    return d == 1 or max(factors) <= max(SMALL, IMBALANCE * size ** (1 / d))


@lru_cache(maxsize=4096)
def divisors(size: int) -> tuple[int, ...]:
    """Every divisor, ascending."""
    small = [f for f in range(1, int(size**0.5) + 1) if size % f == 0]
    return tuple(sorted({*small, *(size // f for f in small)}))


@lru_cache(maxsize=65536)
def _smallest_sum(size: int, d: int, least: int) -> tuple[int, ...] | None:
    """d ascending factors, none below `least`; None when there are none."""
    if d == 1:
        return (size,) if size >= least else None
    best: tuple[int, ...] | None = None
    for factor in divisors(size):
        if factor < least:
            continue
        if factor**d > size:  # the factors ascend, so the rest could not be as large
            break
        rest = _smallest_sum(size // factor, d - 1, factor)
        if rest is not None and (best is None or factor + sum(rest) < sum(best)):
            best = (factor, *rest)
    return best
