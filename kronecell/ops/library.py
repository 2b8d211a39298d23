"""Loads the compiled operators, if they were built; without them every operator runs its pure-torch reference.

KRONECELL_KERNELS=0 in the environment leaves the library out, for tests and for comparisons.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import torch

LIBRARY = Path(__file__).resolve().parent.parent / "_kernels.so"


@lru_cache(maxsize=1)
def load() -> bool:
    """Register the compiled operators with torch's dispatcher; says whether they are there."""
    if os.environ.get("KRONECELL_KERNELS") == "0" or not LIBRARY.is_file():
        return False
    torch.ops.load_library(str(LIBRARY))
    return True


def why_not() -> str | None:
    """The reason why no kernels run, for people; None if they do."""
    if load():
        return None
    if os.environ.get("KRONECELL_KERNELS") == "0":
        return "KRONECELL_KERNELS=0 is set"
    return "they were not built: install a C++ compiler, then reinstall kronecell with pip install --no-build-isolation"
