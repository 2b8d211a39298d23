"""The paper's simulation of parallel computing: the K branches of Algorithm 1 one after the other, or at once.

One row x meets the matrices D_k^(i) = A_k^(i) (x) B_k^(i) of branch k; the branches are summed after every pair of
modes. `serial` runs them in a loop, `threads` and `processes` at the same time (workers are started before the clock,
the paper counted their start), `batched` is our separable order: one call, no D at all.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kronecell.errors import KronecellError
from kronecell.formats import KCP
from kronecell.training.paper_settings import SETTINGS

K = {"UCF11": 4, "UCF50": 6}
RANKS = (2, 4, 8, 16, 32, 48, 64, 80, 100)
CHUNK = 1 << 22  # elements of the largest intermediate
WAYS = ("serial", "threads", "processes", "batched")

_factors: dict[str, Tensor] = {}  # of a worker process, set once when it starts


@dataclass(frozen=True)
class Study:
    """Median seconds of one product by way, at one CP rank."""

    dataset: str
    C: int
    seconds: dict[str, float]


def study(
    dataset: str,
    ranks: Sequence[int] = RANKS,
    repeats: int = 3,
    say: Callable[[str], object] = lambda text: None,
) -> list[Study]:
    """Measure all ways at every rank."""
    if dataset not in K:
        raise KronecellError(f"unknown data set {dataset!r}; the paper's simulation has {', '.join(K)}")
    s, branches, results = SETTINGS[dataset], K[dataset], []
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the branches are what runs at once; threads inside a product would hide it
    try:
        for C in ranks:
            fmt = KCP(s.m, s.n, branches, C, C)
            results.append(Study(dataset, C, _measure(fmt, repeats)))
            text = ", ".join(f"{way} {1e3 * t:.1f} ms" for way, t in results[-1].seconds.items())
            say(f"{dataset}, C = {C}: {text}")
    finally:
        torch.set_num_threads(before)
    return results


def _measure(fmt: KCP, repeats: int) -> dict[str, float]:
    factors = fmt.init(torch.Generator().manual_seed(0))
    x = torch.randn(fmt.M, generator=torch.Generator().manual_seed(1))
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    numpy = {name: tensor.numpy() for name, tensor in factors.items()}
    with (
        ThreadPoolExecutor(fmt.K) as threads,
        ProcessPoolExecutor(fmt.K, context, _set_factors, (numpy,)) as processes,
    ):
        ways: dict[str, Callable[[], Tensor]] = {
            "serial": lambda: serial(fmt, x, factors),
            "threads": lambda: _at_once(fmt, x, threads, _ThreadTask(factors)),
            "processes": lambda: _at_once(fmt, x, processes, _process_task),
            "batched": lambda: fmt.matmul(x, factors, order="separable"),
        }
        expected = ways["batched"]()
        seconds = {}
        for way, product in ways.items():
            error = float((product() - expected).norm() / expected.norm())  # also the warm-up
            if not error < 1e-3:
                raise KronecellError(f"{way} differs from batched by {error:.1e} at C = {fmt.CA}")
            times = []
            for _ in range(repeats):
                started = time.perf_counter()
                product()
                times.append(time.perf_counter() - started)
            seconds[way] = median(times)
    return seconds


def serial(fmt: KCP, x: Tensor, factors: dict[str, Tensor]) -> Tensor:
    """x W by Algorithm 1, branch after branch."""
    state = x.reshape(fmt.m)
    for pair in range(fmt.d // 2):
        state = sum((branch(fmt, state, factors, pair, k) for k in range(fmt.K)), torch.zeros(()))
    return state.reshape(-1)


def branch(fmt: KCP, state: Tensor, factors: dict[str, Tensor], pair: int, k: int) -> Tensor:
    """One branch over one pair of modes: the two modes in front leave, the two output modes come at the end."""
    one, two = 2 * pair + 1, 2 * pair + 2
    D = [
        torch.einsum("ma,nb->mnab", factors[f"A{i}"][k], factors[f"B{i}"][k]).flatten(2)  # (m, n, C^2)
        for i in (one, two)
    ]
    m1, m2 = state.shape[0], state.shape[1]
    rest = state.reshape(m1, m2, -1)
    # A few columns at a time: with both CP indices open, all of them at C = 100 would take gigabytes.
    columns = max(1, CHUNK // (m2 * D[0].shape[1] * D[0].shape[2]))
    closed = []
    for part in rest.split(columns, dim=2):
        open_ranks = torch.tensordot(part, D[0], ([0], [0]))  # (m2, columns, n1, C^2)
        closed.append(torch.einsum("jrnc,jpc->rnp", open_ranks, D[1]))  # (columns, n1, n2)
    return torch.cat(closed).reshape(*state.shape[2:], fmt.n[one - 1], fmt.n[two - 1])


def _at_once(fmt: KCP, x: Tensor, pool: Executor, task: Callable[..., Any]) -> Tensor:
    """The branches of a pair at the same time; the sum waits for all of them, once per pair."""
    state = x.reshape(fmt.m)
    for pair in range(fmt.d // 2):
        parts = [pool.submit(task, fmt, state.numpy(), pair, k) for k in range(fmt.K)]
        state = sum((torch.from_numpy(part.result()) for part in parts), torch.zeros(()))
    return state.reshape(-1)


class _ThreadTask:
    def __init__(self, factors: dict[str, Tensor]) -> None:
        self.factors = factors

    def __call__(self, fmt: KCP, state: Any, pair: int, k: int) -> Any:
        return branch(fmt, torch.from_numpy(state), self.factors, pair, k).numpy()


def _set_factors(factors: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    _factors.update({name: torch.from_numpy(array) for name, array in factors.items()})


def _process_task(fmt: KCP, state: Any, pair: int, k: int) -> Any:
    return branch(fmt, torch.from_numpy(state), _factors, pair, k).numpy()
