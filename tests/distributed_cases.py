"""What the processes of test_distributed.py run; a module of its own, because spawned processes import it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kronecell import GRU, KCP, LSTM, TensorLinear
from kronecell.parallel import BranchParallel, branch_parallel

KCPS = {
    "pair": KCP((4, 3, 2, 5), (2, 3, 2, 2), K=4, CA=3, CB=2),
    "all": KCP((4, 3, 2), (2, 3, 2), K=4, CA=2, CB=3, tie="all"),
    "odd": KCP((4, 3, 5), (2, 3, 4), K=3, CA=3, CB=2),
    "unequal": KCP((4, 3, 2, 5), (2, 3, 2, 2), K=3, CA=(3, 1, 2), CB=(2, 2, 1)),
    "unequal all": KCP((4, 3), (2, 3), K=4, CA=(3, 1, 2, 2), CB=(2, 2, 1, 3), tie="all"),
}


def launch(function: Callable[..., None], size: int, folder: Path, *arguments: object) -> None:
    """Run function(rank, size, *arguments) in `size` gloo processes."""
    rendezvous = folder / f"rendezvous-{function.__name__}-{size}"
    mp.start_processes(  # type: ignore[no-untyped-call]
        _enter, (function, size, str(rendezvous), arguments), size, start_method="spawn"
    )


def _enter(rank: int, function: Callable[..., None], size: int, rendezvous: str, arguments: tuple[object, ...]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    try:
        function(rank, size, *arguments)
    finally:
        dist.destroy_process_group()


def branch_parallel_equals_serial(rank: int, size: int) -> None:
    for name, fmt in KCPS.items():
        for gates, shared in ((1, False), (4, False), (4, True), (4, ("A1",))):
            torch.manual_seed(0)
            serial = TensorLinear(fmt, gates=gates, shared=shared, dtype=torch.float64)
            parallel = branch_parallel(serial)
            assert isinstance(parallel, BranchParallel)
            x = torch.randn(7, fmt.M, dtype=torch.float64, requires_grad=True)
            z = x.detach().clone().requires_grad_()
            wanted, got = serial(x), parallel(z)
            direction = torch.randn_like(wanted)
            (wanted * direction).sum().backward()
            (got * direction).sum().backward()
            case = f"{name}, {gates} gates, shared {shared}, rank {rank} of {size}"
            _close(got, wanted, f"{case}: values")
            _close(z.grad, x.grad, f"{case}: gradient of x")
            for factor, parameter in serial.named_parameters():
                whole = parameter.grad
                cut = parallel.cuts.get(factor)
                assert whole is not None
                _close(
                    getattr(parallel, factor).grad, whole if cut is None else whole.narrow(*cut), f"{case}: {factor}"
                )
            _close(parallel.dense_weight(), serial.dense_weight(), f"{case}: dense weight")
            for factor, tensor in parallel.gather().named_parameters():
                assert torch.equal(tensor, getattr(serial, factor)), f"{case}: gathered {factor}"


def recurrent_layers_equal_serial(rank: int, size: int) -> None:
    fmt = KCPS["pair"]
    for cell in (LSTM, GRU):
        torch.manual_seed(0)
        serial = cell(fmt.M, fmt.N, batch_first=True, input_format=fmt, shared=True, dtype=torch.float64)
        parallel = branch_parallel(serial)
        x = torch.randn(3, 5, fmt.M, dtype=torch.float64)
        wanted, got = serial(x)[0], parallel(x)[0]
        _close(got, wanted, f"{cell.__name__}: values")
        wanted.square().sum().backward()
        got.square().sum().backward()
        weight = parallel.weight_ih_l0
        assert isinstance(weight, BranchParallel)
        for name, parameter in serial.weight_ih_l0.named_parameters():
            cut = weight.cuts[name]
            whole = parameter.grad
            _close(getattr(weight, name).grad, whole if cut is None else whole.narrow(*cut), f"{cell.__name__}: {name}")
        _close(parallel.weight_hh_l0.grad, serial.weight_hh_l0.grad, f"{cell.__name__}: U")


def _close(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    error = float((got.detach() - wanted.detach()).abs().max() / wanted.detach().abs().max().clamp_min(1e-300))
    assert error < 1e-10, f"{what}: relative difference {error:.1e}"
