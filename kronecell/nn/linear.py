"""TensorLinear: a format and its parameters as a module, y = x W + b without ever forming W."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from kronecell.errors import PlanError, ShapeError
from kronecell.formats import Format, Shared, parse
from kronecell.formats.doped import GAPS, VALUES
from kronecell.nn.layer_plans import (
    Sharing,
    chosen_plan,
    dense_text,
    described,
    one_product,
    plan_text,
    product_of,
    split_text,
)
from kronecell.nn.products import FEW_ROWS, dense_product, few_rows_product, is_few
from kronecell.nn.sparse import SparseMatrix, added
from kronecell.nn.splitting import matrices_of
from kronecell.ops import flops as flops  # registers what FlopCounterMode counts
from kronecell.ops.choose import Product
from kronecell.ops.contract import (
    apply,
    check_device,
    check_dtype,
    check_tensor,
    contract_text,
    gradients_follow,
    operand_count,
    prepare,
)
from kronecell.ops.tune import choices, explain
from kronecell.plans.order import Tree
from kronecell.plans.plan import Plan, plan_of

Layer = TypeVar("Layer", bound="TensorLinear")

SPLIT_ELEMENTS = 2**18  # of In and Out, up to which x In Out takes less time than calls of several products
TRACED_ROWS = 128  # a traced graph serves every number of rows, so its plan is chosen for a moderate one

LayerSharing = Shared | Sequence[Shared]  # of a network of layers: for all of them, or a list with one for each


class TensorLinear(nn.Module):
    """(..., M) -> (..., gates * N), gate-major; a drop-in for nn.Linear(M, N) when gates is 1.

    `shared` is False, True (as the paper shares the gates' weights) or the names of the unshared factors. `order` is
    "auto", one of `format.orders()`, "optimal", or a tree of names. The parameters bear the factors' names. They start
    with the rms of nn.Linear's weights, 1 / sqrt(3 M).

    >>> layer = TensorLinear("tt:m=8x8,n=4x4,r=3", bias=True)
    >>> layer(torch.zeros(5, 64)).shape, [name for name, _ in layer.named_parameters()]
    (torch.Size([5, 16]), ['G1', 'G2', 'bias'])
    """

    bias: nn.Parameter | None
    sparse: SparseMatrix | None

    def __init__(
        self,
        format: Format | str,
        bias: bool = True,
        order: str | Tree = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        gates: int = 1,
        shared: Shared = False,
    ) -> None:
        super().__init__()
        self.format = check_format(format)
        self.gates = gates
        self.shared = settled(shared)
        self.order = order
        self.in_features, self.out_features = self.format.M, gates * self.format.N
        network = self.format.network(gates, self.shared)
        if order not in ("auto", "optimal"):
            self.format.plan(order, gates=gates, shared=self.shared)  # a wrong order is refused here, not in forward
        for name, shape in network.shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self._names = (*network.shapes,)
        size = self.format.sparse(gates)
        self.sparse = SparseMatrix(size, device, dtype) if size is not None and size.count else None
        self.matrix = described(self.format, gates, self.shared, order)
        self.frozen: tuple[tuple[int, str], ...] = ()  # rows and plan, ascending; of freeze.py
        self.frozen_rows: tuple[int, ...] = ()
        self.frozen_few: tuple[str, ...] = ()  # buffers of W for a few rows: In and Out, or dense
        if bias:
            self.bias = nn.Parameter(torch.empty(gates * self.format.N, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def factors(self) -> dict[str, Tensor]:
        """The parameters of the network by name; those of S are in `sparse`."""
        return {name: getattr(self, name) for name in self._names}

    @property
    def settled(self) -> bool:
        """Whether S has as many entries as the format says: while its density falls in training, it has more."""
        return self.sparse is None or self.sparse.size == self.format.sparse(self.gates)

    @torch.no_grad()
    def reset_parameters(self, std: float | None = None) -> None:
        """New random factors whose matrix has entries of rms `std`; nothing happens on the meta device."""
        like = getattr(self, self._names[0])
        if like.is_meta:
            return
        std = (3 * self.in_features) ** -0.5 if std is None else std
        drawn = self.format.init(std=std, gates=self.gates, shared=self.shared, dtype=like.dtype)
        self._store(drawn)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -(self.in_features**-0.5), self.in_features**-0.5)

    def _store(self, factors: Mapping[str, Tensor]) -> None:
        for name in self._names:
            getattr(self, name).copy_(factors[name])
        if self.sparse is not None:
            self.sparse.store(factors[VALUES], factors[GAPS])

    # The product -------------------------------------------------------------------------------------------------

    def plan(self, rows: int) -> Plan:
        """How x W is run for a number of rows, with gradients if they are enabled: what forward does."""
        return plan_of(self._frozen_plan(rows)[1]) if self.frozen else chosen_plan(*self._key(rows))

    def product(self, rows: int) -> Product:
        """What a plan is chosen for: this layer's matrix and about this many rows, here and now."""
        return product_of(*self._key(rows)[:-2])

    def _key(self, rows: int, frozen: bool = False) -> tuple[Any, ...]:
        like = getattr(self, self._names[0])
        grad = gradients_follow() and like.requires_grad
        rows = 1 << max(0, rows - 1).bit_length()  # one choice for each power of two
        measured = choices.names and not torch.compiler.is_compiling()  # such a choice is for a number of threads
        threads = torch.get_num_threads() if measured else 0
        return self.matrix, rows, grad, like.dtype, like.device.type, frozen, threads, choices.edition

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W plus the layer's bias, or plus the one given."""
        self.check(x, bias)
        return self.project(x, self.bias if bias is None else bias)

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W + bias for arguments that fit; the layer's own bias is not added."""
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
        rows = TRACED_ROWS if traced else x.numel() // x.shape[-1]
        if self.frozen:
            return self._frozen_product(x, bias, rows)
        plan = plan_text(*self._key(rows))
        if self.sparse is None:
            return apply(plan, x, prepare(plan, self.factors()), bias)
        scales = self.sparse.scales()
        if self.is_dense(plan):
            return self._dense_product(x, added(self.structure_weight(), self.sparse, scales), bias)
        if scales is None:
            return self.sparse.add(x, apply(plan, x, prepare(plan, self.factors()), bias))
        y = self.sparse.add(x, apply(plan, x, prepare(plan, self.factors())) * scales[0], scales[1])
        return y if bias is None else y + bias

    def is_dense(self, plan: str) -> bool:
        """Whether x is multiplied by a dense W alone: then S is part of it, and not multiplied beside it."""
        return one_product(plan) or (self.sparse is not None and self.sparse.is_many)

    def _dense_product(self, x: Tensor, W: Tensor, bias: Tensor | None) -> Tensor:
        check_device(x, W)
        if x.is_meta or not torch.is_autocast_enabled(x.device.type):
            check_dtype(x, W.dtype)
        return dense_product(x, W, bias)

    @torch.no_grad()
    def freeze_products(self, rows: Sequence[int]) -> None:
        """Keep the products of weights of the plans for these numbers of rows as buffers; forward reads them alone."""
        self.requires_grad_(False)
        chosen: dict[str, int] = {}
        for count in sorted(rows):
            chosen[chosen_plan(*self._key(count, frozen=True)).text] = count  # of several, the largest number of rows
        self.frozen = tuple(sorted((count, plan) for plan, count in chosen.items()))
        for number, (_, plan) in enumerate(self.frozen):
            if self.is_dense(plan):
                self._hold(frozen_dense=self.dense_weight())
            else:
                operands = prepare(plan, self.factors())
                self._hold(**{f"frozen_{number}_{step}": operand for step, operand in enumerate(operands)})
        text = split_text(self.matrix)
        many = self.sparse is not None and self.sparse.is_many
        if text is not None and text.pays and text.elements <= SPLIT_ELEMENTS and not many:
            In, Out = matrices_of(text, self.factors())
            self._hold(frozen_in=In, frozen_out=Out)
            self.frozen_few = ("frozen_in", "frozen_out")
        else:
            self.frozen_few = ("frozen_dense",) if self.is_dense(self._frozen_plan(FEW_ROWS)[1]) else ()
        if self.sparse is not None and not many:
            self._hold(frozen_sparse=self.sparse.prepared())

    def _hold(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.contiguous(), persistent=False)

    def _frozen_plan(self, rows: int) -> tuple[int, str]:
        number = next((i for i, (most, _) in enumerate(self.frozen) if rows <= most), len(self.frozen) - 1)
        return number, self.frozen[number][1]

    def _frozen_product(self, x: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        if rows <= FEW_ROWS and self.frozen_few:
            weight: list[Tensor] = [self._buffers[name] for name in self.frozen_few]  # type: ignore[misc]
            if self.sparse is not None and len(weight) > 1:
                weight += [*self.sparse.stored(), self._buffers["frozen_sparse"]]  # type: ignore[list-item]
            if is_few(x, weight):
                return few_rows_product(x, weight, self.gates, bias)
        number, plan = self._frozen_plan(rows)
        if self.is_dense(plan):
            return self._dense_product(x, self.get_buffer("frozen_dense"), bias)
        operands = [self.get_buffer(f"frozen_{number}_{step}") for step in range(operand_count(plan))]
        y = apply(plan, x, operands, bias)
        return y if self.sparse is None else self.sparse.add(x, y, prepared=self.get_buffer("frozen_sparse"))

    def train(self: Layer, mode: bool = True) -> Layer:
        """As torch's; a frozen layer refuses to train."""
        if mode and self.frozen:
            raise PlanError("a frozen layer does not train: train the module that kc.freeze was called with")
        return super().train(mode)

    def check(self, x: Tensor, bias: Tensor | None) -> None:
        """Refuse an input of the wrong width or dtype and a bias of the wrong size."""
        if check_tensor(x, "x").ndim == 0 or x.shape[-1] != self.in_features:
            raise ShapeError(
                f"input has the wrong width: expected (..., {self.in_features}) for {self.format}, got {tuple(x.shape)}"
            )
        if bias is not None and bias.shape != (self.out_features,):
            raise ShapeError(
                f"bias has the wrong shape: expected ({self.out_features},) for {self.gates} gate(s) of {self.format}, "
                f"got {tuple(bias.shape)}"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        described(self.format, self.gates, self.shared, self.order)  # the table is that of a process

    # Dense -------------------------------------------------------------------------------------------------------

    def dense_plan(self) -> Plan:
        """How the weight is made dense."""
        return plan_of(dense_text(self.matrix))

    def dense_weight(self) -> Tensor:
        """The weight in torch's layout, (gates * N, M); differentiable."""
        W = self.structure_weight()
        return W if self.sparse is None else added(W, self.sparse)

    def structure_weight(self) -> Tensor:
        """The same without S."""
        W = contract_text(dense_text(self.matrix), self.factors())
        return W.reshape(self.gates, self.in_features, -1).transpose(1, 2).reshape(self.out_features, -1)

    @torch.no_grad()
    def to_dense(self) -> nn.Linear:
        """An nn.Linear with the same function."""
        weight = self.dense_weight()
        linear = nn.utils.skip_init(
            nn.Linear,
            self.in_features,
            self.out_features,
            bias=self.bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        linear.weight.copy_(weight)
        if self.bias is not None:
            linear.bias.copy_(self.bias)
        return linear.train(self.training)

    @classmethod
    def from_dense(
        cls,
        linear: nn.Linear,
        format: Format | str,
        order: str | Tree = "auto",
        *,
        gates: int = 1,
        shared: Shared = False,
        **fit_options: Any,
    ) -> TensorLinear:
        """The closest layer of this format; `fit_options` go to `format.from_dense`, the error to `.fit_error`."""
        if not isinstance(linear, nn.Linear):
            raise ShapeError(f"from_dense takes a torch.nn.Linear, got {type(linear).__name__}")
        weight = linear.weight
        layer = nn.utils.skip_init(
            cls, format, linear.bias is not None, order, device=weight.device, dtype=weight.dtype, gates=gates,
            shared=shared,
        )  # fmt: skip
        layer.fit(weight, **fit_options)
        if layer.bias is not None:
            with torch.no_grad():
                layer.bias.copy_(linear.bias)
        return layer.train(linear.training)

    @torch.no_grad()
    def fit(self, weight: Tensor, **fit_options: Any) -> float:
        """Set the factors to the closest to `weight` (gates * N, M); returns |W - W'| / |W|, kept as `fit_error`."""
        expected = (self.out_features, self.in_features)
        if tuple(weight.shape) != expected:
            raise ShapeError(
                f"weight has the wrong shape: expected {expected} for {self.format} with {self.gates} gate(s), "
                f"got {tuple(weight.shape)}"
            )
        W = weight.detach().reshape(self.gates, -1, self.in_features).transpose(1, 2)  # (gates, M, N)
        factors, error = self.format.from_dense(
            W[0] if self.gates == 1 else W, gates=self.gates, shared=self.shared, **fit_options
        )
        self._store(factors)
        self.fit_error = float(error)
        return self.fit_error

    # Text --------------------------------------------------------------------------------------------------------

    def explain(self, rows: int = TRACED_ROWS) -> str:
        """The candidates for this number of rows, which is chosen and why, and its steps."""
        chosen = self.order == "auto" and not self.frozen
        text = explain(self.product(rows)) if chosen else str(self.plan(rows))
        return text if self.sparse is None else f"{text}\n{self.sparse.explain(self.is_dense(self.plan(rows).text))}"

    def extra_repr(self) -> str:
        stored = self.format.params(self.gates, self.shared)
        dense = self.in_features * self.out_features
        gates = f"{self.gates} gates, shared={self.shared}, " if self.gates > 1 else ""
        return (
            f"{self.in_features} -> {self.out_features}, {self.format}, {gates}order={self.order}, "
            f"bias={self.bias is not None}, {stored:,} parameters, {dense / stored:,.1f}x fewer than dense"
        )


def check_format(format: Format | str) -> Format:
    """A format, or the format a string names."""
    if isinstance(format, str):
        return parse(format)
    if not isinstance(format, Format):
        raise ShapeError(
            f"format must be a kronecell format such as kc.TT(...) or its string, got {type(format).__name__}"
        )
    return format


def settled(shared: Shared) -> Sharing:
    """`shared` in one hashable form."""
    if isinstance(shared, bool):
        return shared
    return (shared,) if isinstance(shared, str) else tuple(shared)


def settled_layers(shared: LayerSharing, layers: int) -> Any:
    """The same of several layers: one entry for all of them, or a tuple with one for each."""
    if isinstance(shared, (bool, str)) or all(isinstance(part, str) for part in shared):
        return settled(cast(Shared, shared))
    entries = tuple(settled(part) for part in shared)
    if len(entries) != layers:
        raise ShapeError(f"shared needs one entry per layer: expected {layers}, got {len(entries)}")
    return entries


def of_layer(shared: Any, layer: int) -> Sharing:
    """What one layer shares."""
    each = isinstance(shared, tuple) and not all(isinstance(part, str) for part in shared)
    entry: Sharing = shared[layer] if each else shared
    return entry
