"""kc.export_c: what the C file computes is what the module computes, in the bytes that were announced."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import kronecell as kc
from kronecell.deploy.c_source.export import report_c
from tests.deploy.c_cases import COMPILER, compiled, drawn, steps_of

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
KCP = "kcp:m=4x6x5,n=2x4x2,K=2,CA=2,CB=2"


def _parity(seed: int, folder: Path) -> None:
    what, module = drawn(seed)
    exported = kc.export_c(module, folder, "net", prefer=("balance", "size", "speed")[seed % 3])
    assert exported.check is not None, what
    if isinstance(module, kc.VideoClassifier) or getattr(module, "bidirectional", False):
        return
    ram, got, expected = steps_of("net", module, folder, 3, torch.Generator().manual_seed(seed))
    assert int(ram) == exported.report.ram, what
    if not isinstance(module, (kc.LSTMCell, kc.GRUCell)):
        assert (got - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max())), what


@needs_compiler
@pytest.mark.parametrize("seed", range(12))
def test_the_file_computes_what_the_module_does(seed: int, tmp_path: Path) -> None:
    _parity(seed, tmp_path)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 220))
def test_the_file_computes_what_the_module_does_over_the_grid(seed: int, tmp_path: Path) -> None:
    _parity(seed, tmp_path)


@needs_compiler
@pytest.mark.parametrize(("normalise", "readout"), [("pixel", "last"), ("frame", "mean"), ("clip", "mean")])
def test_a_clip_has_the_chances_that_predict_gives(normalise: str, readout: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    sizes = kc.Preprocessing(width=8, height=5, channels=3, frames=3, segments=2)
    names = ("up", "down", 'a "quoted" */ name')
    model = kc.VideoClassifier(
        120, 16, names, input_format=KCP, preprocessing=sizes, pixel_mean=0.4, input_gain=3.0, normalise=normalise,
        readout=readout,
    )  # fmt: skip
    model = kc.quantize(model.eval(), bits=4)
    exported = kc.export_c(model, tmp_path, "clips")
    streams = "void clips_step(" in exported.header.read_text()
    assert streams == (normalise != "clip")  # the moments of a clip are known after its last frame
    clip = torch.randint(0, 256, (6, 5, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    expected = model.predict(clip)
    main = """#include <stdio.h>
#include "clips.h"
int main(void)
{
    static clips_state state;
    uint8_t frames[2 * 3 * CLIPS_INPUTS];
    float chances[CLIPS_OUTPUTS];
    if (fread(frames, 1, sizeof frames, stdin) != sizeof frames)
        return 1;
    printf("%d %d\\n", (int)clips_predict(&state, frames, 2, 3, chances), (int)sizeof state);
    fwrite(chances, sizeof(float), CLIPS_OUTPUTS, stdout);
    return 0;
}
"""
    numbers, chances = compiled(tmp_path, "clips", main, clip.numpy().tobytes()).split(b"\n", 1)
    label, ram = map(int, numbers.split())
    assert names[label] == expected.label and ram == exported.report.ram
    np.testing.assert_allclose(np.frombuffer(chances, np.float32), expected.chances, atol=1e-6)


@needs_compiler
def test_a_file_needs_no_library_and_serves_cpp(tmp_path: Path) -> None:
    """Not even math.h: whatever is not defined is what a compiler makes of loops."""
    rnn = kc.GRU(120, 16, input_format=KCP, hidden_format="lowrank:r=2").eval()
    kc.export_c(rnn, tmp_path, "net")
    assert COMPILER is not None
    subprocess.run([COMPILER, "-O2", "-c", "net.c", "-o", "net.o"], cwd=tmp_path, check=True)
    if shutil.which("nm"):
        undefined = subprocess.run(["nm", "-u", "net.o"], cwd=tmp_path, check=True, capture_output=True, text=True)
        assert {*undefined.stdout.split()} <= {"U", "memset", "memcpy", "memmove", "_GLOBAL_OFFSET_TABLE_"}
    if shutil.which("g++"):
        (tmp_path / "main.cpp").write_text('#include "net.h"\nint main() { net_state s; net_reset(&s); return 0; }\n')
        subprocess.run(["g++", "-Wall", "-Werror", "main.cpp", "net.o"], cwd=tmp_path, check=True)


@needs_compiler
def test_a_network_of_nan_says_nan(tmp_path: Path) -> None:
    """What is not a number in x is so in y, and no undefined behaviour."""
    rnn = nn.LSTM(3, 4).eval()
    kc.export_c(rnn, tmp_path, "net")
    main = """#include <stdio.h>
#include "net.h"
int main(void)
{
    net_state state;
    float x[3] = {0.0f, 0.0f, 0.0f}, y[4];
    net_reset(&state);
    x[1] /= x[0];
    net_step(&state, x, y);
    for (int k = 0; k < 4; k++)
        putchar(y[k] == y[k] ? 'n' : 'N');
    return 0;
}
"""
    assert compiled(tmp_path, "net", main, b"") == b"NNNN"


# Bytes ------------------------------------------------------------------------------------------------------------


@needs_compiler
def test_the_report_comes_before_the_file(tmp_path: Path) -> None:
    rnn = kc.LSTM(120, 16, 2, input_format=[KCP, None]).eval()
    before = report_c(rnn, "net")
    after = kc.export_c(rnn, tmp_path, "net").report
    assert before.record() == after.record()
    assert f"{before.macs:,} multiply-adds a step" in str(before)
    assert before.macs == sum(row.macs for row in before.rows)


def test_weights_take_the_bytes_of_their_bits() -> None:
    torch.manual_seed(0)
    rnn = nn.LSTM(64, 64).eval()
    weights, biases = 2 * 256 * 64, 4 * 256
    assert report_c(rnn).array_bytes == 4 * weights + biases
    for bits in (3, 4, 8):
        small = report_c(kc.quantize(rnn, bits=bits, group="row"))
        assert small.array_bytes == weights * bits // 8 + 2 * 4 * 256 + biases
        assert small.ram == report_c(rnn).ram == 4 * (64 + 64 + 256)  # h, c and the gates


def test_ranks_are_what_a_compressed_matrix_costs() -> None:
    rnn = kc.LSTM(57600, 64, input_format="kcp:m=8x20x20x18,n=4x4x2x2,K=4,CA=4,CB=2", shared=True).eval()
    dense = 4 * (57600 + 64) * 256
    found = report_c(rnn, prefer="size")
    assert found.array_bytes < dense / 500 and found.ram < 16 * 1024


def test_a_size_is_preferred_over_speed_and_the_other_way_round() -> None:
    rnn = kc.LSTM(3600, 64, input_format="tt:m=15x16x15,n=4x4x4,r=4").eval()
    size, speed = (report_c(rnn, prefer=prefer) for prefer in ("size", "speed"))
    assert size.array_bytes + size.ram <= speed.array_bytes + speed.ram
    assert speed.macs <= size.macs


# Budgets ----------------------------------------------------------------------------------------------------------


def test_a_budget_takes_another_order_if_only_that_keeps_it() -> None:
    rnn = kc.LSTM(3600, 64, input_format="tt:m=15x16x15,n=4x4x4,r=4").eval()
    size, speed = (report_c(rnn, prefer=prefer) for prefer in ("size", "speed"))
    assert size.ram < speed.ram
    assert report_c(rnn, prefer="speed", ram=speed.ram).prefer == "speed"
    assert report_c(rnn, prefer="speed", ram=speed.ram - 1).ram < speed.ram


@pytest.mark.parametrize(
    ("limits", "change"),
    [
        ({"flash": 200_000}, "kc.quantize(module, bits=8) would fit"),
        ({"flash": 100_000}, "kc.quantize(module, bits=6) would fit"),
        ({"flash": 40_000}, 'input_format="lowrank:r=32" and hidden_format="lowrank:r=32"'),
        ({"flash": 500_000, "ram": 1_000}, "hidden_size=32"),
        ({"flash": 10}, "no change"),
    ],
)
def test_a_network_over_its_budget_is_refused_with_what_fits(
    limits: dict[str, int], change: str, tmp_path: Path
) -> None:
    rnn = kc.LSTM(64, 128).eval()
    with pytest.raises(kc.CheckpointError, match="the budget is") as refused:
        kc.export_c(rnn, tmp_path / "out", "net", **limits)
    assert change in str(refused.value) and not (tmp_path / "out").exists()
    if "quantize(module, bits=8)" in change:
        assert report_c(kc.quantize(rnn, bits=8), flash=limits["flash"]).flash <= limits["flash"]


@pytest.mark.parametrize("limits", [{"flash": 0}, {"ram": -5}, {"flash": True}, {"ram": 1.5}])
def test_budgets_that_are_none(limits: dict[str, int]) -> None:
    with pytest.raises(kc.CheckpointError, match="positive number of bytes"):
        report_c(nn.Linear(2, 2), **limits)


# What is refused --------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("step", ["compile", "answer", "run"])
def test_a_file_that_is_not_right_is_not_left_behind(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that complains, whose programs fail, or whose programs answer something else."""
    does = {
        "compile": "echo 'net.c:1: error: no' >&2; exit 1",
        "answer": f'sed -i "s/1.0f - 2.0f/1.001f - 2.0f/" "${{@: -4:1}}"; exec {COMPILER} "$@"',
        "run": f'printf "int main(void) {{ return 3; }}" > "${{@: -3:1}}"; exec {COMPILER} "$@"',
    }
    fake = tmp_path / "cc"
    fake.write_text(f"#!/bin/bash\n{does[step]}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))
    out = tmp_path / "out"
    out.mkdir()
    (out / "net.c").write_text("old")
    with pytest.raises(kc.CheckpointError, match="nothing was written"):
        kc.export_c(nn.LSTM(4, 4).eval(), out, "net")
    assert [*out.iterdir()] == [out / "net.c"] and (out / "net.c").read_text() == "old"


def test_without_a_compiler_it_says_that_nothing_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    exported = kc.export_c(nn.LSTM(4, 4).eval(), tmp_path, "net")
    assert exported.check is None and "NOT CHECKED" in str(exported)
    assert exported.source.is_file() and exported.header.is_file()


@pytest.mark.parametrize(
    "name", ["", "2nd", "a b", "a-b", "../x", "a\nb", "int", "string", "Math", "é", "x" * 42, "a;b", "_x", None, 3]
)
def test_names_that_c_does_not_have(name: object, tmp_path: Path) -> None:
    with pytest.raises(kc.CheckpointError, match="identifier of C"):
        kc.export_c(nn.Linear(2, 2), tmp_path / "out", name)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def _nan(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        next(module.parameters())[0] = float("nan")
    return module


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (_nan(nn.LSTM(4, 4)), "not finite"),
        (_nan(kc.TensorLinear("tt:m=4x4,n=2x2,r=2")), "not finite"),
        (nn.Linear(4, 4).double(), "float32"),
        (nn.LSTM(4, 4).half(), "float32"),
        (nn.Linear(4, 4, device="meta"), "CPU"),
        (nn.Conv1d(2, 2, 1), "Conv1d"),
        (nn.Linear(1 << 14, 1 << 13), "compress or quantize"),
        (kc.TensorLinear("tt:m=1024x1024x1024x1024,n=2x2x2x2,r=1"), "1,099,511,627,776 inputs"),
        (kc.TensorLinear("tt:m=2x2x2x2,n=64x64x64x128,r=1", bias=False), "33,554,432 outputs"),
        (torch.zeros(2), "takes a torch module"),
        (kc.VideoClassifier(4, 4, 2, rnn=kc.LSTM(4, 4, bidirectional=True, batch_first=True)), "backwards"),
    ],
)
def test_modules_that_cannot_be_c(module: nn.Module, reason: str, tmp_path: Path) -> None:
    with pytest.raises(kc.CheckpointError, match=reason):
        kc.export_c(module, tmp_path / "out", "net")
    assert not (tmp_path / "out").exists()


def test_a_preference_that_is_none() -> None:
    with pytest.raises(kc.CheckpointError, match="prefer must be one of"):
        report_c(nn.Linear(2, 2), prefer="fast")


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", "/proc/nowhere", "a\0b"):
        with pytest.raises(kc.KronecellError):
            kc.export_c(nn.Linear(2, 2), place, "net")


def test_weights_that_float32_does_not_hold(tmp_path: Path) -> None:
    """Finite factors with a product that is not."""
    layer = kc.TensorLinear("tt:m=4x4,n=2x2,r=2").eval()
    with torch.no_grad():
        for factor in layer.factors().values():
            factor.fill_(3e38)
    with pytest.raises(kc.CheckpointError, match="nothing was written"):
        kc.export_c(layer, tmp_path / "out", "net", prefer="speed")
    assert not (tmp_path / "out").exists()
