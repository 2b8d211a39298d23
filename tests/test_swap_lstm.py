"""The example a newcomer reads first does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "swap_lstm.py"


def test_the_example_learns_saves_loads_exports_and_runs(tmp_path: Path) -> None:
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # the model is small, and other tests may be running
    command = [sys.executable, str(EXAMPLE), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLE.parents[1], env=one_thread)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert re.search(r"W: 4,718,592 parameters became [\d,]{1,6}\n", text)
    accuracy = re.search(r"accuracy on new videos: (\d+)%", text)
    assert accuracy is not None and int(accuracy[1]) >= 90
    assert "bit for bit the same" in text and "same classes: True" in text
    assert (tmp_path / "rnn" / "config.json").is_file() and (tmp_path / "model.onnx").is_file()
