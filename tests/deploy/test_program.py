"""kc.export_program: a program that runs without this package's Python, and as a package of AOTInductor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import kronecell as kc
from kronecell.ops.library import LIBRARY, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no compiled kernels: {why_not()}")

KCP = "kcp:m=24x24,n=4x4,K=2,CA=2,CB=2"
MODULES = {
    "lstm": lambda: kc.LSTM(64, 32, 2, bidirectional=True, input_format="tt:r=2", hidden_format="lowrank:r=2"),
    "lstm-projected": lambda: kc.LSTM(64, 32, proj_size=8, hidden_format="tt:r=2"),
    "lstm-doped": lambda: kc.LSTM(64, 32, input_format="doped:0.05+tt:r=2"),
    "gru": lambda: kc.GRU(64, 32, 2, input_format="tr:r=2", hidden_format="lowrank:r=2"),
    "lstm-4-bits": lambda: kc.quantize(kc.LSTM(64, 32, input_format="tt:r=2").eval(), bits=4),
    "gru-8-bits": lambda: kc.quantize(kc.GRU(64, 32).eval(), bits=8),
    "classifier": lambda: kc.VideoClassifier(576, 16, 3, input_format=KCP, normalise="frame"),
    "linear": lambda: kc.TensorLinear("kcp:m=8x8,n=4x4,K=2,CA=2,CB=2"),
    "cell": lambda: kc.LSTMCell(64, 32, input_format="ht:r=2"),
}
ALONE = """
import sys, torch
torch.ops.load_library(sys.argv[1])
given, found = torch.load(sys.argv[3]), []
if sys.argv[4] == "aoti":
    run = torch._inductor.aoti_load_package(sys.argv[2])
else:
    run = torch.export.load(sys.argv[2]).module()
with torch.no_grad():
    for x in given:
        y = run(x)
        found.append(y[0] if isinstance(y, tuple) else y)
assert "kronecell" not in sys.modules
torch.save(found, sys.argv[3])
"""


def _inputs(name: str, *shape: int) -> torch.Tensor:
    if name == "classifier":
        return torch.randint(0, 256, (*shape, 576), dtype=torch.uint8)
    return torch.randn(*shape, 64) if name not in ("linear", "cell") else torch.randn(shape[0], 64)


def _run_alone(folder: Path, file: Path, inputs: list[torch.Tensor], how: str) -> list[torch.Tensor]:
    """What a process without this package makes of the file."""
    torch.save(inputs, folder / "tensors.pt")
    command = [sys.executable, "-c", ALONE, str(LIBRARY), str(file), str(folder / "tensors.pt"), how]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(folder / "tensors.pt")


@pytest.mark.parametrize("name", [*MODULES])
def test_a_program_computes_what_the_module_does_at_other_sizes(name: str) -> None:
    torch.manual_seed(0)
    module = MODULES[name]().eval()
    dynamic = {0: Dim("first")} if name in ("linear", "cell") else {0: Dim("first"), 1: Dim("second")}
    program = kc.export_program(module, (_inputs(name, 5, 3),), (dynamic,)).module()
    for shape in ((5, 3), (2, 7)):
        x = _inputs(name, *shape)
        with torch.no_grad():
            got, expected = program(x), module(x)
        got, expected = (y[0] if isinstance(y, tuple) else y for y in (got, expected))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_program_needs_the_library_of_operators_and_no_python_of_ours(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = MODULES["lstm"]().eval()
    program = kc.export_program(module, (_inputs("lstm", 5, 3),), ({0: Dim("time"), 1: Dim("batch")},))
    torch.export.save(program, tmp_path / "program.pt2")
    inputs = [_inputs("lstm", 5, 3), _inputs("lstm", 9, 1)]
    found = _run_alone(tmp_path, tmp_path / "program.pt2", inputs, "export")
    with torch.no_grad():
        torch.testing.assert_close(found, [module(x)[0] for x in inputs], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch's compiler itself
@pytest.mark.parametrize("name", ["lstm", "gru-8-bits", "classifier"])
def test_a_package_of_aotinductor_runs_without_us(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = MODULES[name]().eval()
    program = kc.export_program(module, (_inputs(name, 5, 3),), ({0: Dim("first"), 1: Dim("second")},))
    compiled = tmp_path / "model.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(compiled))
    inputs = [_inputs(name, 5, 3), _inputs(name, 3, 6)]
    found = _run_alone(tmp_path, compiled, inputs, "aoti")
    with torch.no_grad():
        outputs = [module(x) for x in inputs]
    expected = [y[0] if isinstance(y, tuple) else y for y in outputs]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("module", "example", "reason"),
    [(torch.zeros(2), (torch.zeros(2),), "torch module"), (nn.Linear(2, 2), torch.zeros(2), "a tuple of inputs")],
)
def test_what_cannot_be_a_program_is_refused(module: nn.Module, example: tuple[torch.Tensor], reason: str) -> None:
    with pytest.raises(kc.CheckpointError, match=reason):
        kc.export_program(module, example)
