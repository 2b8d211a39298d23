"""The program of a decoding process: takes one job per line on stdin, answers each with one line on stdout.

Started by ``workers``. A decoder can hang or crash on a damaged file; here it takes nothing else down with it. Nothing
that is imported here may import torch: it would cost each decoding process two seconds and 300 MB.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kronecell.data.clipfile import Settings, store_clip
from kronecell.data.stills import source_hash
from kronecell.data.video import Limits, decode
from kronecell.deploy.atomic import WriteError
from kronecell.errors import DataError, KronecellError, printable

GRACE = 5.0  # seconds past the time limit before a stuck process ends itself


def inspect(path: str, limits: Limits) -> dict[str, Any]:
    """Decode everything and convert one frame; the facts of a file in a manifest."""
    video = decode(path, choose=lambda count: [0], limits=limits)
    try:
        size, sha256 = source_hash(path)
    except OSError as error:
        raise DataError(f"{printable(path)}: cannot be read: {error.strerror or error}") from None
    return {
        "frames": video.num_frames,
        "width": video.width,
        "height": video.height,
        "damage": video.damage,
        "size": size,
        "sha256": sha256,
    }


def store(path: str, limits: Limits, folder: str, settings: dict[str, int]) -> dict[str, Any]:
    """Decode into the store; the same facts as ``inspect``, and where the frames are."""
    name, header = store_clip(path, Path(folder), Settings(**settings), limits)
    return {
        "frames": header.num_frames,
        "width": header.source_width,
        "height": header.source_height,
        "damage": header.damage,
        "size": header.source_size,
        "sha256": header.source_sha256,
        "file": name,
        "crc32": header.crc32,
    }


TASKS: dict[str, Callable[..., dict[str, Any]]] = {"inspect": inspect, "store": store}


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job; a fault of the data is an answer too."""
    arguments = dict(job)
    task = TASKS[arguments.pop("task")]
    limits = Limits(**arguments.pop("limits"))
    # A C thread that needs no interpreter lock: it ends this process even if the decoder never returns.
    faulthandler.dump_traceback_later(limits.time + GRACE, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
    try:
        return {"ok": task(limits=limits, **arguments)}
    except WriteError as error:
        return {"fatal": str(error)}
    except KronecellError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": f"{printable(arguments['path'])}: needs more memory than there is"}
    finally:
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    """Answer jobs until stdin closes, which it also does when the parent is killed."""
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()
