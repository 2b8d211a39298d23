"""Hierarchical Tucker on a balanced binary tree, Eq. (ht) of the paper, for any number of modes."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import ClassVar

from torch import Tensor

from kronecell.formats.base import Format, mode_legs
from kronecell.formats.fitting.options import FitOptions
from kronecell.formats.fitting.tucker import joint_modes, project_axis
from kronecell.plans.network import INPUT, Factor, Network
from kronecell.plans.order import Tree, chain

Span = tuple[int, int]  # modes lo ... hi, both included, counted from 1


@dataclass(frozen=True)
class HT(Format):
    """Leaves U_i (m_i n_i x r_i), transfers B_lo_hi (r_left x r_right x r_lo_hi), the root without a parent rank.

    r lists the leaves' ranks r_1 ... r_d, then those of the inner nodes from left to right, the root excepted.
    Odd spans put the larger half on the left. The paper counts the root as r^3 parameters; here it counts r^2,
    as stored.

    >>> HT((8, 20, 20, 18), (4, 4, 4, 4), r=4).num_params
    1200
    """

    r: int | tuple[int, ...]
    clip: InitVar[bool] = False

    kind: ClassVar[str] = "ht"
    equation: ClassVar[str] = "W = U_1 . B_12 . U_2 . B_1234 . U_3 . B_34 . U_4  (balanced tree, any d)"
    space: ClassVar[str] = "(d-1) r^3 + d mn r"
    computation: ClassVar[str] = "(2d-1) max(m,n)^(d+1) r^(1+log2 d)"

    def __post_init__(self, clip: bool) -> None:
        self._check_modes(same_count=True)
        self._settle_ranks("r", self.rank_legs, clip)

    @property
    def rank_legs(self) -> list[str]:
        """Names of the ranks in the order of `r`."""
        if self.d == 1:
            return []
        leaves = [_rank((i, i)) for i in range(1, self.d + 1)]
        return leaves + [_rank(span) for span in self.inner_spans if span != (1, self.d)]

    @property
    def inner_spans(self) -> list[Span]:
        """Inner nodes of the tree, left to right (in-order)."""
        return [span for span in _inorder((1, self.d)) if span[0] < span[1]]

    def _network(self) -> Network:
        assert isinstance(self.r, tuple)
        m, n = mode_legs("m", self.m), mode_legs("n", self.n)
        ranks = dict(zip(self.rank_legs, self.r, strict=True))
        root = (1, self.d)
        factors = []
        for i in range(1, self.d + 1):
            factors.append(Factor(f"U{i}", (f"m{i}", f"n{i}", *([_rank((i, i))] if self.d > 1 else []))))
        for span in self.inner_spans:
            left, right = halves(span)
            up = () if span == root else (_rank(span),)
            factors.append(Factor(_name(span), (_rank(left), _rank(right), *up)))
        return Network.of(factors, m, n, m | n | ranks)

    def orders(self) -> dict[str, Tree]:
        return {"inorder": chain(INPUT, *(_name(span) for span in _inorder((1, self.d))))}

    def _decompose(self, W: Tensor, options: FitOptions) -> dict[str, Tensor]:
        """Hierarchical SVD (Grasedyck 2010), leaves first, each node on the core its children left."""
        core = joint_modes(W, self.m, self.n)
        if self.d == 1:
            return {"U1": W.reshape(*self.m, *self.n)}
        ranks = dict(zip(self.rank_legs, self.r, strict=True)) if isinstance(self.r, tuple) else {}
        factors, nodes = {}, [(i, i) for i in range(1, self.d + 1)]
        for axis, (m, n) in enumerate(zip(self.m, self.n, strict=True)):
            rank = ranks[_rank((axis + 1, axis + 1))]
            core, basis = project_axis(core, axis, rank, options.seed)
            factors[f"U{axis + 1}"] = basis.reshape(m, n, rank)
        for span in sorted(self.inner_spans, key=lambda span: span[1] - span[0])[:-1]:  # the root stays
            axis = nodes.index(halves(span)[0])
            shape = core.shape
            merged = core.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
            core, basis = project_axis(merged, axis, ranks[_rank(span)], options.seed)
            factors[_name(span)] = basis.reshape(shape[axis], shape[axis + 1], -1)
            nodes[axis : axis + 2] = [span]
        return {**factors, _name((1, self.d)): core}

    @property
    def unshared(self) -> tuple[str, ...]:
        return ("U1",)


def halves(span: Span) -> tuple[Span, Span]:
    """The two children of an inner node."""
    lo, hi = span
    middle = (lo + hi) // 2
    return (lo, middle), (middle + 1, hi)


def _inorder(span: Span) -> list[Span]:
    if span[0] == span[1]:
        return [span]
    left, right = halves(span)
    return [*_inorder(left), span, *_inorder(right)]


def _name(span: Span) -> str:
    return f"U{span[0]}" if span[0] == span[1] else f"B{span[0]}_{span[1]}"


def _rank(span: Span) -> str:
    return f"r{span[0]}" if span[0] == span[1] else f"r{span[0]}_{span[1]}"
