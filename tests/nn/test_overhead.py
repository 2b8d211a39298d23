"""How much Python a layer of the paper's size runs: to be constructed, forward, and in a training step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kronecell as kc

PACKAGE = str(Path(kc.__file__).parent)
PAPER = "kcp:m=8x20x20x18,n=4x4x4x4,K=4,CA=4,CB=2"
MODES = "m=8x20x20x18,n=4x4x4x4"
FORMATS = [
    PAPER,
    PAPER + ",tie=all",
    f"tt:{MODES},r=4",
    f"tr:{MODES},r=5",
    f"bt:{MODES},r=4,P=2",
    f"ht:{MODES},r=4",
    f"kt:{MODES},K=4",
    f"cp:{MODES},r=8",
    f"tucker:{MODES},r=2",
    "lowrank:m=57600,n=256,r=4",
]


def python_calls(run: Callable[[], object]) -> list[str]:
    """The files of this package in which a function, generator or lambda is entered, once for each time."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


def test_a_forward_of_the_paper_s_lstm_runs_at_most_60_functions_in_10_files_and_a_training_step_120() -> None:
    rnn = kc.LSTM(57600, 256, batch_first=True, input_format=PAPER)
    x = torch.zeros(16, 6, 57600)
    for _ in range(2):
        rnn(x)[0].sum().backward()
    calls = python_calls(lambda: rnn(x)[0].sum().backward())
    assert 0 < len(calls) <= 120
    rnn.eval()
    with torch.no_grad():
        rnn(x)
        calls = python_calls(lambda: rnn(x))
    assert 0 < len(calls) <= 60 and len({*calls}) <= 10


class Operations(TorchDispatchMode):
    """Notes the operations of torch that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("text", FORMATS)
def test_constructing_a_layer_searches_no_order_and_computes_nothing_but_its_parameters(text: str) -> None:
    sizes = [p.shape for p in kc.LSTM(57600, 256, input_format=text, device="meta").parameters()]
    with Operations() as operations:
        calls = python_calls(lambda: kc.LSTM(57600, 256, input_format=text, device="meta"))
    assert sizes and operations.names <= {
        "aten::empty.memory_format",
        "aten::empty_like",
        "aten::detach",
        "aten::uniform_",
    }
    assert len(calls) < 3000  # a search of the best order alone takes tens of thousands
