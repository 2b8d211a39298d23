"""functional_call, vmap, per-sample gradients, forward mode, Jacobians and Hessians of every module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

from tests.nn.ecosystem_cases import NAMES, QUICK, build, given, oracle, results, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own rules for forward mode

F64 = torch.float64
close = torch.testing.assert_close
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def double(name: str) -> Any:
    return build(name, dtype=F64)


def parameters_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


def loss_of(module: torch.nn.Module) -> Any:
    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return sum(t.square().sum() for t in tensors_of(functional_call(module, parameters, (x,))))  # type: ignore[return-value]

    return loss


@pytest.mark.parametrize("name", NAMES)
def test_functional_call_computes_with_the_given_parameters(name: str) -> None:
    module, twin = double(name), double(name)
    doubled = {key: 2 * p for key, p in parameters_of(module).items()}
    twin.load_state_dict(twin.state_dict() | doubled)  # with the indices of sparse parts
    got = tensors_of(functional_call(module, doubled, (given(F64),)))
    for a, b in zip(got, results(oracle(twin), given(F64)), strict=True):
        close(a, b, rtol=1e-10, atol=1e-12)
    for a, b in zip(results(module, given(F64)), results(oracle(module), given(F64)), strict=True):
        close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("name", NAMES)
def test_vmap_over_x_is_a_loop(name: str, chunk: int | None) -> None:
    module = double(name)
    many = torch.stack([given(F64), 2 * given(F64), -given(F64)], 1)
    got = vmap(lambda x: results(module, x)[0], in_dims=1, chunk_size=chunk)(many)
    close(got, torch.stack([results(module, many[:, i])[0] for i in range(3)]), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", EVERY)
def test_an_ensemble_by_vmap_over_parameters_is_a_loop(name: str) -> None:
    modules = [double(name) for _ in range(3)]
    with torch.no_grad():
        for factor, module in zip((1.0, 0.5, 2.0), modules, strict=True):
            for p in module.parameters():
                p.mul_(factor)
    parameters, buffers = stack_module_state(modules)  # type: ignore[arg-type]

    def call(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        return tensors_of(functional_call(modules[0], (parameters, buffers), (x,)))[0]

    got = vmap(call, in_dims=(0, 0, None))(parameters, buffers, given(F64))
    close(got, torch.stack([results(module, given(F64))[0] for module in modules]), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_per_sample_gradients_are_those_of_a_loop(name: str) -> None:
    module = double(name)
    parameters, loss = parameters_of(module), loss_of(module)
    samples = torch.stack([given(F64), 2 * given(F64)])
    batched = vmap(grad(loss), in_dims=(None, 0))(parameters, samples)
    for i, x in enumerate(samples):
        module.zero_grad()
        loss(dict(module.named_parameters()), x).backward()
        for key, p in module.named_parameters():
            close(batched[key][i], p.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_grad_and_vjp_are_those_of_autograd(name: str) -> None:
    module = double(name)
    parameters, loss = parameters_of(module), loss_of(module)
    found = grad(loss)(parameters, given(F64))
    value, back = vjp(loss, parameters, given(F64))
    loss(dict(module.named_parameters()), given(F64)).backward()
    for key, p in module.named_parameters():
        close(found[key], p.grad, rtol=1e-10, atol=1e-12)
        close(back(torch.ones_like(value))[0][key], p.grad, rtol=1e-10, atol=1e-12)


def central_difference(function: Any, x: Tensor, tangent: Tensor, step: float = 1e-6) -> Tensor:
    return (function(x + step * tangent) - function(x - step * tangent)) / (2 * step)


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_of_x_and_of_every_parameter(name: str) -> None:
    module = double(name)
    x, tangent = given(F64), given(F64).flip(0).cos()

    def of_x(x: Tensor) -> Tensor:
        return results(module, x)[0]

    expected = central_difference(of_x, x, tangent)
    close(jvp(of_x, (x,), (tangent,))[1], expected, rtol=1e-6, atol=1e-8)
    with forward_ad.dual_level():
        dual = of_x(forward_ad.make_dual(x, tangent))
        close(forward_ad.unpack_dual(dual).tangent, expected, rtol=1e-6, atol=1e-8)
    parameters = parameters_of(module)
    for key, value in parameters.items():
        along = value.cos()

        def of_parameter(value: Tensor, key: str = key) -> Tensor:
            return tensors_of(functional_call(module, {**parameters, key: value}, (x,)))[0]

        expected = central_difference(of_parameter, value, along)
        close(jvp(of_parameter, (value,), (along,))[1], expected, rtol=1e-6, atol=1e-8, msg=key)
        with forward_ad.dual_level():
            dual = of_parameter(forward_ad.make_dual(value, along))
            close(forward_ad.unpack_dual(dual).tangent, expected, rtol=1e-6, atol=1e-8, msg=key)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", EVERY)
def test_a_dual_tensor_is_never_dropped(name: str, dtype: torch.dtype) -> None:
    """Without gradients too, and for a module in eval mode: a tangent that is lost is a wrong zero."""
    module = build(name, dtype=dtype).eval()
    x = given(dtype)
    with torch.no_grad(), forward_ad.dual_level():
        dual = results(module, forward_ad.make_dual(x, torch.ones_like(x)))
        tangents = [forward_ad.unpack_dual(t).tangent for t in dual]
    assert all(t is not None and t.any() for t in tangents)
    expected = central_difference(
        lambda x: results(build(name, dtype=F64), x)[0], x.double(), torch.ones_like(x).double()
    )
    close(tangents[0].double(), expected.detach(), rtol=1e-3 if dtype == torch.float32 else 1e-6, atol=1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_jacobians_forward_and_back_are_those_of_the_dense_module(name: str) -> None:
    module, twin = double(name), oracle(build(name, dtype=F64))
    x = given(F64)
    want = jacrev(lambda x: results(twin, x)[0])(x) if name.startswith("linear") else None
    forward, back = jacfwd(lambda x: results(module, x)[0])(x), jacrev(lambda x: results(module, x)[0])(x)
    close(forward, back, rtol=1e-10, atol=1e-12)
    plain = torch.autograd.functional.jacobian(lambda x: results(twin, x)[0], x)
    close(back, plain, rtol=1e-9, atol=1e-11)
    assert want is None or torch.allclose(want, back)


@pytest.mark.parametrize("name", EVERY)
def test_hessians_are_those_of_the_dense_module(name: str) -> None:
    module, twin = double(name), oracle(build(name, dtype=F64))
    x = given(F64)[:2, :1]
    got = hessian(lambda x: results(module, x)[0].sin().sum())(x)
    want = torch.autograd.functional.hessian(lambda x: results(twin, x)[0].sin().sum(), x)
    close(got, want, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_batches_of_upstream_gradients_are_a_loop(name: str) -> None:
    module = double(name)
    x = given(F64).requires_grad_()
    y = results(module, x)[0]
    upstream = torch.stack([y.detach().cos(), y.detach().sin(), torch.ones_like(y)])
    leaves = [x, *module.parameters()]
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    got = torch.autograd.grad(y, leaves, upstream, is_grads_batched=True, **options)
    for i, one in enumerate(upstream):
        for a, b in zip(got, torch.autograd.grad(y, leaves, one, **options), strict=True):
            close(a[i], b, rtol=1e-10, atol=1e-12)
