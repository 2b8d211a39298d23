"""Writing a file so that a reader sees the old one or the whole new one, never a part."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from kronecell.errors import KronecellError


def write_atomically(target: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside the target, sync it, and rename it over the target."""
    target = Path(target)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise KronecellError(f"cannot write {target}: {error.strerror or error}") from None
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError as error:
        raise KronecellError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
