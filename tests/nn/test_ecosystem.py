"""Where torch modules live: copies, files, dtypes, autocast, devices, hooks, checkpoints, memory."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import kronecell as kc
from tests.nn.ecosystem_cases import NAMES, build, given, oracle, results
from tests.nn.recurrent_cases import largest_difference


@pytest.fixture(params=NAMES)
def module(request: pytest.FixtureRequest) -> nn.Module:
    return build(request.param)


@pytest.fixture
def x() -> Tensor:
    return given()


def gradients(module: nn.Module, run: Any) -> list[Tensor]:
    """Of the first result of `run` with respect to all parameters."""
    result = run()
    loss = (result if isinstance(result, Tensor) else result[0]).square().sum()
    return [*torch.autograd.grad(loss, [*module.parameters()])]


# Copies and files ----------------------------------------------------------------------------------------------------


def test_copies_pickles_and_strict_loading_keep_the_function(module: nn.Module, x: Tensor) -> None:
    expected = results(module, x)
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(dict([*module.state_dict().items()][1:]), strict=True)
    other.load_state_dict(module.state_dict(), strict=True)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True).keys() == module.state_dict().keys()
    for twin in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(torch.equal(a, b) for a, b in zip(results(twin, x), expected, strict=True))


def test_the_state_dict_holds_the_parameters_alone_after_any_use(module: nn.Module, x: Tensor) -> None:
    names = {name for name, _ in module.named_parameters()}
    indices = {name for name, _ in module.named_buffers() if name.endswith(".sparse.gaps")}
    buffers = {name for name, _ in module.named_buffers()}
    results(module, x)[0].sum().backward()
    module.eval()
    with torch.no_grad():
        results(module, x)
    assert module.state_dict().keys() == names | indices
    assert {name for name, _ in module.named_buffers()} == buffers
    assert buffers == indices | {name.replace("gaps", "places") for name in indices}


@pytest.mark.parametrize("name", ["lstm-kcp", "linear-kcp"])
def test_a_pickle_works_in_another_process(name: str, tmp_path: Any) -> None:
    torch.save(build(name), tmp_path / "module.pt")
    torch.save(results(build(name), given())[0].detach(), tmp_path / "y.pt")
    code = (
        "import torch; x = torch.randn(3, 2, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)\n"
        f"module = torch.load({str(tmp_path / 'module.pt')!r}, weights_only=False)\n"
        "y = module(x.float()); y = y if isinstance(y, torch.Tensor) else y[0]\n"
        f"assert torch.allclose(y, torch.load({str(tmp_path / 'y.pt')!r}), atol=1e-6)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_seed_decides_weights_and_results(x: Tensor) -> None:
    for name in NAMES:
        one, two = build(name), build(name)
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(results(one, x), results(two, x), strict=True))


# Dtypes and devices --------------------------------------------------------------------------------------------------

DTYPES = [(torch.float64, 1e-6), (torch.float32, 1e-6), (torch.bfloat16, 0.05), (torch.float16, 0.01)]


@pytest.mark.parametrize("dtype,tolerance", DTYPES)
def test_every_dtype_runs_forward_and_backward(
    module: nn.Module, x: Tensor, dtype: torch.dtype, tolerance: float
) -> None:
    expected = results(oracle(module), x.double())
    twin = copy.deepcopy(module).to(dtype)
    got = results(twin, x.to(dtype))
    assert all(tensor.dtype == dtype for tensor in got)
    assert largest_difference([tensor.double() for tensor in got], expected) < tolerance
    sum(tensor.sum() for tensor in got).backward()
    assert all(p.grad is not None and p.grad.dtype == dtype and p.grad.isfinite().all() for p in twin.parameters())


def torch_twin(module: nn.Module) -> nn.Module:
    """torch.nn's module of the same function and dtype."""
    return module.to_dense()  # type: ignore[operator, no-any-return]


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("training", [True, False])
def test_autocast_gives_the_dtypes_of_torch_and_near_values(module: nn.Module, x: Tensor, training: bool) -> None:
    twin, exact = torch_twin(module), results(oracle(module), x.double())
    # With projections torch keeps c in float32; ours are all of one dtype.
    alike = 2 if getattr(module, "proj_size", 0) else 3
    for given_x in (x, x.bfloat16()):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(training):
            got = results(module, given_x)
            expected = results(twin, given_x)
        assert [tensor.dtype for tensor in got[:alike]] == [tensor.dtype for tensor in expected[:alike]]
        assert largest_difference([tensor.double() for tensor in got], exact) < 0.05
    if training:
        sum(tensor.float().square().sum() for tensor in got).backward()
        sum(tensor.float().square().sum() for tensor in results(oracle(module).float(), x)).backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())
        assert all(p.grad.isfinite().all() for p in module.parameters())  # type: ignore[union-attr]


def test_autocast_trains_towards_what_float32_trains_towards(module: nn.Module, x: Tensor) -> None:
    exact = gradients(module, lambda: module(x))

    def cast() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = module(x)
        return result.float() if isinstance(result, Tensor) else (result[0].float(),)

    for a, b in zip(gradients(module, cast), exact, strict=True):
        assert (a - b).norm() <= 0.05 * b.norm() + 1e-3


@pytest.mark.parametrize("state", ["none", "float32", "bfloat16"])
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_a_given_state_under_autocast_is_taken_as_torch_takes_it(cell: str, state: str, x: Tensor) -> None:
    ours = getattr(kc, cell)(12, 8, input_format="tt:r=2")
    theirs = ours.to_dense()
    part = torch.zeros(1, 2, 8, dtype=getattr(torch, state, torch.float32))
    hx = None if state == "none" else (part, part) if cell == "LSTM" else part
    with torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            expected = [tensor.dtype for tensor in results(theirs, x, hx)]
        except Exception:
            with pytest.raises(kc.ShapeError):
                ours(x, hx)
            return
        assert [tensor.dtype for tensor in results(ours, x, hx)] == expected


def test_a_module_built_without_memory_is_filled_later(x: Tensor) -> None:
    for name in NAMES:
        with torch.device("meta"):
            empty = build(name)
        assert all(p.is_meta for p in empty.parameters())
        assert [t.shape for t in results(empty, x.to("meta"))] == [t.shape for t in results(build(name), x)]
        filled = empty.to_empty(device="cpu")
        torch.manual_seed(4)
        filled.reset_parameters()
        torch.manual_seed(4)
        again = copy.deepcopy(filled)
        again.reset_parameters()
        assert all(torch.equal(a, b) for a, b in zip(filled.parameters(), again.parameters(), strict=True))
        assert all(tensor.isfinite().all() for tensor in results(filled, x))


# Autograd ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(module: nn.Module, x: Tensor, reentrant: bool) -> None:
    x.requires_grad_()  # without it a re-entrant checkpoint takes no gradients at all
    plain = gradients(module, lambda: module(x))
    if reentrant:
        result = checkpoint(module, x, use_reentrant=True)
        (result if isinstance(result, Tensor) else result[0]).square().sum().backward()
        for p, expected in zip(module.parameters(), plain, strict=True):
            torch.testing.assert_close(p.grad, expected)  # with the gradient of x, sums are made in another order
    else:
        saved = gradients(module, lambda: checkpoint(module, x, use_reentrant=False))
        assert largest_difference(plain, saved) == 0


def test_saved_tensors_pass_through_hooks(module: nn.Module, x: Tensor) -> None:
    plain = gradients(module, lambda: module(x))
    seen: list[int] = []

    def pack(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        seen.append(tensor.numel())
        return tensor.detach().double(), tensor.dtype

    def unpack(packed: tuple[Tensor, torch.dtype]) -> Tensor:
        tensor, dtype = packed
        return tensor.to(dtype)

    with saved_tensors_hooks(pack, unpack):
        hooked = gradients(module, lambda: module(x))
    assert seen and largest_difference(plain, hooked) == 0
    with save_on_cpu():
        assert largest_difference(plain, gradients(module, lambda: module(x))) == 0


def test_gradients_of_gradients_are_those_of_the_dense_module(x: Tensor) -> None:
    for name in NAMES:
        found = []
        for each in (build(name, dtype=torch.float64), oracle(build(name))):
            leaf = given(torch.float64).requires_grad_()
            (first,) = torch.autograd.grad(results(each, leaf)[0].square().sum(), leaf, create_graph=True)
            found.append([first.detach(), *torch.autograd.grad(first.square().sum(), leaf)])
        assert largest_difference(*found) < 1e-9, name


def test_two_backwards_need_retain_graph_and_then_are_equal(module: nn.Module, x: Tensor) -> None:
    loss = results(module, x)[0].square().sum()
    one = torch.autograd.grad(loss, [*module.parameters()], retain_graph=True)
    two = torch.autograd.grad(loss, [*module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, [*module.parameters()])


def test_hooks_of_modules_and_tensors_run(module: nn.Module, x: Tensor) -> None:
    seen: list[str] = []
    for name, part in module.named_modules():
        if isinstance(part, kc.TensorLinear) and "weight_hh" not in name:
            part.register_forward_hook(lambda *_, name=name: seen.append(name))
    for name, p in module.named_parameters():
        p.register_hook(lambda gradient, name=name: seen.append(f"gradient of {name}"))
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(f"{name} done"))
    results(module, x)[0].sum().backward()
    expected = {f"gradient of {name}" for name, _ in module.named_parameters()}
    expected |= {f"{name} done" for name, _ in module.named_parameters()}
    expected |= {n for n, p in module.named_modules() if isinstance(p, kc.TensorLinear) and "weight_hh" not in n}
    assert {*seen} == expected


def test_inference_mode_gives_the_same_and_training_afterwards_works(module: nn.Module, x: Tensor) -> None:
    expected = results(module, x)
    with torch.inference_mode():
        inside = [tensor.clone() for tensor in results(module, x)]
    assert largest_difference(inside, [tensor.detach() for tensor in expected]) < 1e-6
    results(module, x)[0].sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_anomaly_mode_and_deterministic_algorithms_change_nothing(module: nn.Module, x: Tensor) -> None:
    plain = gradients(module, lambda: module(x))
    with torch.autograd.set_detect_anomaly(True):
        assert largest_difference(plain, gradients(module, lambda: module(x))) == 0
    torch.use_deterministic_algorithms(True)
    try:
        assert largest_difference(plain, gradients(module, lambda: module(x))) < 1e-6
    finally:
        torch.use_deterministic_algorithms(False)


# Memory --------------------------------------------------------------------------------------------------------------

MEMORY = """
import resource, torch
torch.set_num_threads(2)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
import kronecell as kc
fmt = kc.KCP((8, 20, 20, 18), (6, 6, 8, 8), K=6, CA=2, CB=2)
rnn = kc.LSTM(57600, 2304, batch_first=True, input_format=fmt)
with torch.no_grad():
    rnn(torch.randn(2, 6, 57600))
print((peak() - before) // 1024)
"""


def test_the_largest_layer_of_the_paper_needs_less_than_400_megabytes() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 400, done.stdout


def largest_allocation(run: Any) -> int:
    """Bytes that the largest operation of torch adds to what is allocated."""
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        run()
    return max(event.cpu_memory_usage for event in profile.events())


@pytest.mark.parametrize("recipe", ["kcp:K=4,CA=4,CB=2", "tt:r=4", "tr:r=4", "kt:K=4", "ht:r=4"])
def test_nothing_of_the_size_of_the_dense_matrix_is_allocated(recipe: str) -> None:
    """M x N is 64 MiB here; everything allocated in forward and backward together stays below a quarter of it."""
    rnn = kc.LSTM(16384, 256, input_format=recipe)
    x = torch.randn(2, 2, 16384)
    assert 0 < largest_allocation(lambda: rnn(x)[0].sum().backward()) < 16384 * 256


@pytest.mark.parametrize("recipe", ["kcp:K=4,CA=4,CB=2", "tt:r=4", "tr:r=4", "ht:r=4", "bt:r=2,P=2", "lowrank:r=8"])
def test_inference_copies_no_large_input(recipe: str) -> None:
    layer = kc.TensorLinear(kc.LSTM(57600, 256, input_format=recipe).input_formats[0], gates=4)
    for x in (torch.zeros(96, 57600), torch.zeros(96, 57600, dtype=torch.uint8)):
        with torch.no_grad():
            assert largest_allocation(lambda x=x: layer(x)) < 96 * 57600 * 4
