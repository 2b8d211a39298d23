"""The processes that train together: one, or those that torchrun started (gloo on the CPU, nccl on GPUs)."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from kronecell.errors import KronecellError

PATIENCE = timedelta(hours=6)  # rank 0 may decode a whole data set while the other ranks wait
ROLL_CALL = 4.0  # seconds in which every process that is alive says so, after one found that another is gone
LAST_RESORT = 15.0  # seconds after that in which a process that is stuck in a collective ends itself


class LostRank(KronecellError):
    """Another process of the training ended; `quiet` where a process of a lower rank says so already."""

    quiet = False


class RollCall:
    """Who is alive, asked through the store that the processes met at, when a collective has failed.

    The error of a collective says that a connection closed, not whose: a process that is alive but waits for one that
    gave up sees the same. So a thread of each process answers when the alarm is raised; who does not is gone.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.done = threading.Event()
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        try:
            while not self.done.wait(1.0):
                if self.store.check(["alarm"]):
                    self.store.set(f"alive {self.rank}", "")
                    break
        except RuntimeError:  # the process that holds the store is gone: the collective fails, too
            pass
        if not self.done.wait(ROLL_CALL + LAST_RESORT):
            print(
                f"kronecell: rank {self.rank} waited for a rank that ended, and ends too", file=sys.stderr, flush=True
            )
            os._exit(2)

    def missing(self) -> dict[int, str]:
        """The processes that ended and why, as far as they could say."""
        try:
            self.store.set(f"alive {self.rank}", "")
            self.store.set("alarm", "")
            end = time.monotonic() + ROLL_CALL
            while time.monotonic() < end and not all(self.store.check([f"alive {r}"]) for r in range(self.size)):
                time.sleep(0.1)
            gone = [r for r in range(self.size) if not self.store.check([f"alive {r}"])]
            failed = [r for r in range(self.size) if self.store.check([f"failed {r}"])]
            reasons = dict.fromkeys(gone, "") | {r: self.store.get(f"failed {r}").decode() for r in failed}
            if self.rank == 0:
                time.sleep(1.0)  # the store may end with this process
        except RuntimeError:
            return {0: ""}
        return reasons

    def failed(self, reason: str) -> None:
        """This process ends for a reason of its own."""
        with suppress(RuntimeError):  # the store is gone, and with it whoever would ask
            self.store.set(f"failed {self.rank}", reason)


@dataclass(frozen=True)
class World:
    """This process's rank among those that train together."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    roll_call: RollCall | None = None

    def explained(self, error: BaseException) -> BaseException:
        """The error, or a LostRank if it is only the consequence of another process's end."""
        if self.roll_call is None or isinstance(error, LostRank):
            return error
        if not _of_a_collective(error):
            self.roll_call.failed(f"{type(error).__name__}: {error}")
            return error
        reasons = self.roll_call.missing()
        gone = sorted({*reasons} - {self.rank})
        if not gone:
            return error
        names = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))} of {self.size}"
        why = "; ".join(filter(None, (reasons[rank] for rank in gone))) or "killed, or out of memory"
        lost = LostRank(f"{names} ended ({why}); run again to continue from the last checkpoint")
        lost.quiet = self.rank != min({*range(self.size)} - {*gone}) or any(reasons.values())
        return lost

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
    store, rank, size = next(rendezvous("env://"))
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    roll_call = RollCall(dist.PrefixStore("roll call", store), rank, size)
    world = World(rank, size, here, roll_call)
    try:
        yield world
    except Exception as error:
        explained = world.explained(error)
        roll_call.done.set()
        if explained is error:
            raise
        raise explained from None
    roll_call.done.set()
    dist.destroy_process_group()


def _of_a_collective(error: BaseException) -> bool:
    """Whether an operation between processes failed; gloo raises plain RuntimeErrors."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and any(word in text for word in ("gloo", "nccl", "closed by peer", "connection"))
    )
