"""Nothing is stale: a module computes with its parameters as they are, however they were changed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import kronecell as kc
from tests.nn.ecosystem_cases import NAMES, assert_fresh, build, factor_items, given, oracle, results


def used(module: nn.Module) -> nn.Module:
    """In eval mode, after several evaluations: what a cache would hold is held now."""
    module.eval()
    with torch.no_grad():
        for _ in range(3):
            module(given())
    return module


def in_place(module: nn.Module) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1.5)


def through_data(module: nn.Module) -> None:
    for p in module.parameters():
        p.data.mul_(1.5)


def new_data(module: nn.Module) -> None:
    for p in module.parameters():
        p.data = p.data * 1.5


def through_numpy(module: nn.Module) -> None:
    for p in module.parameters():
        p.detach().numpy()[...] *= 1.5


def new_parameters(module: nn.Module) -> None:
    for owner, name in [*factor_items(module)]:
        setattr(owner, name, nn.Parameter(getattr(owner, name).detach() * 1.5))


def loaded(module: nn.Module) -> None:
    module.load_state_dict(module.state_dict() | {name: p * 1.5 for name, p in module.named_parameters()})


def assigned(module: nn.Module) -> None:
    module.load_state_dict(module.state_dict() | {name: p * 1.5 for name, p in module.named_parameters()}, assign=True)


def vector(module: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(module.parameters()).detach() * 1.5, module.parameters())


def the_same_vector_twice(module: nn.Module) -> None:
    """Parameters are views of the vector afterwards: they change with it, at the same address."""
    v = parameters_to_vector(module.parameters()).detach()
    for _ in range(2):
        vector_to_parameters(v, module.parameters())
        with torch.no_grad():
            module(given())
        v.mul_(1.25)


def flat_buffer(module: nn.Module) -> None:
    parameters = [*module.parameters()]
    buffer = torch.cat([p.detach().flatten() for p in parameters])
    start = 0
    for p in parameters:
        p.data = buffer[start : start + p.numel()].view(p.shape)
        start += p.numel()
    with torch.no_grad():
        module(given())
    buffer.mul_(1.5)


def fused_sgd(module: nn.Module) -> None:
    step(module, torch.optim.SGD(module.parameters(), 0.5, fused=True))


def fused_adam(module: nn.Module) -> None:
    step(module, torch.optim.Adam(module.parameters(), 0.1, fused=True))


def foreach_adam(module: nn.Module) -> None:
    step(module, torch.optim.Adam(module.parameters(), 0.1, foreach=True))


def step(module: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Evaluated between backward and step, too."""
    for _ in range(2):
        optimiser.zero_grad()
        results(module, given())[0].square().sum().backward()
        with torch.no_grad():
            module(given())
        optimiser.step()
        with torch.no_grad():
            module(given())


def reset(module: nn.Module) -> None:
    torch.manual_seed(9)
    module.reset_parameters()  # type: ignore[operator]


def another_process(module: nn.Module) -> None:
    """Parameters in shared memory, as asynchronous training has them."""
    module.share_memory()
    with torch.no_grad():
        module(given())
    child = multiprocessing.get_context("fork").Process(target=in_place, args=(module,))
    child.start()
    child.join()
    assert child.exitcode == 0


def dtypes(module: nn.Module) -> None:
    module.double()
    in_place(module)
    module.float()


CHANGES: list[Callable[[nn.Module], None]] = [
    in_place, through_data, new_data, through_numpy, new_parameters, loaded, assigned, vector, the_same_vector_twice,
    flat_buffer, fused_sgd, fused_adam, foreach_adam, reset, another_process,
    dtypes,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_results_follow_every_change_of_the_parameters(name: str, change: Callable[[nn.Module], None]) -> None:
    module = used(build(name))
    before = results(module, given())[0].detach().clone()
    change(module)
    with torch.no_grad():
        assert not torch.allclose(results(module, given())[0], before, atol=1e-6)
    assert_fresh(module, given())


@pytest.mark.parametrize("name", NAMES)
def test_a_change_between_forward_and_backward_is_noticed_or_harmless(name: str) -> None:
    """As torch: either the gradient is that of the old numbers, or autograd refuses."""
    module = build(name)
    loss = results(module, given())[0].square().sum()
    expected = torch.autograd.grad(loss, [*module.parameters()], retain_graph=True)
    in_place(module)
    try:
        found = torch.autograd.grad(loss, [*module.parameters()])
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


# Parametrizations: a factor is a function of other parameters --------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, tensor: Tensor) -> Tensor:
        return 2 * tensor


def weights_of(module: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(owner, name) for owner, name in factor_items(module) if getattr(owner, name).ndim > 1]


@pytest.mark.parametrize("how", ["doubled", "weight_norm", "spectral_norm"])
@pytest.mark.parametrize("name", NAMES)
def test_parametrized_factors_are_what_the_module_computes_with_and_learns(name: str, how: str) -> None:
    module, plain = build(name), build(name)
    items = weights_of(module)
    for owner, key in items:
        if how == "doubled":
            parametrize.register_parametrization(owner, key, Doubled())
        else:
            getattr(parametrizations, how)(owner, key)
    module.eval()
    with torch.no_grad():
        for (owner, key), (other, same) in zip(items, weights_of(plain), strict=True):
            getattr(other, same).copy_(getattr(owner, key))
    assert_close = torch.testing.assert_close
    x = given()
    for a, b in zip(results(module, x), results(plain, x), strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-6)
    results(module, x)[0].square().sum().backward()
    results(plain, x)[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters() if p.requires_grad)
    if how == "doubled":
        for (owner, key), (other, same) in zip(items, weights_of(plain), strict=True):
            original = getattr(owner.parametrizations, key).original
            assert_close(original.grad, 2 * getattr(other, same).grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # the originals change, and with them the results
        before = results(module, x)[0]
        for p in module.parameters():
            p.mul_(1.5 if how == "doubled" else -1.0)
        assert not torch.allclose(results(module, x)[0], before, atol=1e-6)
    for owner, key in items:
        parametrize.remove_parametrizations(owner, key)
    if how != "spectral_norm":
        assert_fresh(module, x)


@pytest.mark.parametrize("name", NAMES)
def test_tied_factors_get_the_sum_of_their_gradients(name: str) -> None:
    one, two, apart = build(name), build(name), build(name)
    for (owner, key), (other, same) in zip(factor_items(one), factor_items(two), strict=True):
        setattr(other, same, getattr(owner, key))
    x = given()
    (results(one, x)[0].square().sum() + results(two, 2 * x)[0].square().sum()).backward()
    (results(apart, x)[0].square().sum() + results(apart, 2 * x)[0].square().sum()).backward()
    for a, b in zip(one.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


# Averages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_averaged_models_compute_with_the_average(name: str, ema: bool) -> None:
    module = build(name)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5) if ema else None)
    average.eval()
    kept = []
    for factor in (1.0, 1.5, 0.75):
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(factor)
            kept.append([p.clone() for p in module.parameters()])
            average(given())
            average.update_parameters(module)
            average(given())
    expected = [tensors[0] for tensors in zip(*kept, strict=True)]
    for i, tensors in enumerate(kept[1:], 2):
        share = 0.5 if ema else 1 / i
        expected = [a + share * (b - a) for a, b in zip(expected, tensors, strict=True)]
    for p, q in zip(average.module.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), q)
    update_bn([given()], average)
    assert_fresh(average.module, given())


def test_freezing_some_factors_leaves_the_gradients_of_the_rest() -> None:
    for name in NAMES:
        module = build(name)
        results(module, given())[0].square().sum().backward()
        for chosen, _ in module.named_parameters():
            twin = build(name)
            for key, p in twin.named_parameters():
                p.requires_grad_(key == chosen)
            results(twin, given())[0].square().sum().backward()
            for key, p in twin.named_parameters():
                if key == chosen:
                    torch.testing.assert_close(p.grad, module.get_parameter(key).grad, rtol=1e-4, atol=1e-5)
                else:
                    assert p.grad is None


def test_the_oracle_of_this_file_is_dense() -> None:
    assert type(oracle(build("linear"))) is nn.Linear and type(oracle(build("lstm-kcp"))) is nn.LSTM
    assert isinstance(build("linear"), kc.TensorLinear)
