"""`kronecell export --to c`: any saved module, budgets as people write them, one line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import kronecell as kc
from kronecell.cli.main import main
from kronecell.deploy.c_source.check import find_compiler


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved")
    sizes = kc.Preprocessing(width=8, height=5, channels=3, frames=3, segments=2)
    names, fmt = ("up", "down"), "kcp:m=4x6x5,n=2x4x2,K=2,CA=2,CB=2"
    kc.save(kc.VideoClassifier(120, 16, names, input_format=fmt, preprocessing=sizes).eval(), folder / "clips")
    kc.save(kc.LSTM(24, 64).eval(), folder / "lstm")
    return folder


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_a_report_is_made_before_anything_else(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "board"
    code, text, _ = call(capsys, "export", saved / "lstm", out, "--to", "c", "--report")
    assert code == 0 and "multiply-adds a step" in text and not out.exists()
    code, text, _ = call(capsys, "export", saved / "lstm", out, "--to", "c", "--report", "--json")
    facts = json.loads(text)
    assert facts["array_bytes"] == 4 * (4 * 64 * (24 + 64) + 4 * 64) and not out.exists()


@pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
def test_files_are_written_and_checked(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "board"
    options = ("--to", "c", "--name", "clips", "--flash", "64K", "--ram", "16KiB")
    code, text, err = call(capsys, "export", saved / "clips", out, *options)
    assert code == 0 and "checked with" in text and "8 x 5 x 3" in err
    assert sorted(path.name for path in out.iterdir()) == ["clips.c", "clips.h"]
    code, text, _ = call(capsys, "export", saved / "clips", "-o", out, *options, "--json")
    facts = json.loads(text)
    assert facts["check"]["difference"] < 1e-5 and facts["ram"] <= 16 * 1024


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--to", "c", "--flash", "30K"], "would fit"),
        (["--to", "c", "--flash", "many"], "--flash must be a number of bytes"),
        (["--to", "c", "--ram", "-1"], "--ram must be a number of bytes"),
        (["--to", "c", "--name", "a/b"], "identifier of C"),
        (["--to", "c", "--prefer", "fast"], "prefer must be one of"),
        (["--to", "c", "--out", "elsewhere"], "give one of them"),
        (["--report"], "belong to --to c"),
        (["--name", "clips"], "belong to --to c"),
        (["--to", "c", "--dense"], "belongs to --to onnx"),
        (["--to", "rust"], "--to must be one of onnx, c"),
    ],
)
def test_what_cannot_be_is_one_line(
    options: list[str], said: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, err = call(capsys, "export", saved / "lstm", tmp_path / "out", *options)
    assert code == 2 and text == "" and said in err and len(err.splitlines()) == 1
    assert [*tmp_path.iterdir()] == []


def test_what_is_no_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "export", tmp_path / "nothing", "--to", "c")
    assert code == 2 and "no model at" in err and len(err.splitlines()) == 1
