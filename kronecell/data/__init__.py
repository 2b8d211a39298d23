"""Video data: from folders of videos to batches of (clip, 6 frames, 57,600).

find_dataset -> prepare (decode once) -> make_folds -> Loader; write_synthetic makes a data set where there is none.
A name is imported when it is first used: only the Loader needs torch, and a decoding process must start without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kronecell.data.archives import extract
    from kronecell.data.cache import Store, open_store, prepare
    from kronecell.data.clips import PIXEL_SCALE, training_frames, validation_frames
    from kronecell.data.datasets import Clip, Dataset, find_dataset
    from kronecell.data.folds import make_folds
    from kronecell.data.loader import Batch, Loader
    from kronecell.data.manifest import BadFile
    from kronecell.data.synthetic import MOTIONS, write_synthetic
    from kronecell.data.verification import Verification, verify
    from kronecell.data.video import Limits, Video, decode

_CONTENTS = {
    "archives": ("extract",),
    "cache": ("Store", "open_store", "prepare"),
    "clips": ("PIXEL_SCALE", "training_frames", "validation_frames"),
    "datasets": ("Clip", "Dataset", "find_dataset"),
    "folds": ("make_folds",),
    "loader": ("Batch", "Loader"),
    "manifest": ("BadFile",),
    "synthetic": ("MOTIONS", "write_synthetic"),
    "verification": ("Verification", "verify"),  # not verify.py: the function would be hidden by its own module
    "video": ("Limits", "Video", "decode"),
}
_HOME = {name: module for module, names in _CONTENTS.items() for name in names}

__all__ = [
    "MOTIONS",
    "PIXEL_SCALE",
    "BadFile",
    "Batch",
    "Clip",
    "Dataset",
    "Limits",
    "Loader",
    "Store",
    "Verification",
    "Video",
    "decode",
    "extract",
    "find_dataset",
    "make_folds",
    "open_store",
    "prepare",
    "training_frames",
    "validation_frames",
    "verify",
    "write_synthetic",
]


def __getattr__(name: str) -> Any:
    if name in _CONTENTS:  # data.video.import_av without an import of data.video
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
