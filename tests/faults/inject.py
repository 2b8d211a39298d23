"""Faults at an exact place: the n-th time that a process changes a file below a folder.

Places are counted by Python's audit events (open for writing, rename, remove, mkdir) and by fsync, so that the same
number is the same place in every run. A child does the work, because a fault may be its end. It is forked from a server
of its own: a child of the tests' process would inherit objects whose threads it has not, and wait for these for ever.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kronecell.errors import KronecellError

ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EROFS": errno.EROFS}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
SITE = "from tests.faults.inject import Faults\nFaults.from_environment()\n"


@dataclass(frozen=True)
class Fault:
    """What happens, and at which place: kill, torn, EIO (once), ENOSPC or EROFS (from then on), size, clock."""

    kind: str
    place: int = 0


@dataclass(frozen=True)
class Ending:
    """How the child ended: killed, its error, or neither; and how many places it came by."""

    killed: bool
    error: str
    places: int


class Faults:
    """Counts places in this process and makes the fault."""

    def __init__(self, root: Path, fault: Fault) -> None:
        self.root, self.fault, self.places = str(root), fault, 0
        sync = os.fsync

        def fsync(descriptor: int) -> None:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name.startswith(self.root):
                self.place(name)
            sync(descriptor)

        os.fsync = fsync
        sys.addaudithook(self.hear)
        if fault.kind == "clock":
            clock, start = time.time, time.time()
            time.time = lambda: start - 10 * (clock() - start)  # a day's adjustment, all the time
        if fault.kind == "size":
            resource.setrlimit(resource.RLIMIT_FSIZE, (fault.place, fault.place))
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    @staticmethod
    def from_environment() -> None:
        """For processes that the child starts: they have a count of their own."""
        if "KRONECELL_TEST_FAULT" in os.environ:
            root, kind, place = json.loads(os.environ["KRONECELL_TEST_FAULT"])
            Faults(Path(root), Fault(kind, place))

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = bool(flags & WRITING) if isinstance(flags, int) else "r" not in str(mode)
        else:
            path, writes = (arguments or ("",))[0], event in ("os.rename", "os.remove", "os.mkdir")
        if writes and isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self.root):
            self.place(os.fspath(path))

    def place(self, path: str) -> None:
        self.places += 1
        kind, at = self.fault.kind, self.fault.place
        if kind in ("kill", "torn") and self.places == at:
            if kind == "torn" and os.path.isfile(path):  # what the disk had not taken yet is lost
                os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        if kind in ERRORS and (self.places == at or (kind != "EIO" and self.places >= at > 0)):
            raise OSError(ERRORS[kind], os.strerror(ERRORS[kind]), path)


def in_child(work: Callable[[Path], object], root: Path, fault: Fault | None = None) -> Ending:
    """Do the work, which can be pickled, in a process of its own, with or without a fault."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.works"])
    receiver, sender = context.Pipe(duplex=False)
    arguments = (work, root, fault or Fault("none"), dict(os.environ), sender)
    child = context.Process(target=_child, args=arguments)
    child.start()
    sender.close()
    try:
        error, places = receiver.recv()
    except EOFError:
        error, places = "the child ended without a word", 0
    child.join()
    if child.exitcode and child.exitcode < 0:
        return Ending(True, f"signal {-child.exitcode}", 0)
    return Ending(False, error, places)


def _child(
    work: Callable[[Path], object], root: Path, fault: Fault, environment: dict[str, str], sender: Connection
) -> None:
    os.environ.clear()
    os.environ.update(environment)  # the server has that of its start
    faults, error = Faults(root, fault), ""
    try:
        work(root)
    except KronecellError as reason:
        error = f"one line: {reason}"
    except BaseException:
        error = traceback.format_exc()
    sender.send((error[:60_000], faults.places))
    sender.close()
    os._exit(0)
