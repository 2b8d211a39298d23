"""`python -m tests.training.long_runs WORK FOLDER`: does it for long and prints what the process held on the way."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import kronecell as kc
from kronecell.data import open_store
from kronecell.training.loop import Callbacks, Progress, fit
from kronecell.training.splits import loaders
from tests.training_cases import tiny

SAMPLES = 20
FORMAT = "kcp:m=6x8,n=4x8,K=2,CA=2,CB=2"


def held() -> dict[str, int]:
    """Memory in kilobytes, open files and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, tasks = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    return {"kilobytes": pages * os.sysconf("SC_PAGE_SIZE") // 1024, "files": files, "threads": tasks}


class Sampler(Callbacks):
    """Takes a sample at regular steps."""

    def __init__(self, steps: int) -> None:
        self.every, self.found = steps // SAMPLES, list[dict[str, int]]()

    def on_step(self, progress: Progress, steps: int) -> None:
        self.at(progress.steps)

    def at(self, step: int) -> None:
        if step % self.every == 0:
            self.found.append(held())


def train(folder: Path) -> Sampler:
    """2,000 steps as `kronecell train` makes them, read ahead by a thread, validated now and then, and saved."""
    from kronecell.training.checkpoint import save_checkpoint
    from kronecell.training.loop import make_optimiser

    experiment = tiny(epochs=667, eval_every=100, workers=1, checkpoint_seconds=2.0)
    store = open_store(folder)
    torch.manual_seed(0)
    model = experiment.build_model(len(store.classes))
    inside, outside = loaders(experiment, store, 0, 0)
    optimiser, out = make_optimiser(model, experiment.train_settings(0)), folder.with_name("saved")
    out.mkdir()

    def save(progress: Progress) -> None:
        save_checkpoint(out, model, optimiser, {}, progress.steps)

    sampler = Sampler(2000)
    fit(model, inside, outside, experiment.train_settings(0), optimiser=optimiser, save=save, callbacks=sampler)
    return sampler


def layer_steps(folder: Path) -> Sampler:
    """2,000 steps of training of recurrent layers with sequences of ever other lengths."""
    torch.manual_seed(0)
    rnn = kc.LSTM(48, 32, input_format=FORMAT, hidden_format="lowrank:r=4")
    optimiser, sampler = torch.optim.Adam(rnn.parameters()), Sampler(2000)
    for step in range(2000):
        optimiser.zero_grad()
        rnn(torch.randn(1 + step % 7, 1 + step % 5, 48))[0].square().mean().backward()
        optimiser.step()
        sampler.at(step)
    return sampler


def streams() -> list[Callable[[Tensor, Any], Any]]:
    """Modules that take one step."""
    torch.manual_seed(0)
    rnn = kc.LSTM(48, 32, input_format=FORMAT)
    cell = kc.GRUCell(48, 32, input_format=FORMAT)
    modules = [rnn.eval(), kc.freeze(rnn), kc.quantize(rnn)]
    steps: list[Callable[[Tensor, Any], Any]] = [
        lambda x, state, module=module: module(x[None], state)[1]  # type: ignore[misc]
        for module in modules
    ]
    return [*steps, lambda x, state: cell(x, state)]


@torch.no_grad()
def stream(folder: Path) -> Sampler:
    """20,000 steps of a stream, in turns by an ordinary, a frozen and a quantized layer and a cell."""
    steps, sampler, x = streams(), Sampler(20_000), torch.randn(1, 48)
    states: list[Any] = [None] * len(steps)
    for step in range(20_000):
        turn = step % len(steps)
        states[turn] = steps[turn](x, states[turn])
        sampler.at(step)
    return sampler


def threads(folder: Path) -> Sampler:
    """Four threads with streams of their own over the same modules; 20,000 steps in all."""
    steps, sampler, x = streams(), Sampler(20), torch.randn(1, 48)
    wanted: list[Tensor] = []

    @torch.no_grad()
    def work(turn: int, found: list[Any]) -> None:
        state = None
        for _ in range(250):
            state = steps[turn](x, state)
        found[turn] = state[0] if isinstance(state, tuple) else state

    for part in range(20):
        found: list[Any] = [None] * 4
        workers = [threading.Thread(target=work, args=(turn, found)) for turn in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        wanted = wanted or found
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
        sampler.at(part)
    return sampler


class Computed(Dataset[Tensor]):
    """Items that are made by a layer, in the worker's process."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.rnn = kc.freeze(kc.LSTM(48, 32, input_format=FORMAT))

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Tensor:
        with torch.no_grad():
            return self.rnn(torch.full((3, 1, 48), float(i) / 24))[0]  # type: ignore[no-any-return]


def workers(method: str, rounds: int) -> Sampler:
    """Loaders with two processes, again and again; what they compute has the bits of this process."""
    data, sampler = Computed(), Sampler(SAMPLES)
    wanted = torch.stack([data[i] for i in range(len(data))])
    for part in range(rounds):
        batches: Iterator[Tensor] = iter(
            DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context=method, shuffle=False)
        )
        assert torch.equal(torch.cat([*batches]), wanted)
        del batches
        sampler.at(part)
    return sampler


WORKS: dict[str, Callable[[Path], Sampler]] = {
    "train": train,
    "layers": layer_steps,
    "stream": stream,
    "threads": threads,
    "fork": lambda folder: workers("fork", SAMPLES),
    "spawn": lambda folder: workers("spawn", 8),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(WORKS[sys.argv[1]](Path(sys.argv[2])).found))
