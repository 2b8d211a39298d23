"""TensorLinear: a format and its parameters as a module, y = x W + b without ever forming W."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kronecell.ops.candidates import Runner, candidates, predict, splits
from kronecell.errors import ShapeError
from kronecell.formats import Format, Shared, parse
from kronecell.ops.kept import Kept
from kronecell.plans.network import Network
from kronecell.plans.order import Tree, optimal
from kronecell.ops.plan import Plan, check_tensor
from kronecell.ops.split import OUT, Split
from kronecell.ops.tune import Product, bucket, choose, edition, explain
from kronecell.ops.watched import autocast_off

Layer = TypeVar("Layer", bound="TensorLinear")

TRACED_ROWS = 64  # a traced graph serves every number of rows, so its plan is chosen for a moderate one


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
        network = self.format.network(gates, self.shared)
        if order != "auto":
            self.format.plan(order, gates=gates, shared=self.shared)  # a wrong order is refused here, not in forward
        for name, shape in network.shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self._names = (*network.shapes,)
        self._kept = Kept()
        self._choices: dict[tuple[Any, ...], Runner] = {}
        if bias:
            self.bias = nn.Parameter(torch.empty(gates * self.format.N, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self._traced_plan, self._traced_split = _traced(self.format, self.order, gates, self.shared)
        self.reset_parameters()

    @property
    def in_features(self) -> int:
        """M."""
        return self.format.M

    @property
    def out_features(self) -> int:
        """gates * N."""
        return self.gates * self.format.N

    def factors(self) -> dict[str, Tensor]:
        """The parameters of the network by name."""
        held = self._parameters  # looked up first: a module's own attribute access is slow
        return {name: getattr(self, name) if (tensor := held.get(name)) is None else tensor for name in self._names}

    @torch.no_grad()
    def reset_parameters(self, std: float | None = None) -> None:
        """New random factors whose matrix has entries of rms `std`; nothing happens on the meta device."""
        if getattr(self, self._names[0]).is_meta:
            return
        std = (3 * self.in_features) ** -0.5 if std is None else std
        drawn = self.format.init(std=std, gates=self.gates, shared=self.shared, dtype=self._dtype)
        for name, tensor in drawn.items():
            getattr(self, name).copy_(tensor)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -(self.in_features**-0.5), self.in_features**-0.5)

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(self, self._names[0]).dtype

    # The product -------------------------------------------------------------------------------------------------

    def product(self, rows: int, columns: bool = False) -> Product:
        """What a plan is chosen for: this layer's matrix and about this many rows, here and now."""
        like = getattr(self, self._names[0])
        grad = torch.is_grad_enabled() and like.requires_grad
        return Product(self.format, bucket(rows), self.gates, self.shared, grad, self._dtype, like.device.type, columns)

    def plan(self, rows: int) -> Runner:
        """How x W is run for a number of rows: the only place where that is chosen."""
        if self.order == "auto":
            return self._chosen(rows, columns=False)
        return _named_plan(self.format, self.order, bucket(rows), self.gates, self.shared)

    def _chosen(self, rows: int, columns: bool) -> Runner:
        """The choice for a product, remembered here: a step of a stream must not pay for looking it up."""
        like = getattr(self, self._names[0])
        grad = torch.is_grad_enabled() and like.requires_grad
        key = (bucket(rows), columns, grad, like.dtype, like.device.type, torch.get_num_threads(), edition())
        runner = self._choices.get(key)
        if runner is None or key[-1] is None:
            runner = self._choices[key] = choose(self.product(rows, columns))
        return runner

    def prepared(self, rows: int, bias: Tensor | None = None, once: bool = False) -> Callable[[Tensor], Tensor]:
        """The map x -> x W + bias for about `rows` rows, with the work that needs no x already done.

        If it is called `once` only, in training that work is left to the call: then all of it can be one operation.
        """
        runner: Runner = self._traced_plan if torch.compiler.is_compiling() else self.plan(rows)
        like = getattr(self, self._names[0])
        dtype = autocast_dtype(like)
        if dtype is None and once and torch.is_grad_enabled():
            factors = self.factors()
            self.drop_kept()
            return lambda x: runner.execute(x, factors, bias)
        if dtype is None:
            tensors = self._prepare(runner)
            return lambda x: runner.apply(x, tensors, bias)
        with autocast_off(like):  # products of weights keep their precision, products with x do not
            tensors = {name: tensor.to(dtype) for name, tensor in runner.prepare(self.factors()).items()}
        bias = None if bias is None else bias.to(dtype)
        return lambda x: runner.apply(x if x.dtype == torch.uint8 else x.to(dtype), tensors, bias)

    def _prepare(self, runner: Runner) -> Mapping[str, Tensor]:
        """The work that needs no x; in eval mode done once."""
        factors = self.factors()
        return self._kept.get((runner,), factors.values(), self.training, lambda: runner.prepare(factors))

    def split(self, rows: int) -> Split | None:
        """x W as x In Out with few columns between; None if the format has no such split or an order is prescribed."""
        if self._traced_split is None or torch.compiler.is_compiling():
            return self._traced_split
        runner = self._chosen(rows, columns=True)
        assert isinstance(runner, Split)
        return runner

    def columns(self, x: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """x In and Out of a split."""
        tensors = self._prepare(split)
        return split.inner.apply(x, tensors), tensors[OUT]

    def project(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W + bias; the layer's own bias is not added."""
        width = check_tensor(x, "x").shape[-1] if x.ndim else 0
        if width != self.in_features:
            raise ShapeError(
                f"input has the wrong width: expected (..., {self.in_features}) for {self.format}, got {tuple(x.shape)}"
            )
        if bias is not None and bias.shape != (self.out_features,):
            raise ShapeError(
                f"bias has the wrong shape: expected ({self.out_features},) for {self.gates} gate(s) of {self.format}, "
                f"got {tuple(bias.shape)}"
            )
        rows = TRACED_ROWS if torch.compiler.is_compiling() else x.numel() // width
        return self.prepared(rows, bias, once=True)(x)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W plus the layer's bias, or plus the one given."""
        return self.project(x, self.bias if bias is None else bias)

    def drop_kept(self) -> None:
        """Forget the products of weights: needed only after edits through `parameter.data`, which torch hides."""
        self._kept.drop()

    def train(self: Layer, mode: bool = True) -> Layer:
        """As torch's; what is kept of products of weights is dropped."""
        self.drop_kept()
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_choices": {}}  # choices belong to a process

    # Dense -------------------------------------------------------------------------------------------------------

    def dense_weight(self) -> Tensor:
        """The weight in torch's layout, (gates * N, M); differentiable."""
        W = _dense_plan(self.format.network(self.gates, self.shared)).contract(self.factors())
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
        layer = cls(
            format, linear.bias is not None, order, device=weight.device, dtype=weight.dtype, gates=gates, shared=shared
        )
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
        for name, tensor in factors.items():
            getattr(self, name).copy_(tensor)
        self.fit_error = float(error)
        return self.fit_error

    # Text --------------------------------------------------------------------------------------------------------

    def explain(self, rows: int = TRACED_ROWS) -> str:
        """The candidates for this number of rows, which is chosen and why, and its steps."""
        if self.order != "auto":
            return str(self.plan(rows))
        return explain(self.product(rows))

    def extra_repr(self) -> str:
        stored = self.format.network(self.gates, self.shared).num_params
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


def settled(shared: Shared) -> bool | tuple[str, ...]:
    """`shared` in one hashable form."""
    if isinstance(shared, bool):
        return shared
    return (shared,) if isinstance(shared, str) else tuple(shared)


@lru_cache(maxsize=1024)
def _named_plan(format: Format, order: str | Tree, rows: int, gates: int, shared: bool | tuple[str, ...]) -> Plan:
    return format.plan(order, rows, gates=gates, shared=shared)


@lru_cache(maxsize=256)
def _dense_plan(network: Network) -> Plan:
    dense = network.as_dense()
    return Plan(dense, optimal(dense), order="dense")


@lru_cache(maxsize=1024)
def _traced(format: Format, order: str | Tree, gates: int, shared: bool | tuple[str, ...]) -> tuple[Plan, Split | None]:
    """What a traced graph uses, which serves every number of rows: the best plan that does not look at it, and a split.

    Both are run once without data, because a tracer must find their steps ready and not search for them.
    """
    split = None
    if order == "auto":
        options = candidates(format, TRACED_ROWS, gates, shared).values()
        plan = min((p for p in options if isinstance(p, Plan)), key=lambda p: predict(p, TRACED_ROWS))
        split = next(iter(splits(format, TRACED_ROWS, gates, shared).values()), None)
    else:
        plan = _named_plan(format, order, TRACED_ROWS, gates, shared)
    with torch.device("meta"):
        like = {name: torch.empty(shape, dtype=torch.float32) for name, shape in plan.network.shapes.items()}
        for dtype in (torch.float32, torch.uint8):
            plan.execute(torch.empty(1, format.M, dtype=dtype), like)
            if split is not None:
                split.execute(torch.empty(1, format.M, dtype=dtype), like)
    return plan, split


def autocast_dtype(like: Tensor) -> torch.dtype | None:
    """The dtype of matrix products under autocast on this tensor's device; None outside autocast or for doubles."""
    kind = like.device.type
    if like.dtype == torch.float64 or kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a product with x is made."""
    return autocast_dtype(x) or x.dtype
