"""The machine and the versions a result came from; no person, host or path is named."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from kronecell.ops.library import load

PACKAGES = ("kronecell", "torch", "numpy", "safetensors", "opt_einsum", "av")


def environment(world_size: int = 1, device: str = "cpu") -> dict[str, Any]:
    """What a reader needs to judge a time, and to get the same bits again."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "compiled kernels": load(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": world_size,
        "device": device,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
