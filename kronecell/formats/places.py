"""Where the entries of a sparse matrix are: places as gaps, places drawn at random, places of the largest entries."""

from __future__ import annotations

import torch
from torch import Tensor

from kronecell.errors import ShapeError
from kronecell.plans.sparse import Sparse

DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def gaps_of(places: Tensor, sparse: Sparse) -> Tensor:
    """Ascending places as the distance of each from the one before, in the width of their indices."""
    return torch.diff(places, prepend=places.new_full((1,), -1)).to(DTYPES[sparse.gap_bytes])


def places_of(gaps: Tensor, sparse: Sparse) -> Tensor:
    """The places (int64) that gaps stand for; refuses gaps that lead out of the matrix."""
    places = gaps.to(torch.int64).cumsum(0) - 1
    if gaps.is_meta or not len(gaps):
        return places
    if int(gaps.min()) < 1 or int(places[-1]) >= sparse.places:
        raise ShapeError(
            f"the indices of a sparse matrix lead out of it: expected gaps of 1 or more that add up to at most "
            f"{sparse.places}, got a least gap of {int(gaps.min())} and a sum of {int(places[-1]) + 1}"
        )
    return places


def random_places(sparse: Sparse, generator: torch.Generator | None = None) -> Tensor:
    """One place in each of as many parts of the matrix, so that no gap is too long."""
    source = generator.device if generator is not None else torch.device("cpu")
    bounds = torch.arange(sparse.count + 1, device=source) * sparse.places // max(sparse.count, 1)
    first, sizes = bounds[:-1], bounds.diff()
    chance = torch.rand(sparse.count, generator=generator, dtype=torch.float64, device=source)
    return first + (chance * sizes).to(torch.int64).clamp_max(sizes - 1)


def largest_places(sizes: Tensor, sparse: Sparse) -> Tensor:
    """The places of the largest blocks, ascending, given the size of every block (places,).

    Where the next large one is further away than an index can say, entries between them are kept, too.
    """
    if sparse.count == sparse.places:
        return torch.arange(sparse.places, device=sizes.device)
    longest = sparse.longest_gap
    largest = _largest(sizes, sparse.count)
    if not len(_between(largest, longest)):
        return largest
    order = _largest(sizes, min(2 * sparse.count, len(sizes)))  # at least `count` beside those that are kept between
    order = order[sizes[order].argsort(descending=True, stable=True)]
    low, high = 0, sparse.count  # of the largest, how many fit beside those that are needed between them
    while low < high:
        middle = (low + high + 1) // 2
        if middle + len(_between(order[:middle].sort().values, longest)) <= sparse.count:
            low = middle
        else:
            high = middle - 1
    chosen = order[:low].sort().values
    kept = torch.zeros_like(sizes, dtype=torch.bool)
    kept[chosen] = True
    kept[_between(chosen, longest)] = True
    rest = sparse.count - int(kept.sum())
    if rest:
        kept[order[~kept[order]][:rest]] = True
    return kept.nonzero().squeeze(1)


def _largest(sizes: Tensor, count: int) -> Tensor:
    """The places of the largest, ascending; of equal ones the first. A sort would take ten times as long."""
    if not count:
        return torch.empty(0, dtype=torch.int64, device=sizes.device)
    least = sizes.kthvalue(len(sizes) - count + 1).values
    chosen = sizes > least
    equal = (sizes == least).nonzero().squeeze(1)
    chosen[equal[: count - int(chosen.sum())]] = True
    return chosen.nonzero().squeeze(1)


def _between(places: Tensor, longest: int) -> Tensor:
    """Places, as few as possible, that leave no gap longer than `longest`."""
    before = torch.cat([places.new_full((1,), -1), places])[:-1]
    counts = (places - before - 1) // longest
    starts = before.repeat_interleave(counts)
    ends = counts.cumsum(0)
    number = torch.arange(len(starts), device=places.device) - (ends - counts).repeat_interleave(counts)
    return starts + (number + 1) * longest
