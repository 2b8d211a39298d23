"""What the processes of test_distributed.py run; forked, because importing torch takes longer than they do."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kronecell import GRU, KCP, LSTM, TensorLinear
from kronecell.data import open_store
from kronecell.nn.branch_parallel import BranchParallel, branch_parallel
from kronecell.nn.sparse import SparseMatrix
from kronecell.training.checkpoint import save_checkpoint
from kronecell.training.distributed import World
from kronecell.training.loop import Interrupted, Progress, fit, make_optimiser, make_sparsity
from kronecell.training.splits import loaders
from tests.training_cases import tiny

DDP = {"dropout": 0.0, "epochs": 7, "checkpoint_seconds": 3600.0}  # 3 steps an epoch

DOPED = {"format": "doped:0.05+tt:r=2", "dropout": 0.0, "codropout": 0.0, "epochs": 4}

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
        _enter, (function, size, str(rendezvous), arguments), size, start_method="fork"
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
        sharings: list[tuple[int, bool | tuple[str, ...]]] = [(4, True)]
        sharings += [(1, False), (4, False), (4, ("A1",))] if name == "pair" else []
        for gates, shared in sharings:
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


def train_in_two(rank: int, size: int, store_root: str, target: str, stop_after: int) -> None:
    """Train the small experiment with DDP; rank 0 leaves a checkpoint, after `stop_after` steps or at the end."""
    warnings.simplefilter("ignore", RuntimeWarning)  # the bad clip is reported, as it should be
    world = World(rank, size)
    experiment = tiny(**DDP)
    store = open_store(store_root)
    torch.manual_seed(rank)  # DDP starts from rank 0's weights whatever the others draw
    model = experiment.build_model(len(store.classes))
    settings = experiment.train_settings(0)
    optimiser = make_optimiser(model, settings)
    train, valid = loaders(experiment, store, 0, 0, world)
    progress = Progress()
    save_checkpoint_of = partial(save_checkpoint, Path(target), model, optimiser)

    def save(progress: Progress) -> None:
        if world.is_main:
            save_checkpoint_of({"progress": progress.as_dict()}, progress.steps)
        world.wait()

    with suppress(Interrupted):
        fit(
            model, train, valid, settings, optimiser=optimiser, progress=progress, world=world, save=save,
            should_stop=lambda: rank == size - 1 and progress.steps + 1 == stop_after,  # one rank's wish is enough
        )  # fmt: skip
    steps = world.totals([progress.steps])
    assert steps[0] == size * progress.steps, "every rank makes the same number of steps"


def _close(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    error = float((got.detach() - wanted.detach()).abs().max() / wanted.detach().abs().max().clamp_min(1e-300))
    assert error < 1e-10, f"{what}: relative difference {error:.1e}"


def doped_trains_in_several(rank: int, size: int, store_root: str, target: str) -> None:
    """Train a doped experiment with DDP, whose parameters are others whenever entries are taken away."""
    world = World(rank, size)
    experiment = tiny(**DOPED)
    store = open_store(store_root)
    torch.manual_seed(0)
    model = experiment.build_model(len(store.classes))
    settings = experiment.train_settings(0)
    train, valid = loaders(experiment, store, 0, 0, world)
    sparsity = make_sparsity(model, settings, len(train))
    assert sparsity is not None
    fit(model, train, valid, settings, optimiser=make_optimiser(model, settings), sparsity=sparsity, world=world)
    assert sparsity.finished
    places = [float(module.places.double().sum()) for module in model.modules() if isinstance(module, SparseMatrix)]
    assert world.totals(places) == [size * place for place in places], "all processes keep the same entries"
    if world.is_main:
        torch.save(model.state_dict(), target)
