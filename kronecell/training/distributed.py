"""The processes that train together: one, or those that torchrun started (gloo on the CPU, nccl on GPUs)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kronecell.errors import KronecellError

PATIENCE = timedelta(hours=6)  # rank 0 may decode a whole data set while the other ranks wait


@dataclass(frozen=True)
class World:
    """This process's rank among those that train together."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def totals(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the processes, in double precision."""
        if self.size == 1:
            return [*values]
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [*map(float, tensor)]

    def texts(self, text: str) -> list[str]:
        """The text of every process, in the order of ranks; as bytes, because objects would be pickled."""
        if self.size == 1:
            return [text]
        data = text.encode("utf-8", "surrogateescape")
        length = max(int(n) for n in self._gather(torch.tensor([len(data)], device=self.device)))
        padded = torch.zeros(max(length, 1), dtype=torch.uint8, device=self.device)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        parts = self._gather(padded)
        return [bytes(part.tolist()).rstrip(b"\0").decode("utf-8", "surrogateescape") for part in parts]

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor)
        return parts

    def wait(self) -> None:
        """Return when every process has called this."""
        if self.size > 1:
            dist.barrier()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model whose gradients are averaged over the processes."""
        if self.size == 1:
            return model
        return DistributedDataParallel(model, device_ids=[self.device] if self.device.type == "cuda" else None)


@contextmanager
def torchrun_world(device: str = "auto") -> Iterator[World]:
    """The world torchrun describes in the environment, or a single process; `device` is auto, cpu or cuda."""
    if device not in ("auto", "cpu", "cuda"):
        raise KronecellError(f"device must be auto, cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise KronecellError("device cuda was asked for, but torch sees no GPU here; use --device cpu")
    cuda = device != "cpu" and torch.cuda.is_available()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(device=torch.device("cuda" if cuda else "cpu"))
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    here = torch.device("cuda", local) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=PATIENCE)
    try:
        yield World(dist.get_rank(), dist.get_world_size(), here)
    finally:
        dist.destroy_process_group()
