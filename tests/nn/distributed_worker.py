"""One process of a test: FSDP2 with one process, or DDP with two. Run as `python -m tests.nn.distributed_worker`."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from tests.nn.ecosystem_cases import NAMES, build, given, oracle, results


def assert_near(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    worst, scale = (got.double() - want.double()).abs().max().item(), max(1.0, want.abs().max().item())
    assert worst <= 1e-5 * scale, f"{what}: off by {worst:.1e}, largest {scale:.1e}"


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a sharded tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


Change = Callable[[nn.Module, torch.optim.Optimizer], None]


def in_place(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)


def loaded(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    scaled = {name: t * 1.5 if t.is_floating_point() else t for name, t in model.state_dict().items()}  # indices stay
    model.load_state_dict(scaled)


def stepped(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    mode = model.training
    model.train()
    results(model, given())[0].square().sum().backward()
    clip_grad_norm_(model.parameters(), 10.0)
    optimiser.step()
    optimiser.zero_grad()
    model.train(mode)


def values(model: nn.Module, name: str) -> nn.Module:
    """An ordinary module with the sharded parameters as they are now."""
    plain = build(name)
    plain.load_state_dict({key: whole(tensor).clone() for key, tensor in model.state_dict().items()})
    return plain


def check_fsdp(name: str, change: Change, reshard: bool, fused: bool) -> None:
    model = fully_shard(build(name), reshard_after_forward=reshard).eval()
    optimiser = torch.optim.Adam(model.parameters(), 0.1, fused=fused)
    x = given()
    with torch.no_grad():
        for _ in range(3):
            results(model, x)
    for _ in range(2):
        change(model, optimiser)
        twin = values(model, name)
        for training in (False, True):
            model.train(training)
            for grad in (False, True):
                with torch.set_grad_enabled(grad):
                    for a, b in zip(results(model, x), results(oracle(twin), x.double()), strict=True):
                        assert_near(a.detach(), b.detach(), f"{name} {change.__name__}")
    results(model.train(), x)[0].square().sum().backward()
    results(twin, x)[0].square().sum().backward()
    for (key, p), (_, q) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert_near(whole(p.grad), q.grad, f"{name} {change.__name__} {key}")


def fsdp() -> None:
    for name in NAMES:
        for change in (in_place, loaded, stepped):
            for reshard in (True, False):
                check_fsdp(name, change, reshard, fused=reshard)


def ddp(rank: int) -> None:
    """The two start apart, see halves of the batch, and must have the gradients of all of it."""
    for name in NAMES:
        torch.manual_seed(rank)
        module = build(name)
        with torch.no_grad():
            for p in module.parameters():
                p.add_(rank)
        model = DistributedDataParallel(module)
        x = torch.randn(4, 4, 12, generator=torch.Generator().manual_seed(5))
        half = x[2 * rank : 2 * rank + 2] if getattr(module, "batch_first", False) else x[:, 2 * rank : 2 * rank + 2]
        alone = copy.deepcopy(module)
        results(alone, x)[0].square().mean().backward()
        for _ in range(2):
            model.zero_grad()
            results(model, half)[0].square().mean().backward()
            for (key, p), q in zip(module.named_parameters(), alone.parameters(), strict=True):
                assert_near(p.grad, q.grad, f"{name} {key}")
        torch.optim.SGD(model.parameters(), 0.1).step()
        model.eval()
        with torch.no_grad():
            for a, b in zip(results(model, x), results(oracle(module), x.double()), strict=True):
                assert_near(a, b, name)


if __name__ == "__main__":
    what, rank, size, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    fsdp() if what == "fsdp" else ddp(rank)
    dist.destroy_process_group()
    print("equal")
