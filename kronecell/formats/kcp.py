"""Kronecker CP, Eq. (kcp): KT whose factor tensors A_k, B_k are CP tensors themselves. Two operators bear the name.

`tie="all"` is Theorem 1: one branch index k over all modes, W = sum_k a_k b_k^T, matrix rank at most K.
`tie="pair"` is what Algorithms 1 and 2 compute for d > 2, and what the paper trained: k and the CP indices are summed
after every pair of modes, so W is the Kronecker product of d/2 two-mode KCPs, matrix rank at most K^(d/2).
For d <= 2 they agree. Odd d: the last mode stands alone, its CP indices are summed with ones (Algorithm 1, last step).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kronecell.errors import RankError, ShapeError
from kronecell.formats.base import Format, mode_legs
from kronecell.formats.fitting.cp import cp_fit
from kronecell.formats.fitting.options import FitOptions
from kronecell.formats.fitting.svd import nearest_kronecker, truncated_svd
from kronecell.plans.network import INPUT, Factor, Network
from kronecell.plans.order import Tree, chain


@dataclass(frozen=True)
class KCP(Format):
    """Factors A_k^(i) (m_i x CA_k) and B_k^(i) (n_i x CB_k), i = 1 ... d, k = 1 ... K.

    CA and CB are one int, or one per branch k. They may exceed the modes: the paper's own study goes to C = 100 with
    m_1 = 8. Equal ranks are stored as A{i} (K, m_i, CA); unequal ones stacked, A{i} (m_i, sum of CA).

    >>> KCP((8, 20, 20, 18), (4, 4, 4, 4), K=4, CA=4, CB=2).num_params
    1184
    """

    K: int
    CA: int | tuple[int, ...]
    CB: int | tuple[int, ...]
    tie: str = "pair"
    clip: InitVar[bool] = False

    kind: ClassVar[str] = "kcp"
    equation: ClassVar[str] = "W = sum_k A_k (x) B_k,  A_k = I . A_k1 ... A_kd,  B_k = I . B_k1 ... B_kd"
    space: ClassVar[str] = "d (m+n) r K"
    computation: ClassVar[str] = "d max(m,n)^d (r + r^2) K"
    restarts: ClassVar[int] = 4

    def __post_init__(self, clip: bool) -> None:
        self._check_modes(same_count=True)
        if self.tie not in ("pair", "all"):
            raise ShapeError(f'kcp: tie must be "pair" (Algorithms 1 and 2) or "all" (Theorem 1), got {self.tie!r}')
        m, n = self.m, self.n
        most = max(min(prod_of(m, group), prod_of(n, group)) for group in self.groups)
        self._settle_count("K", most, clip)
        for name in ("CA", "CB"):
            value = getattr(self, name)
            ranks = [*value] if isinstance(value, Sequence) and not isinstance(value, str) else [value]
            if len(ranks) not in (1, self.K):
                raise RankError(
                    f"kcp: {name} needs one rank, or one per branch (K = {self.K}), got {len(ranks)}: {value!r}"
                )
            for rank in ranks:
                if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
                    raise RankError(f"kcp: {name} must be a positive integer or one per branch k, got {value!r}")
            self._set(name, ranks[0] if len(set(ranks)) == 1 else tuple(ranks))

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Modes (from 1) that share one branch index: pairs and perhaps a last single one, or all of them."""
        modes = range(1, self.d + 1)
        return [tuple(modes)] if self.tie == "all" else [tuple(modes[i : i + 2]) for i in range(0, self.d, 2)]

    @property
    def equal_ranks(self) -> bool:
        """Whether every branch has the same CP ranks."""
        return isinstance(self.CA, int) and isinstance(self.CB, int)

    def branch_ranks(self, name: str) -> tuple[int, ...]:
        """C_k^(A) or C_k^(B), one per k; `name` is "CA" or "CB"."""
        value = getattr(self, name)
        return (value,) * self.K if isinstance(value, int) else value

    def _network(self) -> Network:
        m, n = mode_legs("m", self.m), mode_legs("n", self.n)
        sizes, factors = m | n, []
        for p, group in enumerate(self.groups, 1):
            k, a, b = f"k{p}", f"a{p}", f"b{p}"
            sizes |= {k: self.K, a: self._columns("CA"), b: self._columns("CB")}
            branch = (k,) if self.equal_ranks else ()
            factors += [Factor(f"A{i}", (*branch, f"m{i}", a)) for i in group]
            factors += [Factor(f"B{i}", (*branch, f"n{i}", b)) for i in group]
            if not self.equal_ranks:
                factors.append(Factor(f"SA{p}", (a, k), "blocks", self.branch_ranks("CA")))
                factors.append(Factor(f"SB{p}", (b, k), "blocks", self.branch_ranks("CB")))
            elif len(group) == 1:
                factors += [Factor(f"iA{p}", (a,), "ones"), Factor(f"iB{p}", (b,), "ones")]
        return Network.of(sorted(factors, key=lambda f: f.constant is not None), m, n, sizes)

    def _columns(self, name: str) -> int:
        ranks = self.branch_ranks(name)
        return ranks[0] if self.equal_ranks else sum(ranks)

    # Orders ------------------------------------------------------------------------------------------------------

    def orders(self) -> dict[str, Tree]:
        orders = {"separable": self._separable(), "algorithm1": self._algorithm1(), "algorithm2": self._algorithm2()}
        return orders | ({"naive": self._naive()} if self.tie == "all" and self.equal_ranks else {})

    def _why_no_order(self, order: str) -> str:
        if order == "naive":
            return ' (the naive strategy exists for tie="all" with equal CP ranks: it computes Theorem 1)'
        return ""

    def _constants(self, p: int, side: str) -> list[Tree]:
        """What closes the CP index of group p on one side: a selector, a vector of ones, or nothing."""
        if not self.equal_ranks:
            return [f"S{side}{p}"]
        return [f"i{side}{p}"] if len(self.groups[p - 1]) == 1 else []

    def _separable(self) -> Tree:
        """u_k and v_k first, without x; then <x, u_k> v_k. The last pair meets x first, where x is contiguous."""
        tree: Tree = INPUT
        groups = [*enumerate(self.groups, 1)]
        for p, group in reversed(groups):
            tree = (tree, chain(*(f"A{i}" for i in group), *self._constants(p, "A")))
        for p, group in groups:
            tree = (tree, chain(*(f"B{i}" for i in group), *self._constants(p, "B")))
        return tree

    def _algorithm1(self) -> Tree:
        """Strict: D^(i) = A^(i) (x) B^(i), then x meets D^(1), D^(2), ... one by one."""
        tree: Tree = INPUT
        for p, group in enumerate(self.groups, 1):
            tree = chain(tree, *((f"A{i}", f"B{i}") for i in group))
            tree = chain(tree, *self._constants(p, "A"), *self._constants(p, "B"))
        return tree

    def _algorithm2(self) -> Tree:
        """Relaxed (Theorem 2): x meets A^(1), B^(1), A^(2), B^(2), ... one by one."""
        tree: Tree = INPUT
        for p, group in enumerate(self.groups, 1):
            tree = chain(tree, *(name for i in group for name in (f"A{i}", f"B{i}")))
            tree = chain(tree, *self._constants(p, "A"), *self._constants(p, "B"))
        return tree

    def _naive(self) -> Tree:
        """Eq. (multiplication): every W^(i) keeps its own CP index, the superdiagonal kernel comes last."""
        factors = ((f"A{i}", f"B{i}") for i in range(1, self.d + 1))
        return (chain(INPUT, *factors), chain("IK", "IA", "IB"))

    def _network_for(self, order: str) -> Network:
        if order != "naive":
            return self._network()
        assert isinstance(self.CA, int) and isinstance(self.CB, int)
        m, n, d = mode_legs("m", self.m), mode_legs("n", self.n), self.d
        sizes = {
            f"{leg}{i}": size
            for leg, size in zip("kab", (self.K, self.CA, self.CB), strict=True)
            for i in range(1, d + 1)
        }
        factors = [Factor(f"A{i}", (f"k{i}", f"m{i}", f"a{i}")) for i in range(1, d + 1)]
        factors += [Factor(f"B{i}", (f"k{i}", f"n{i}", f"b{i}")) for i in range(1, d + 1)]
        kernel = [Factor(f"I{leg.upper()}", tuple(f"{leg}{i}" for i in range(1, d + 1)), "delta") for leg in "kab"]
        return Network.of([*factors, *kernel], m, n, m | n | sizes)

    # Theory ------------------------------------------------------------------------------------------------------

    def factor_matrices(self, factors: Mapping[str, Tensor]) -> list[Tensor]:
        """W^(i) = [A_1^(i) (x) B_1^(i) ... A_K^(i) (x) B_K^(i)], Eq. (W_i): (m_i n_i, sum_k CA_k CB_k), i = 1 ... d.

        By Theorem 1 their CP is W for tie="all".
        """
        matrices = []
        for i in range(1, self.d + 1):
            branches = zip(self.branches(factors[f"A{i}"], "CA"), self.branches(factors[f"B{i}"], "CB"), strict=True)
            matrices.append(torch.cat([torch.kron(A.contiguous(), B.contiguous()) for A, B in branches], dim=1))
        return matrices

    def branches(self, factor: Tensor, name: str) -> list[Tensor]:
        """The K matrices A_k^(i) (name "CA") or B_k^(i) (name "CB") inside one stored factor."""
        return [*factor] if self.equal_ranks else [*factor.split(self.branch_ranks(name), dim=1)]

    def _decompose(self, W: Tensor, options: FitOptions) -> dict[str, Tensor]:
        """Nearest Kronecker product of the groups, rank-K SVD of each, then a CP of every folded vector."""
        m, n, d = self.m, self.n, self.d
        factors: dict[str, Tensor] = {}
        rest = W.reshape(*m, *n)
        axes = [axis for group in self.groups for axis in [*(i - 1 for i in group), *(d + i - 1 for i in group)]]
        rest = rest.permute(axes)  # (m and n of the first group, of the second, ...)
        for p, group in enumerate(self.groups):
            part = rest
            if p + 1 < len(self.groups):
                part, rest = nearest_kronecker(rest, 2 * len(group))
            U, S, Vh = truncated_svd(part.reshape(prod_of(m, group), prod_of(n, group)), self.K, options.seed)
            root = S.sqrt()
            factors |= self._fold(U * root, group, "CA", "A", m, options)
            factors |= self._fold(Vh.mT * root, group, "CB", "B", n, options)
        return factors

    def _fold(
        self, vectors: Tensor, group: tuple[int, ...], name: str, letter: str, modes: Sequence[int], options: FitOptions
    ) -> dict[str, Tensor]:
        """Every column (prod of the group's modes) as a CP of rank C_k, stored the way the network has it."""
        shape = [modes[i - 1] for i in group]
        missing = self.K - vectors.shape[1]
        vectors = torch.cat([vectors, vectors.new_zeros(vectors.shape[0], missing)], 1) if missing > 0 else vectors
        branches = [
            cp_fit(vector.reshape(shape), rank, options)
            for vector, rank in zip(vectors.T, self.branch_ranks(name), strict=True)
        ]
        join = torch.stack if self.equal_ranks else lambda parts: torch.cat(parts, dim=1)
        return {f"{letter}{i}": join([branch[j] for branch in branches]) for j, i in enumerate(group)}

    @property
    def unshared(self) -> tuple[str, ...]:
        """A^(1) and B^(1), the paper's own variant; its stricter one, only A^(1), is shared=("A1",)."""
        return ("A1", "B1")


def prod_of(modes: Sequence[int], group: Sequence[int]) -> int:
    """Product of the modes (counted from 1) of a group."""
    result = 1
    for i in group:
        result *= modes[i - 1]
    return result
