"""Decode many files in separate processes: a file that hangs or crashes a decoder costs only itself."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kronecell.data.video import Limits, import_av
from kronecell.errors import DataError, printable

PATIENCE = 10.0  # seconds past the time limit; longer than a worker's own grace, so this is the last resort


def available_cores() -> int:
    """The cores this process may use, which in a container is fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_jobs(
    jobs: Sequence[dict[str, Any]], workers: int | None, limits: Limits, patience: float = PATIENCE
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Do all jobs; yields (position of the job, answer) as they finish, in any order.

    An answer has ``ok`` (a dict) or ``error`` (a text that names the file). A full disk is not the fault of a
    file: it ends all work with a DataError. Each job is {"task", "path", ...}.
    """
    import_av()  # say what is missing here, once, rather than once per file
    if workers is not None and workers < 1:
        raise DataError(f"cannot decode with {workers} workers; give at least 1")
    waiting = list(enumerate(jobs))[::-1]
    count = min(workers or available_cores(), max(len(jobs), 1))
    crew = [_Worker(limits, patience) for _ in range(count)]
    try:
        with selectors.DefaultSelector() as selector:
            for worker in crew:
                worker.take(waiting, selector)
            while any(worker.busy for worker in crew):
                due = min(worker.deadline for worker in crew if worker.busy)
                ready = {key.data for key, _ in selector.select(max(due - time.monotonic(), 0.0))}
                for worker in crew:
                    if worker.busy and (worker in ready or time.monotonic() >= worker.deadline):
                        result = worker.collect(worker in ready, selector)
                        if result is not None:
                            if "fatal" in result[1]:
                                raise DataError(result[1]["fatal"])
                            yield result
                            worker.take(waiting, selector)
    finally:
        for worker in crew:
            worker.stop()


class _Worker:
    """One decoding process, started when there is work and again after it had to be killed."""

    def __init__(self, limits: Limits, patience: float) -> None:
        self.limits, self.patience = limits, patience
        self.process: subprocess.Popen[bytes] | None = None
        self.position, self.path = -1, ""
        self.busy, self.deadline, self.received = False, 0.0, b""

    def take(self, waiting: list[tuple[int, dict[str, Any]]], selector: selectors.BaseSelector) -> None:
        """Start the next job, if there is one."""
        if not waiting:
            return
        if self.process is None:
            # The package comes from where this module was found, whatever the child would find by itself; the empty
            # first entry of its path, the current folder, must not hide a standard module.
            found = str(Path(__file__).resolve().parents[2])
            program = f"import sys; sys.path[0] = {found!r}; from kronecell.data.worker import main; main()"
            # Its own session, so that Ctrl-C reaches only the parent, which then ends its workers in order.
            self.process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert self.process.stdout is not None
            selector.register(self.process.stdout, selectors.EVENT_READ, self)
        self.position, job = waiting.pop()
        self.path = job["path"]
        self.busy, self.received = True, b""
        self.deadline = time.monotonic() + self.limits.time + self.patience
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({**job, "limits": asdict(self.limits)}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it died; collect() sees the end of its output and says so

    def collect(self, ready: bool, selector: selectors.BaseSelector) -> tuple[int, dict[str, Any]] | None:
        """The answer if it is complete; an error if the process died or its time is over; else None."""
        assert self.process is not None and self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
        self.received += data
        if self.received.endswith(b"\n"):
            self.busy = False
            return self.position, json.loads(self.received)
        if data:
            return None
        late = not ready or time.monotonic() > self.deadline - self.patience
        selector.unregister(self.process.stdout)
        code = self._end()
        self.busy = False
        if late:
            reason = f"takes longer than the time limit of {self.limits.time:g} s: its decoder was ended"
        else:
            reason = f"crashed its decoder ({'signal' if code < 0 else 'exit code'} {abs(code)})"
        return self.position, {"error": f"{printable(self.path)}: {reason}"}

    def _end(self) -> int:
        assert self.process is not None
        self.process.kill()
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self.process = None
        return code

    def stop(self) -> None:
        """End the process; a job under way is lost, which its temporary file makes harmless."""
        if self.process is not None:
            self._end()
