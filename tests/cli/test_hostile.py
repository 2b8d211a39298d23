"""Names and places that cannot be: one line on stderr, exit 2, no traceback."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from kronecell.cli.main import COMMANDS, main

CASES = {
    "report of a long name": ["report", "x" * 5000],
    "report of a null": ["report", "a\0b"],
    "training of a long name": ["train", "x" * 5000, "--data", "nowhere"],
    "data of a long name": ["train", "ucf11-kcp442", "--data", "x" * 5000],
    "store of a long name": ["data", "verify", "x" * 5000],
    "weights of a long name": ["inspect", "x" * 5000],
    "weights of a null": ["inspect", "a\0b.safetensors"],
    "weights are a device": ["inspect", "/dev/zero"],
    "format of 5,000 characters": ["count", "z" * 5000],
    "rank of 4,000 digits": ["count", "tt:m=4x3,n=2x2,r=" + "9" * 4000],
    "demo into a file": ["demo", "--quick", "--out", "file"],
    "demo into a place that cannot be": ["demo", "--quick", "--out", "/proc/nowhere"],
    "calibration that claims a terabyte": [
        "compress",
        "w.safetensors",
        "o",
        "--budget",
        "0.5",
        "--calibration",
        "c.npy",
    ],
}


@pytest.mark.parametrize("name", [*CASES])
def test_one_line_and_exit_2(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    save_file(torch.nn.LSTM(24, 16).state_dict(), "w.safetensors")
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 250), }"
    (tmp_path / "c.npy").write_bytes(
        b"\x93NUMPY\x01\0" + (118).to_bytes(2, "little") + header.ljust(117) + b"\n" + b"\0" * 64
    )
    with pytest.raises(SystemExit) as end:
        main(CASES[name])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "", (end.value.code, out, err)
    assert len(err.splitlines()) == 1 and len(err) < 1100 and err.startswith("kronecell: error: "), err


def test_a_replaced_clip_is_one_line_without_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def formats() -> None:
        warnings.warn("clip replaced by another: x", RuntimeWarning, stacklevel=1)

    monkeypatch.setitem(COMMANDS, "formats", formats)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with pytest.raises(SystemExit):
            main(["formats"])
    assert capsys.readouterr().err == "kronecell: warning: clip replaced by another: x\n"
