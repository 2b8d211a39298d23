"""Thousands of steps: memory, open files and threads stay what they were after the first few hundred."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from kronecell.data import Store
from tests.training.long_runs import WORKS
from tests.training_cases import store  # noqa: F401

NOISE = 3072  # kilobytes: of 1,500 steps, two for each


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("work", WORKS)
def test_nothing_grows(work: str, store: Store) -> None:  # noqa: F811
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.long_runs", work, str(store.root)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    samples = json.loads(done.stdout.splitlines()[-1])
    settled = samples[len(samples) // 4 :]
    early, late = settled[: len(settled) // 3], settled[-(len(settled) // 3) :]
    for what in ("files", "threads"):
        assert max(s[what] for s in late) <= max(s[what] for s in early), (what, samples)
    growth = median(s["kilobytes"] for s in late) - median(s["kilobytes"] for s in early)
    assert growth < NOISE, samples
