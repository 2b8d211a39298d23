"""Files for one writer and many readers: a reader sees the old file or the whole new one, whatever happens.

Nothing here imports torch: the processes that decode videos write through this file.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kronecell.errors import KronecellError, printable

TEMPORARY = ".tmp-"  # followed by the process id; whatever still has it after a crash can be deleted


class WriteError(KronecellError):
    """The place to write to is at fault (full disk, no permission), not the data that should be written."""


class LockedError(KronecellError):
    """Another process holds the lock."""


def write_atomically(target: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside the target, sync it, and rename it over the target.

    Its permissions are those of any new file, also where the writer's library makes files for the owner alone.
    """
    target = Path(target)
    temporary = target.with_name(f"{TEMPORARY}{os.getpid()}-{target.name}")
    try:
        try:
            temporary.touch()
            mode = stat.S_IMODE(temporary.stat().st_mode)  # what the process's mask leaves
            write(temporary)
            if stat.S_IMODE(temporary.stat().st_mode) != mode:
                os.chmod(temporary, mode)
            _sync(temporary)
            os.replace(temporary, target)
            _sync(target.parent)  # makes the rename itself last through a power cut
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(f"cannot write {printable(target)}: {error.strerror or error}") from None


def remove_temporaries(folder: Path) -> None:
    """Delete what writers that were killed left behind."""
    with suppress(OSError):  # they take room and do no harm
        for path in folder.glob(".tmp*"):  # ours, and those that safetensors makes inside `write`
            path.unlink(missing_ok=True)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, or raise LockedError. The system releases it when this process ends, however it ends.

    A folder is locked itself, without a file in it; not on Windows, which cannot.
    Both modules are imported here because neither system has the other's.
    """
    try:
        # Not to wait: somebody may have put a pipe there. The file is held until the end of the block.
        if not path.is_dir():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NONBLOCK", 0), 0o666)
        elif sys.platform == "win32":
            descriptor = os.open(os.devnull, os.O_RDONLY)
        else:
            descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise WriteError(f"cannot write {printable(path)}: {error.strerror or error}") from None
    try:
        try:
            if sys.platform == "win32":
                import msvcrt

                if not path.is_dir():
                    msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LockedError(f"{printable(path)}: another process holds this lock") from None
        yield
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return  # Windows cannot open a folder to sync it
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
