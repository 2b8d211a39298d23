"""What a format is.

+---------------------------------------------------------------------------------------------------+
| To add a format, write one file with one frozen dataclass that defines:                            |
|   kind, equation, space, computation   its name and the three lines `kronecell formats` prints     |
|   _network()     the tensor network: factors with named legs, and the size of every leg           |
|   orders()       contraction orders by name; the first is the default                             |
|   unshared       the factors that keep one copy per gate under weight sharing                     |
|   _decompose()   closed-form factors of a given W: the start that `from_dense` refines             |
| Parameters, multiply-adds, products, gradients, gates, sharing, initialisation, dense matrices and  |
| file names follow from these.                                                                      |
+---------------------------------------------------------------------------------------------------+
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from kronecell.errors import PlanError, RankError, ShapeError
from kronecell.formats.fitting.driver import fit_dense, relative_error
from kronecell.formats.fitting.options import FitOptions
from kronecell.ops.contract import check_tensor
from kronecell.ops.execute import contract_network, execute
from kronecell.plans.network import Network
from kronecell.plans.order import Tree, greedy, optimal
from kronecell.plans.plan import Plan
from kronecell.plans.sparse import Sparse

Shared = bool | Iterable[str]


@dataclass(frozen=True)
class Format(ABC):
    """A way to store W (M x N), M = prod(m), N = prod(n); acts as x @ W. C order: the last mode is the fastest."""

    m: tuple[int, ...]
    n: tuple[int, ...]

    kind: ClassVar[str]
    equation: ClassVar[str]
    space: ClassVar[str]
    computation: ClassVar[str]
    optimal_start: ClassVar[bool] = False  # whether _decompose is already the best there is
    restarts: ClassVar[int] = 0  # random starts that from_dense tries besides _decompose

    # What a format must define -----------------------------------------------------------------------------------

    @abstractmethod
    def _network(self) -> Network:
        """Factors and leg sizes for one gate."""

    @abstractmethod
    def orders(self) -> dict[str, Tree]:
        """Contraction orders by name; the first is the default. "optimal" exists for every format besides these."""

    @property
    @abstractmethod
    def unshared(self) -> tuple[str, ...]:
        """Factors that keep one copy per gate when weights are shared as the paper shares them."""

    @abstractmethod
    def _decompose(self, W: Tensor, options: FitOptions) -> dict[str, Tensor]:
        """Factors of W (M, N) for one gate, in closed form."""

    def _decompose_seen(self, W: Tensor, L: Tensor, options: FitOptions) -> dict[str, Tensor] | None:
        """Factors that minimise |L (W - W')|, for formats that have a closed form for it."""
        return None

    # What follows ------------------------------------------------------------------------------------------------

    @property
    def M(self) -> int:
        """Input width."""
        return prod(self.m)

    @property
    def N(self) -> int:
        """Output width of one gate."""
        return prod(self.n)

    @property
    def d(self) -> int:
        """Number of modes (of the longer side where they differ)."""
        return max(len(self.m), len(self.n))

    def sparse(self, gates: int = 1) -> Sparse | None:
        """The sparse matrix that is added to the network's, if there is one."""
        return None

    def params(self, gates: int = 1, shared: Shared = False) -> int:
        """Trained numbers for a number of gates."""
        sparse = self.sparse(gates)
        return self.network(gates, shared).num_params + (0 if sparse is None else sparse.num_values)

    @property
    def num_params(self) -> int:
        """Trained numbers for one gate."""
        return self.params()

    @property
    def compression_ratio(self) -> float:
        """M * N over the number of parameters."""
        return self.M * self.N / self.num_params

    def network(self, gates: int = 1, shared: Shared = False) -> Network:
        """The network for a number of gates; `shared` is False, True (as the paper) or the unshared factors' names."""
        return self._network().with_gates(gates, self._gated(shared))

    def _gated(self, shared: Shared) -> tuple[str, ...] | None:
        """Names that get a gate leg; None means all."""
        if isinstance(shared, bool):
            return self.unshared if shared else None
        return (shared,) if isinstance(shared, str) else tuple(shared)

    def _network_for(self, order: str) -> Network:
        """The network an order is written for; a format may have an order on an equivalent network."""
        return self._network()

    def plan(self, order: str | Tree | None = None, rows: int = 1, *, gates: int = 1, shared: Shared = False) -> Plan:
        """The plan of a named order, of "optimal" for this number of rows, or of an explicit tree of names."""
        orders = self.orders()
        if order is None:
            order = next(iter(orders))
        if not isinstance(order, str):
            return Plan(self.network(gates, shared), order, rows)
        if order == "optimal":
            network = self.network(gates, shared)
            return Plan(network, optimal(network, rows), rows, "optimal")
        if order not in orders:
            raise PlanError(
                f"{self.kind} has no order {order!r}; expected one of {', '.join([*orders, 'optimal'])}"
                + self._why_no_order(order)
            )
        network = self._network_for(order).with_gates(gates, self._gated(shared))
        return Plan(network, orders[order], rows, order)

    def _why_no_order(self, order: str) -> str:
        return ""

    def macs(self, order: str | Tree | None = None) -> int:
        """Multiply-adds for one row of x and one gate, hoisted work excluded."""
        return self.plan(order).macs

    def to_dense(self, factors: Mapping[str, Tensor], *, gates: int = 1, shared: Shared = False) -> Tensor:
        """W (M, N), or (gates, M, N) for more than one gate."""
        network = self.network(gates, shared).as_dense()
        tensor = contract_network(Plan(network, optimal(network), order="dense"), factors)
        return tensor.reshape((self.M, self.N) if gates == 1 else (gates, self.M, self.N))

    def matmul(
        self,
        x: Tensor,
        factors: Mapping[str, Tensor],
        order: str | Tree | None = None,
        *,
        gates: int = 1,
        shared: Shared = False,
    ) -> Tensor:
        """x (..., M) @ W without forming W: (..., gates * N), gate-major."""
        rows = check_tensor(x, "x").numel() // self.M
        return execute(self.plan(order, max(1, rows), gates=gates, shared=shared), x, factors)

    def from_dense(
        self,
        W: Tensor,
        *,
        gates: int = 1,
        shared: Shared = False,
        inputs: Tensor | None = None,
        **options: Any,
    ) -> tuple[dict[str, Tensor], float]:
        """Factors whose matrix is close to W (M, N), or (gates, M, N), and |W - W'| / |W|.

        Unshared gates are fitted one by one, shared ones jointly. With calibration `inputs` X (..., M) the fit
        minimises |X (W - W')| instead; `error` measures both. The options are those of `FitOptions`: refine, sweeps,
        joint, tolerance, starts, seed, max_memory, progress.
        """
        unknown = sorted(set(options) - {f.name for f in fields(FitOptions)})
        if unknown:
            known = ", ".join(f.name for f in fields(FitOptions))
            raise RankError(f"from_dense has no option {', '.join(unknown)}; expected {known}")
        return fit_dense(self, W, gates, shared, inputs, FitOptions(**options))

    def error(
        self,
        W: Tensor,
        factors: Mapping[str, Tensor],
        *,
        gates: int = 1,
        shared: Shared = False,
        inputs: Tensor | None = None,
    ) -> float:
        """|W - W'| / |W|, or with inputs |X (W - W')| / |X W|."""
        return relative_error(self, W, factors, gates, shared, inputs)

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
        """Random factors whose dense matrix has entries of the given rms, exactly, for every gate.

        The default std, 1 / sqrt(3 N), is that of nn.LSTM. Products of many Gaussian factors are heavy-tailed: each
        factor is first given unit-rms columns, and the network's Frobenius norm is then set exactly, the correction
        spread evenly over the factors.
        """
        network = self.network(gates, shared)
        dtype = dtype or torch.get_default_dtype()
        std = (3 * self.N) ** -0.5 if std is None else std
        outer = {*network.inputs, *network.outputs}
        work = torch.float64 if dtype == torch.float64 else torch.float32
        source = generator.device if generator is not None else torch.device("cpu")
        factors = {}
        for factor in network.parameters:
            tensor = torch.randn(network.shapes[factor.name], generator=generator, dtype=work, device=source)
            columns = [i for i, leg in enumerate(factor.legs) if leg in outer and leg != "g"]
            if prod(tensor.shape[i] for i in columns) > 1:  # a column of one number would become +-1, and sums cancel
                tensor /= tensor.square().mean(columns, keepdim=True).sqrt().clamp_min(torch.finfo(work).tiny)
            factors[factor.name] = tensor
        norms = self._squared_norm(network, factors).sqrt().reshape(-1)
        scales = std * (self.M * self.N) ** 0.5 / norms
        common = scales.log().mean().exp()
        for tensor in factors.values():
            tensor *= common ** (1 / len(factors))
        gated = next((f.name for f in network.parameters if f.legs[0] == "g"), next(iter(factors)))
        factors[gated] *= (scales / common).to(work).reshape(-1, *[1] * (factors[gated].ndim - 1))
        return {name: tensor.to(dtype=dtype, device=device) for name, tensor in factors.items()}

    @torch.no_grad()
    def rms(self, factors: Mapping[str, Tensor], *, gates: int = 1, shared: Shared = False) -> float:
        """Root mean square of the entries of W, over all gates; W is not formed."""
        squares = self._squared_norm(self.network(gates, shared), factors)
        return float((squares.mean() / (self.M * self.N)).sqrt())

    @staticmethod
    def _squared_norm(network: Network, factors: Mapping[str, Tensor]) -> Tensor:
        """Squared Frobenius norm of the dense matrix, one per gate, without forming it."""
        if len(network.factors) == 1:
            (tensor,) = factors.values()
            gated = network.factors[0].legs[0] == "g"
            rows = tensor.reshape(tensor.shape[0], -1) if gated else tensor.reshape(1, -1)
            return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()
        doubled = {name: tensor.double() for name, tensor in factors.items()}
        doubled |= {f"{name}'": tensor for name, tensor in doubled.items()}
        squared = network.squared()
        return contract_network(Plan(squared, greedy(squared), order="norm"), doubled)

    # Text --------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.default is not MISSING and value == field.default:
                continue
            parts.append(f"{field.name}={_text(value, always_full=field.name in 'mn')}")
        return f"{self.kind}:{','.join(parts)}"

    # Validation, for the subclasses' __post_init__ ---------------------------------------------------------------

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_modes(self, same_count: bool) -> None:
        """Modes become tuples of positive ints; `same_count` when mode i of the input meets mode i of the output."""
        for name in ("m", "n"):
            value = getattr(self, name)
            modes = (value,) if _is_int(value) else tuple(value) if isinstance(value, Sequence) else None
            if not modes or not all(_is_int(mode) and mode >= 1 for mode in modes) or isinstance(value, str):
                raise ShapeError(
                    f"{self.kind}: {name} must be a tuple of positive integers such as (8, 20), got {value!r}"
                )
            self._set(name, tuple(int(mode) for mode in modes))
        if same_count and len(self.m) != len(self.n):
            raise ShapeError(
                f"{self.kind}: m and n need the same number of modes, got {len(self.m)} (m={self.m}) and "
                f"{len(self.n)} (n={self.n}); pad the shorter with modes of size 1"
            )

    def _settle_ranks(self, name: str, legs: Sequence[str], clip: bool) -> None:
        """Rank `name` becomes a tuple, one per leg, each at most what the network can use."""
        given = getattr(self, name)
        ranks = [given] * len(legs) if _is_int(given) else [*given] if isinstance(given, Sequence) else [given]
        if isinstance(given, str) or not all(_is_int(rank) and rank >= 1 for rank in ranks):
            raise RankError(f"{self.kind}: {name} must be a positive integer or a tuple of them, got {given!r}")
        if len(ranks) != len(legs):
            raise RankError(
                f"{self.kind}: {name} needs {len(legs)} ranks ({', '.join(legs) or 'none'}), "
                f"got {len(ranks)}: {given!r}"
            )
        self._set(name, tuple(int(rank) for rank in ranks))
        changed = True
        while changed:
            changed = False
            network = self._network()
            for i, leg in enumerate(legs):
                limit = largest_bond(network, leg)
                if ranks[i] > limit:
                    self._too_large(f"{name}[{i}] ({leg})" if len(legs) > 1 else name, ranks[i], limit, clip)
                    ranks[i] = limit
                    self._set(name, tuple(ranks))
                    changed = True
                    break

    def _too_large(self, what: str, rank: int, limit: int, clip: bool) -> None:
        if not clip:
            raise RankError(
                f"{self.kind}: rank {what} = {rank} is larger than the network can use; the largest feasible value is "
                f"{limit}. Lower it, or pass clip=True to have it clipped"
            )

    def _settle_count(self, name: str, limit: int | None, clip: bool) -> None:
        """A single rank or number of terms, at most `limit`."""
        value = getattr(self, name)
        if not _is_int(value) or value < 1:
            raise RankError(f"{self.kind}: {name} must be a positive integer, got {value!r}")
        if limit is not None and value > limit:
            self._too_large(name, value, limit, clip)
            value = limit
        self._set(name, int(value))


def largest_bond(network: Network, leg: str) -> int:
    """Beyond this size a bond between two factors adds nothing: one end could be reduced by a QR decomposition."""
    ends = [f for f in network.factors if leg in f.legs]
    common = set(ends[0].legs).intersection(*(f.legs for f in ends[1:]))
    return min(prod(network.sizes[other] for other in f.legs if other not in common) for f in ends)


def mode_legs(letter: str, modes: Sequence[int]) -> dict[str, int]:
    """("m", (8, 20)) -> {"m1": 8, "m2": 20}."""
    return {f"{letter}{i}": size for i, size in enumerate(modes, 1)}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: Any, always_full: bool) -> str:
    if not isinstance(value, tuple):
        return str(value)
    if not always_full and len(set(value)) <= 1:
        return str(value[0] if value else 1)
    return "x".join(map(str, value))
