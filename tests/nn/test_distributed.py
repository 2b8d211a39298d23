"""FSDP2 and DDP over our layers: values and gradients of the dense module, never those of older parameters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("what", "size"), [("fsdp", 1), ("ddp", 2)])
def test_every_layer_is_right_in_several_processes(what: str, size: int, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.nn.distributed_worker", what]
    root = Path(__file__).resolve().parents[2]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=root,
        )
        for rank in range(size)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300)[0].decode() for process in processes]
    assert all(output.strip().endswith("equal") for output in outputs), "\n".join(outputs)[-3000:]
