"""factorize: the product is the size, the factors are balanced, and a bad size is refused with a way out."""

from __future__ import annotations

import re
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kronecell as kc
from kronecell.formats.modes import IMBALANCE, SMALL, factorizes, padded_size


@given(st.integers(1, 100_000), st.integers(1, 6))
def test_factors_multiply_to_the_size_and_are_balanced_or_it_is_refused(size: int, d: int) -> None:
    if not factorizes(size, d):
        with pytest.raises(kc.ShapeError, match=str(size)):
            kc.factorize(size, d)
        return
    factors = kc.factorize(size, d)
    assert len(factors) == d and prod(factors) == size and factors == tuple(sorted(factors))
    assert d == 1 or max(factors) <= max(SMALL, IMBALANCE * size ** (1 / d))


@pytest.mark.parametrize("size", range(1, 200))
def test_no_other_factors_have_a_smaller_sum(size: int) -> None:
    if factorizes(size, 2):
        best = min(a + size // a for a in range(1, size + 1) if size % a == 0)
        assert sum(kc.factorize(size, 2)) == best


def test_the_paper_shapes() -> None:
    assert kc.factorize(57600, 4) == (15, 15, 16, 16)
    assert kc.factorize(256, 4) == (4, 4, 4, 4)
    assert kc.factorize(2304, 4) == (6, 6, 8, 8)


@pytest.mark.parametrize(("size", "d"), [(257, 4), (13, 2), (1_000_003, 4)])
def test_a_bad_size_is_refused_with_the_nearest_good_ones(size: int, d: int) -> None:
    with pytest.raises(kc.ShapeError) as caught:
        kc.factorize(size, d)
    below, above = map(int, re.search(r"that have are (\d+) and (\d+)", str(caught.value)).groups())  # type: ignore[union-attr]
    assert below < size < above == padded_size(size, d)
    assert factorizes(below, d) and factorizes(above, d)
    assert not any(factorizes(s, d) for s in range(below + 1, above))


@pytest.mark.parametrize(("size", "d"), [(0, 2), (-4, 2), (4, 0), (True, 2), (4.0, 2)])
def test_sizes_that_are_not_positive_integers_are_refused(size: int, d: int) -> None:
    with pytest.raises(kc.ShapeError, match="positive integer"):
        kc.factorize(size, d)
