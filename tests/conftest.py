"""Settings that every test shares."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch loads: some virtual machines offer AMX and then end the process with an illegal instruction in any bf16
# product. Without AMX the results are the same.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import HealthCheck, settings

# Derandomised: the same cases on every machine and every run; a failure is reproducible without a database.
settings.register_profile(
    "kronecell", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kronecell")

torch.set_num_threads(1)  # the tensors of most tests are tiny; a second thread costs more than it brings

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared_paper() -> Path:
    """The folder with the paper's tables as data, kept beside the repository, not in it."""
    folder = SHARED / "paper"
    if not folder.is_dir():
        pytest.skip("the paper's tables are not beside this checkout (../shared/paper)")
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real videos, kept beside the repository, not in it."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("the real videos are not beside this checkout (../shared/data)")
    return folder
