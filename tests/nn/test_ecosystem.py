"""LSTM, GRU and TensorLinear where torch modules live: copies, dtypes, devices, compilers, processes, memory."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import kronecell as kc
from tests.nn.recurrent_cases import flat, largest_difference

KCP, TT = "kcp:K=2,CA=2,CB=2", "tt:r=2"


def modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        kc.TensorLinear("tt:m=3x4,n=2x4,r=2"),
        kc.LSTM(12, 8, 2, bidirectional=True, input_format=KCP, hidden_format=TT),
        kc.GRU(12, 8, input_format=TT),
        kc.LSTM(12, 8, input_format=TT, hidden_format=TT, recurrence="loop"),
    ]


def results(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    result = module(x)
    return [result] if isinstance(result, torch.Tensor) else flat(result)


@pytest.fixture(params=range(4), ids=["linear", "lstm", "gru", "loop"])
def module(request: pytest.FixtureRequest) -> nn.Module:
    return modules()[request.param]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 2, 12, generator=torch.Generator().manual_seed(1))


def test_copies_pickles_and_strict_loading_keep_the_function(module: nn.Module, x: torch.Tensor) -> None:
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


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-6), (torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_other_dtypes_run_forward_and_backward(
    module: nn.Module, x: torch.Tensor, dtype: torch.dtype, tolerance: float
) -> None:
    expected = results(module, x)
    twin = copy.deepcopy(module).to(dtype)
    got = results(twin, x.to(dtype))
    assert all(tensor.dtype == dtype for tensor in got)
    assert largest_difference([tensor.float() for tensor in got], expected) < tolerance
    sum(tensor.sum() for tensor in got).backward()
    assert all(p.grad is not None and p.grad.dtype == dtype and p.grad.isfinite().all() for p in twin.parameters())


def test_autocast_computes_in_bfloat16_and_trains_in_float32(module: nn.Module, x: torch.Tensor) -> None:
    expected = results(module, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for given in (x, x.bfloat16()):
            got = results(module, given)
            assert all(tensor.dtype == torch.bfloat16 for tensor in got[:1])
            assert largest_difference([tensor.float() for tensor in got], expected) < 0.05
    sum(tensor.float().sum() for tensor in got).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())


def test_a_module_built_without_memory_is_filled_later(module: nn.Module, x: torch.Tensor) -> None:
    with torch.device("meta"):
        empty = modules()[[type(m) for m in modules()].index(type(module))]
    assert all(p.is_meta for p in empty.parameters())
    filled = empty.to_empty(device="cpu")
    torch.manual_seed(4)
    filled.reset_parameters()
    torch.manual_seed(4)
    again = copy.deepcopy(filled)
    again.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(filled.parameters(), again.parameters(), strict=True))
    assert all(tensor.isfinite().all() for tensor in results(filled, x))


def test_a_seed_decides_weights_and_results(x: torch.Tensor) -> None:
    for one, two in zip(modules(), modules(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(results(one, x), results(two, x), strict=True))


def test_functional_call_uses_the_given_parameters(module: nn.Module, x: torch.Tensor) -> None:
    doubled = {name: 2 * p.detach() for name, p in module.named_parameters()}
    twin = copy.deepcopy(module)
    twin.load_state_dict(doubled)
    twin.requires_grad_(False)  # as the given ones; with gradients x W may be made in another order
    got = functional_call(module, doubled, (x,))
    assert largest_difference([got] if isinstance(got, torch.Tensor) else flat(got), results(twin, x)) == 0


def test_checkpointing_gives_the_same_gradients(module: nn.Module, x: torch.Tensor) -> None:
    def gradients(run: Any) -> list[torch.Tensor]:
        result = run()
        loss = (result if isinstance(result, torch.Tensor) else flat(result)[0]).square().sum()
        return [*torch.autograd.grad(loss, [*module.parameters()])]

    plain = gradients(lambda: module(x))
    saved = gradients(lambda: checkpoint(module, x, use_reentrant=False))
    assert largest_difference(plain, saved) == 0


def test_gradients_of_gradients_exist_in_float32(module: nn.Module, x: torch.Tensor) -> None:
    x.requires_grad_()
    (first,) = torch.autograd.grad(results(module, x)[0].square().sum(), x, create_graph=True)
    second = torch.autograd.grad(first.square().sum(), [*module.parameters()], allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in second) and any(g is not None for g in second)


# torch's tracers use parts of torch that torch itself declares deprecated, and look at .grad of tensors in between.
TRACER = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.compile is ignored:UserWarning"),
]


def traced(test: Any) -> Any:
    for mark in TRACER:
        test = mark(test)
    return test


def compare_compiled(module: nn.Module, x: torch.Tensor, backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    expected, result = results(module, x), compiled(x)
    got = [result] if isinstance(result, torch.Tensor) else flat(result)
    assert largest_difference(got, expected) < 1e-6
    parameters = [*module.parameters()]
    ours, theirs = (torch.autograd.grad(sum(t.square().sum() for t in r), parameters) for r in (got, expected))
    assert largest_difference([*ours], [*theirs]) < 1e-5


@traced
def test_compiles_into_one_graph(x: torch.Tensor) -> None:
    compare_compiled(kc.TensorLinear("kcp:m=3x4,n=2x4,K=2,CA=2,CB=2"), x, "aot_eager")
    compare_compiled(kc.LSTM(12, 8, input_format=KCP, hidden_format=TT), x, "aot_eager")
    compare_compiled(kc.GRU(12, 8, input_format=TT, bidirectional=True), x, "aot_eager")


@pytest.mark.slow
@traced
def test_compiles_into_one_graph_with_inductor(module: nn.Module, x: torch.Tensor) -> None:
    compare_compiled(module, x, "inductor")


def compare_exported(module: nn.Module, axes: dict[int, str]) -> None:
    dims = {axis: torch.export.Dim(name) for axis, name in axes.items()}
    module.eval()
    program = torch.export.export(module, (torch.randn(4, 3, 12),), dynamic_shapes=(dims,))
    for shape in ((7, 2, 12), (1, 5, 12), (9, 1, 12)):
        given = torch.randn(shape)
        got = program.module()(given)
        assert largest_difference([got] if isinstance(got, torch.Tensor) else flat(got), results(module, given)) < 1e-6


@traced
def test_exports_with_dynamic_batch_and_time() -> None:
    compare_exported(kc.TensorLinear("tt:m=3x4,n=2x4,r=2"), {0: "time", 1: "batch"})
    compare_exported(kc.LSTM(12, 8, input_format=KCP), {0: "time", 1: "batch"})
    compare_exported(kc.GRU(12, 8, batch_first=True, input_format=TT), {0: "batch", 1: "time"})


@pytest.mark.slow
@traced
def test_exports_several_layers_and_directions() -> None:
    module = kc.LSTM(12, 8, 2, bidirectional=True, proj_size=4, input_format=KCP, hidden_format=TT)
    compare_exported(module, {0: "time", 1: "batch"})


WORKER = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import kronecell as kc
rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(rank)  # DDP has to make the two equal
rnn = kc.LSTM(12, 8, 2, bidirectional=True, input_format="kcp:K=2,CA=2,CB=2", hidden_format="tt:r=2")
model = DistributedDataParallel(rnn)
x = torch.randn(4, 6, 12, generator=torch.Generator().manual_seed(5))
model(x[:, 3 * rank : 3 * rank + 3])[0].square().mean().backward()
got = {name: p.grad.clone() for name, p in rnn.named_parameters()}
rnn.zero_grad()
rnn(x)[0].square().mean().backward()
for name, p in rnn.named_parameters():
    torch.testing.assert_close(got[name], p.grad, msg=name)
dist.destroy_process_group()
print("equal")
"""


def test_two_processes_get_the_gradients_of_the_whole_batch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0].decode() for process in processes]
    assert all(output.strip().endswith("equal") for output in outputs), "\n".join(outputs)


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


@pytest.mark.parametrize("recipe", ["kcp:K=4,CA=4,CB=2", "tt:r=4", "tr:r=4", "kt:K=4", "ht:r=4"])
def test_nothing_of_the_size_of_the_dense_matrix_is_allocated(recipe: str) -> None:
    """M x N is 64 MiB here; everything allocated in forward and backward together stays below a quarter of it."""
    rnn = kc.LSTM(16384, 256, input_format=recipe)
    x = torch.randn(2, 2, 16384)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        rnn(x)[0].sum().backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < 16384 * 256
