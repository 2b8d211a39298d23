"""How an operator is registered: everything that torch wants to know of it follows from its reference.

An operator has a schema, a pure-torch reference, a fake (shapes only) and, where it pays, a gradient operator and a
compiled CPU kernel. From these:

- the reference runs where no kernel does: other devices, other dtypes, no compiler. A kernel that meets a dtype it was
  not written for calls `kronecell_reference::NAME`.
- the gradient is registered with autograd. An operator without one of its own differentiates its reference, so that
  gradients of gradients exist to any order.
- functorch (vmap, grad, jvp, ...) and forward mode run the reference itself: torch then knows every operation in it.
  registered operators take part in neither, and would drop tangents without a word.
- autocast leaves an operator's dtypes alone; what is to be computed in lower precision is converted by the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library

from kronecell.errors import KronecellError
from kronecell.ops.library import load

Call = Callable[..., Any]
Function = TypeVar("Function", bound=Call)

_library = Library("kronecell", "FRAGMENT")
_references = Library("kronecell_reference", "FRAGMENT")
OPERATORS: list[Operator] = []


def operator(
    schema: str,
    reference: Call,
    fake: Call,
    *,
    kernel: Call | None = None,
    setup: Call | None = None,
    backward: Call | None = None,
    differentiable: bool = True,
) -> Operator:
    """Register `kronecell::NAME` for a schema such as "few_columns(Tensor x, Tensor weight) -> Tensor".

    `kernel` runs in place of the reference everywhere but under functorch and forward mode; a compiled one on the CPU
    comes before it. `setup(ctx, inputs, output)` and `backward(ctx, *gradients)` are those of
    torch.library.register_autograd; without them the reference is differentiated. One that writes into an
    argument is not differentiable, and for use below autograd. Returns the function to call.
    """
    name = schema[: schema.index("(")]
    compiled = load() and _is_compiled(name)
    if compiled:
        _check_schema(name, schema)
    else:
        _library.define(schema)
    qualified = f"kronecell::{name}"
    _library.impl(name, kernel or reference, "CompositeExplicitAutograd")
    _library.impl(name, reference, "FuncTorchDynamicLayerFrontMode")
    _library.impl(name, reference, "Batched")  # torch.autograd.grad(is_grads_batched=True) has a vmap of its own
    _references.define(schema)
    _references.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, fake, lib=_library)
    overload = getattr(torch.ops.kronecell, name).default
    if differentiable:
        if backward is None:
            setup, backward = _derivative(reference)
        torch.library.register_autograd(qualified, backward, setup_context=setup, lib=_library)
    for device in ("cpu", "cuda"):
        key = f"Autocast{device.upper()}"
        _library.impl(name, _without_autocast(overload, device), key)

    OPERATORS.append(Operator(name, reference, overload, compiled))
    return OPERATORS[-1]


class Operator:
    """An operator to call: torch's, or its reference where forward-mode differentiation follows an argument.

    `kernel` is torch's operator itself, for callers below autograd, where no argument can have a tangent.
    """

    def __init__(self, name: str, reference: Call, kernel: Any, compiled: bool) -> None:
        self.name, self.reference, self.kernel = name, reference, kernel
        self.compiled = compiled  # in the library, so that it runs without Python
        self.__doc__ = reference.__doc__

    def __call__(self, *args: Any) -> Any:
        return self.reference(*args) if _has_tangent(args) else self.kernel(*args)

    def __repr__(self) -> str:
        return f"<operator kronecell::{self.name}>"


def constant_when_traced(function: Function) -> Function:
    """Cached by its arguments; and torch.compile, while it traces, calls it and takes the result as a constant.

    That is torch.compiler.assume_constant_result, which imports the whole compiler, 1.5 seconds, to set a mark. The
    cache is inside: the compiler warns of one that it meets itself.
    """
    cached = lru_cache(maxsize=4096)(function)

    @wraps(function)
    def call(*args: Any) -> Any:
        return cached(*args)

    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    call.cached = cached  # type: ignore[attr-defined]  # for operators, below what is traced: a hit is no call of Python
    return call  # type: ignore[return-value]


def _is_compiled(name: str) -> bool:
    return hasattr(torch.ops.kronecell, name)


def _check_schema(name: str, schema: str) -> None:
    """A library that was built from other sources must not be called: its arguments would be read as something else."""
    built = str(getattr(torch.ops.kronecell, name).default._schema).removeprefix("kronecell::")
    if "".join(built.split()) != "".join(schema.split()):
        raise KronecellError(
            f"the compiled kernels are of another version of kronecell: expected {schema}, got {built}; "
            "reinstall kronecell, or set KRONECELL_KERNELS=0 to run without them"
        )


def _without_autocast(overload: Any, device: str) -> Call:
    def run(*args: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return overload(*args)

    return run


def _has_tangent(args: Sequence[Any]) -> bool:
    """Whether forward-mode differentiation follows one of the tensors."""
    if getattr(forward_ad, "_current_level", 0) < 0:
        return False  # no level is open: what unpack_dual asks for every tensor, which takes ten times as long
    for arg in args:
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(item, Tensor) and forward_ad.unpack_dual(item).tangent is not None:
                return True
    return False


def _derivative(reference: Call) -> tuple[Call, Call]:
    """setup and backward that differentiate the reference with respect to its floating point tensors."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors: list[Tensor] = []
        ctx.places = [_pack(value, tensors) for value in inputs]
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, *upstream: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        moving = [i for i, tensor in enumerate(saved) if tensor.is_floating_point()]

        def outputs(*given: Tensor) -> tuple[Tensor, ...]:
            tensors = [*saved]
            for i, tensor in zip(moving, given, strict=True):
                tensors[i] = tensor
            found = reference(*[_unpack(place, tensors) for place in ctx.places])
            return tuple(tensor for tensor in _flat([found]) if tensor.is_floating_point())

        made, pull_back = torch.func.vjp(  # type: ignore[misc]
            outputs, *[saved[i] for i in moving]
        )
        given = _flat(upstream, keep_none=True)
        cotangents = tuple(
            torch.zeros_like(value) if gradient is None else gradient
            for value, gradient in zip(made, given, strict=True)
        )
        gradients: list[Tensor | None] = [None] * len(saved)
        for i, gradient in zip(moving, pull_back(cotangents), strict=True):
            gradients[i] = gradient
        return tuple(_gradient(place, gradients) for place in ctx.places)

    return setup, backward


def _flat(values: Sequence[Any], keep_none: bool = False) -> list[Any]:
    """All tensors in nested sequences, in order."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += _flat(value, keep_none)
        elif isinstance(value, Tensor) or (value is None and keep_none):
            found.append(value)
    return found


def _pack(value: Any, tensors: list[Tensor]) -> tuple[str, Any]:
    """An argument as a place among the saved tensors, a list of places, or a constant."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor", len(tensors) - 1
    if isinstance(value, (list, tuple)) and all(isinstance(item, Tensor) for item in value):
        return "list", [_pack(item, tensors) for item in value]
    return "constant", value


def _unpack(place: tuple[str, Any], tensors: Sequence[Tensor]) -> Any:
    kind, what = place
    if kind == "tensor":
        return tensors[what]
    return [_unpack(item, tensors) for item in what] if kind == "list" else what


def _gradient(place: tuple[str, Any], gradients: Sequence[Tensor | None]) -> Any:
    kind, what = place
    if kind == "tensor":
        return gradients[what]
    return [_gradient(item, gradients) for item in what] if kind == "list" else None
