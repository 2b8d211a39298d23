"""A structure plus a few free entries: W = structure + S with S sparse (Thakker et al., MLSys 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kronecell.errors import PlanError, RankError, ShapeError
from kronecell.formats.base import Format, Shared
from kronecell.formats.fitting.driver import check_matrix, relative_error
from kronecell.formats.fitting.metric import check_inputs
from kronecell.formats.fitting.options import FitOptions
from kronecell.formats.places import gaps_of, largest_places, places_of, random_places
from kronecell.ops.sparse import dense_of, sparse_linear, values_of
from kronecell.plans.network import Network
from kronecell.plans.order import Tree
from kronecell.plans.sparse import Sparse

VALUES, GAPS = "S", "S_gaps"  # names of the sparse matrix among the factors
ROUNDS = 3  # of a fit from each start: the structure of what S leaves, then S of what the structure leaves


@dataclass(frozen=True)
class Doped(Format):
    """Any format plus a sparse matrix with at most `density` of the entries, in blocks of `block` outputs.

    The network, its orders and its plans are those of the structure; x S is added to its product. A block has one index
    and is one load for a kernel: 16 where latency matters, 1 where bytes and error do.

    >>> from kronecell.formats.kt import KT
    >>> fmt = Doped(KT((8, 20), (4, 4), K=2), density=0.05)
    >>> str(fmt), fmt.num_params, fmt.sparse().index_bytes
    ('doped:0.05+kt:m=8x20,n=4x4,K=2', 320, 128)
    """

    m: tuple[int, ...] = field(init=False)
    n: tuple[int, ...] = field(init=False)
    structure: Format
    density: float = 0.02
    block: int = 1

    kind: ClassVar[str] = "doped"
    equation: ClassVar[str] = "W = structure + S, S sparse"
    space: ClassVar[str] = "structure + density (mn)^d"
    computation: ClassVar[str] = "structure + density (mn)^d"

    def __post_init__(self) -> None:
        if not isinstance(self.structure, Format) or isinstance(self.structure, Doped):
            got = type(self.structure).__name__
            raise ShapeError(f"doped: the structure must be one of the other formats, such as kc.TT(...), got {got}")
        if isinstance(self.density, bool) or not isinstance(self.density, (int, float)) or not 0 <= self.density <= 1:
            raise RankError(f"doped: density must be a share of the entries from 0 to 1, got {self.density!r}")
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise RankError(f"doped: block must be a positive number of outputs, got {self.block!r}")
        if self.structure.N % self.block:
            raise RankError(
                f"doped: block = {self.block} must divide the outputs, N = {self.structure.N}; use a divisor, or 1"
            )
        self._set("m", self.structure.m)
        self._set("n", self.structure.n)
        self._set("density", float(self.density))

    # The structure, and S ----------------------------------------------------------------------------------------

    def sparse(self, gates: int = 1) -> Sparse:
        return Sparse.of(gates * self.N, self.M, self.density, self.block)

    def _network(self) -> Network:
        return self.structure._network()

    def _network_for(self, order: str) -> Network:
        return self.structure._network_for(order)

    def _why_no_order(self, order: str) -> str:
        return self.structure._why_no_order(order)

    def orders(self) -> dict[str, Tree]:
        return self.structure.orders()

    @property
    def unshared(self) -> tuple[str, ...]:
        return self.structure.unshared

    def macs(self, order: str | Tree | None = None) -> int:
        """Those of the structure, and one for every entry of S."""
        return self.structure.macs(order) + self.sparse().num_values

    # Tensors -----------------------------------------------------------------------------------------------------

    def to_dense(self, factors: Mapping[str, Tensor], *, gates: int = 1, shared: Shared = False) -> Tensor:
        W = self.structure.to_dense(factors, gates=gates, shared=shared)
        return W + self._dense(factors, gates).reshape(W.shape)

    def _dense(self, factors: Mapping[str, Tensor], gates: int) -> Tensor:
        """S as (gates, M, N)."""
        values, places = self._stored(factors, gates)
        S = dense_of(values, places, gates * self.N, self.M)
        return S.reshape(gates, self.N, self.M).transpose(1, 2)

    def _stored(self, factors: Mapping[str, Tensor], gates: int) -> tuple[Tensor, Tensor]:
        """The values of S and their places."""
        sparse = self.sparse(gates)
        expected = {VALUES: (sparse.count, sparse.block), GAPS: (sparse.count,)}
        for name, shape in expected.items():
            got = None if name not in factors else tuple(factors[name].shape)
            if got != shape:
                raise ShapeError(f"factor {name!r} of {self} must have shape {shape}, got {got}; see Doped.init")
        return factors[VALUES], places_of(factors[GAPS], sparse)

    def matmul(
        self,
        x: Tensor,
        factors: Mapping[str, Tensor],
        order: str | Tree | None = None,
        *,
        gates: int = 1,
        shared: Shared = False,
    ) -> Tensor:
        y = self.structure.matmul(x, factors, order, gates=gates, shared=shared)
        values, places = self._stored(factors, gates)
        if not len(places):
            return y
        flat: Tensor = sparse_linear(
            x.reshape(-1, self.M), values, places, gates * self.N, y.reshape(-1, gates * self.N)
        )
        return flat.reshape(y.shape)

    def init(
        self,
        generator: torch.Generator | None = None,
        *,
        std: float | None = None,
        gates: int = 1,
        shared: Shared = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> dict[str, Tensor]:
        """Random factors of the structure; S has zeros, at random places."""
        factors = self.structure.init(generator, std=std, gates=gates, shared=shared, dtype=dtype, device=device)
        sparse = self.sparse(gates)
        factors[VALUES] = torch.zeros(
            sparse.count, sparse.block, dtype=dtype or torch.get_default_dtype(), device=device
        )
        factors[GAPS] = gaps_of(random_places(sparse, generator), sparse).to(device=device)
        return factors

    # Fitting -----------------------------------------------------------------------------------------------------

    def _decompose(self, W: Tensor, options: FitOptions) -> dict[str, Tensor]:
        raise PlanError("a doped format is fitted by from_dense alone")  # which does not come here

    def from_dense(
        self, W: Tensor, *, gates: int = 1, shared: Shared = False, inputs: Tensor | None = None, **options: Any
    ) -> tuple[dict[str, Tensor], float]:
        """As of every format: the structure of what S leaves, then S of what the structure leaves, alternating.

        Two starts, the structure of W itself and that of W without its largest entries; the best of all rounds is kept.
        With calibration inputs an entry counts as much as its input is large.
        """
        check_matrix(self, W, gates)
        sparse = self.sparse(gates)
        weight = self._weight(W, inputs)
        rounds = ROUNDS if options.get("refine", True) and sparse.count else 1
        best: tuple[dict[str, Tensor], float] | None = None
        with torch.no_grad():
            for first in (torch.zeros_like(W), W)[: 2 if rounds > 1 else 1]:
                entries = self._largest(first, sparse, weight)
                for _ in range(rounds):
                    rest = W - self._dense(entries, gates).reshape(W.shape)
                    factors, _ = self.structure.from_dense(rest, gates=gates, shared=shared, inputs=inputs, **options)
                    rest = W - self.structure.to_dense(factors, gates=gates, shared=shared)
                    entries = self._largest(rest, sparse, weight)
                    factors |= entries
                    error = relative_error(self, W, factors, gates, shared, inputs)
                    if best is None or error < best[1]:
                        best = factors, error
            assert best is not None
            return best[0], best[1] if inputs is None else relative_error(self, W, best[0], gates, shared, None)

    def rest(self, W: Tensor, gates: int = 1, inputs: Tensor | None = None) -> Tensor:
        """What the entries that S would keep leave of W (M, N) or (gates, M, N), which a structure has left."""
        weight = self._weight(W, inputs)
        return W - self._dense(self._largest(W, self.sparse(gates), weight), gates).reshape(W.shape)

    def _weight(self, W: Tensor, inputs: Tensor | None) -> Tensor | None:
        """How large every input is."""
        return None if inputs is None else check_inputs(inputs, self.M).square().mean(0).sqrt().to(W)

    def _largest(self, W: Tensor, sparse: Sparse, weight: Tensor | None) -> dict[str, Tensor]:
        """The entries of W (M, N) or (gates, M, N) that are largest, times the weight of their input."""
        rows = W.reshape(-1, self.M, self.N).transpose(1, 2).reshape(-1, self.M)
        everywhere = torch.arange(sparse.places, device=W.device)
        sizes = values_of(rows if weight is None else rows * weight, everywhere, self.block).square().sum(1)
        places = largest_places(sizes, sparse)
        return {VALUES: values_of(rows, places, self.block), GAPS: gaps_of(places, sparse)}

    # Text --------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return f"{doping_text(self.density, self.block)}{self.structure}"


def doping_text(density: float, block: int) -> str:
    """What precedes the text of the structure."""
    return f"doped:{density!r}{f',block={block}' if block > 1 else ''}+"
