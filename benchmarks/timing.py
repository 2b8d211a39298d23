"""Cases timed in turn in one run, so that a busy machine hurts all of them alike; what is reported are ratios."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median, quantiles

import torch

Call = Callable[[], object]

REPEATS = 15
SAMPLE_SECONDS = 0.001  # a sample of a quick case is a loop of at least this long
CASE_SECONDS = 4.0  # a case that has used up this much is not repeated any more
FEWEST = 3
QUICK_SECONDS = 0.2  # up to which a sample follows a call of the same case: a step of a training follows its like
SLOW_SECONDS = 0.8  # a case whose first call takes longer is not called again


@dataclass(frozen=True)
class Timing:
    """Seconds of a call: median and quartiles, and how many samples they come from."""

    seconds: float
    low: float
    high: float
    repeats: int

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def interleave(
    cases: Mapping[str, Call],
    repeats: int = REPEATS,
    case_seconds: float = CASE_SECONDS,
    give_up: float | None = None,
    always: Collection[str] = (),
    called: Mapping[str, float] | None = None,
    fewest: int = FEWEST,
) -> dict[str, list[float]]:
    """Samples of seconds per call of every case, taken in rounds: all cases once, then all again.

    The order is shuffled in every round: behind a case that fills the caches with something else the same product can
    take twice as long, so no case may always have the same neighbour.

    A case is repeated until it has used up `case_seconds`, but `fewest` times at least. One that takes long, or
    `give_up` times as long as the fastest, keeps the sample of its first call; the cases in `always` get all their
    repeats. A sample of a quick case follows a call of the same case that is not timed, as in use it follows its like:
    what it finds mapped of memory, and in the caches, is its own. `called` has the seconds of cases whose first call
    was made before.
    """
    called = called or {}
    first = {name: called[name] if name in called else sample(call, 1) for name, call in cases.items()}
    limit = min(SLOW_SECONDS, min(first.values()) * give_up if give_up is not None else float("inf"))
    loops, samples, quick, spent = {}, {}, {}, dict.fromkeys(cases, 0.0)
    for name, call in cases.items():
        if first[name] > limit and name not in always:
            samples[name] = [first[name]]
            continue
        samples[name] = []
        second = min(first[name], sample(call, 1)) if first[name] < 5 * QUICK_SECONDS else first[name]
        quick[name] = second < QUICK_SECONDS
        loops[name] = max(1, round(SAMPLE_SECONDS / max(second, 1e-7)))
    shuffled, turns = random.Random(0), [*loops]
    for _ in range(repeats):
        shuffled.shuffle(turns)
        for name in turns:
            count = loops[name]
            if name in always or spent[name] < case_seconds or len(samples[name]) < min(fewest, repeats):
                if quick[name]:
                    cases[name]()
                samples[name].append(sample(cases[name], count))
                spent[name] += samples[name][-1] * count
    return samples


def sample(call: Call, count: int) -> float:
    """Seconds per call. With one thread this is processor time, which other processes do not add to."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(count):
        call()
    return (clock() - start) / count


def summary(samples: list[float]) -> Timing:
    """Median and quartiles."""
    low, high = _quartiles(samples)
    return Timing(median(samples), low, high, len(samples))


def ratio(samples: Mapping[str, list[float]], case: str, reference: str) -> Timing:
    """How many times as long as the reference a case takes, round by round: median and quartiles of the ratios."""
    rounds = [a / b for a, b in zip(samples[case], samples[reference], strict=False)]
    return summary(rounds)


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


@contextmanager
def threads(count: int) -> Iterator[None]:
    """A number of threads for torch, put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def inference(call: Call) -> Call:
    """The call without gradients."""

    def run() -> None:
        with torch.no_grad():
            call()

    return run


def training(module: torch.nn.Module, x: torch.Tensor) -> Call:
    """Forward and backward to the parameters of a module, x itself without gradient."""
    parameters = [p for p in module.parameters() if p.requires_grad]

    def run() -> None:
        y = module(x)
        y = y[0] if isinstance(y, tuple) else y
        torch.autograd.grad(y.sum(), parameters, allow_unused=True)

    return run
