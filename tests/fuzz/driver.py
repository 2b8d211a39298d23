"""Runs a target: an input may end well or in one of this package's errors, soon, and without much memory."""

from __future__ import annotations

import hashlib
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from kronecell.errors import CheckpointError, DataError, KronecellError
from tests.fuzz.targets import Target, quietly

CORPUS = Path(__file__).parent / "corpus"
SECONDS = 5.0
MEMORY = 200 << 20  # above the size of the input


class Hang(BaseException):
    """Longer than SECONDS."""


@contextmanager
def _limited() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang(f"longer than {SECONDS:g} s")

    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def fault_of(target: Target, content: bytes) -> str:
    """What this input breaks, or ''."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with _limited():
            quietly(target, content)
    except KronecellError as error:
        most = 300 if isinstance(error, CheckpointError | DataError) else 1000
        if len(str(error)) > most or "\n" in str(error):
            return f"a message of {len(str(error))} characters"
    except (Exception, Hang):
        return traceback.format_exc(limit=-6)
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 - len(content)
    return f"{used >> 20} MB of memory" if used > MEMORY else ""


def corpus(target: type[Target]) -> list[Path]:
    """Inputs that broke something once."""
    return sorted((CORPUS / target.name).glob("*")) if (CORPUS / target.name).is_dir() else []


def fuzz(target: Target, seeds: range | Iterator[int], until: float = float("inf")) -> tuple[int, list[str]]:
    """Try one mutation for each seed; returns how many were tried, and the faults, whose inputs are in the corpus."""
    faults: list[str] = []
    tried = 0
    for content in target.seeds[:1]:
        quietly(target, content)  # memory that the first use of anything takes is not the input's
    for seed in seeds:
        if time.monotonic() > until or len(faults) >= 5:
            break
        content = target.mutate(random.Random(f"{target.name} {seed}"))
        tried += 1
        fault = fault_of(target, content)
        if fault:
            path = CORPUS / target.name / hashlib.sha256(content).hexdigest()[:12]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            faults.append(f"{target.name}, seed {seed}, kept as {path.name}: {fault}")
            print(faults[-1], file=sys.stderr)
    return tried, faults
