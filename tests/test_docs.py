"""Documentation that holds: code blocks run, commands exist, links lead somewhere, generated parts are fresh."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kronecell as kc
from kronecell.cli.main import build, main
from tests.run_cases import write_run

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


# Python ---------------------------------------------------------------------------------------------------------


class Classifier(torch.nn.Module):
    """What some pages call `classifier` or `model`: an LSTM and a head."""

    def __init__(self, rnn: torch.nn.Module, width: int) -> None:
        super().__init__()
        self.rnn, self.head = rnn, torch.nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def _export() -> dict[str, Any]:
    rnn = kc.LSTM(96, 16, batch_first=True, input_format="kcp:K=2,CA=2,CB=2")
    state = torch.zeros(1, 2, 16)
    return {"kc": kc, "torch": torch, "rnn": rnn, "x": torch.randn(2, 5, 96), "h_0": state, "c_0": state.clone(),
            "classifier": Classifier(rnn, 16)}  # fmt: skip


class Encoded(torch.nn.Module):
    """A model with a layer inside a part: encoder.rnn and head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Module()
        self.encoder.rnn = torch.nn.LSTM(96, 64, batch_first=True)
        self.head = torch.nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder.rnn(x)[0][:, -1])


def _compress() -> dict[str, Any]:
    model = Encoded()
    batches = [torch.randn(4, 5, 96) for _ in range(2)]
    loader = [(x, torch.randint(16, (4,))) for x in batches]
    return {"model": model, "torch": torch, "X": torch.randn(40, 96), "inputs": torch.randn(40, 96),
            "W": torch.randn(96, 64), "x": torch.randn(4, 5, 96), "batches": batches, "loader": loader,
            "valid_batches": loader, "loss": torch.nn.functional.cross_entropy, "student": model,
            "teacher": model}  # fmt: skip


def _data() -> dict[str, Any]:
    from kronecell.data import write_synthetic

    write_synthetic(Path("UCF11_updated_mpg"), size=(32, 24), clips_per_class=4, groups=2, frames=12)
    return {}


def _report() -> dict[str, Any]:
    write_run(Path("runs"), "ucf11-tt", "TT")
    write_run(Path("runs"), "ucf11-kcp442", "KCP(4,4,2)")
    return {}


def _scale_out() -> dict[str, Any]:
    return {"rendezvous": str(Path("rendezvous").resolve())}


def _recurrent() -> dict[str, Any]:
    return {"torch": torch, "frames": torch.randn(2, 3, 1152)}


def _deploy() -> dict[str, Any]:
    sizes = kc.Preprocessing(width=8, height=6, frames=2, segments=2)
    kc.save(kc.VideoClassifier(sizes.input_size, 8, 3, preprocessing=sizes), "runs/mine/fold0-seed0")
    Path("clips").mkdir()
    np.save("clips/one.npy", np.zeros((4, 6, 8, 3), np.uint8))
    return {}


# What a page takes for granted, and numbers that are made small: a page may speak of 57,600 pixels and 100 epochs.
SETUP: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/export.md": _export,
    "docs/compress.md": _compress,
    "docs/data.md": _data,
    "docs/deploy.md": _deploy,
    "docs/report.md": _report,
    "docs/scale-out.md": _scale_out,
    "docs/recurrent.md": _recurrent,
}
SMALLER = {
    "docs/recurrent.md": {"57600, 256": "1152, 64"},
    "docs/data.md": {"range(100)": "range(2)", '"ucf11-store")   #': '"ucf11-store", 32, 24, progress=False)   #'},
}
OPTIONAL = {"docs/export.md": ("onnx", "onnxruntime", "onnxscript"), "docs/data.md": ("av",)}


TUTORIAL = "docs/tutorial.md"  # its blocks and its commands run together, in tests/test_first_hour.py
WITH_PYTHON = [
    name for name in NAMES[1:] if name != TUTORIAL and any(kind == "python" for kind, _ in blocks(ROOT / name))
]
SLOW = ("docs/export.md",)  # ten seconds of ONNX; tests/test_export.py runs the same calls


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in WITH_PYTHON]
)  # the README's block is run by tests/test_readme.py
def test_every_python_block_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in OPTIONAL.get(name, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    scope: dict[str, Any] = {"__name__": "page", **SETUP.get(name, dict)()}
    for number, (kind, text) in enumerate(blocks(ROOT / name)):
        if kind == "python":
            for old, new in SMALLER.get(name, {}).items():
                text = text.replace(old, new)
            exec(compile(text, f"{name} block {number}", "exec", dont_inherit=True), scope)


# Commands -------------------------------------------------------------------------------------------------------


def commands(page: Path) -> list[str]:
    """Every line with a kronecell command in a block that is not Python, without its comment."""
    lines = []
    for kind, text in blocks(page):
        if kind not in ("python", "text"):
            joined = text.replace("\\\n", " ")
            lines += [line.split("  #")[0].strip() for line in joined.splitlines() if "kronecell " in line]
    return [line for line in lines if re.match(r"(\$ )?(kronecell|torchrun|python -m kronecell)\b", line)]


def arguments(line: str) -> list[str]:
    """What comes after the program's name."""
    words = shlex.split(line.removeprefix("$ "), comments=True)
    return words[words.index("kronecell") + 1 :]


ALL_COMMANDS = [(name, line) for name in NAMES for line in commands(ROOT / name)]
# Executed: whatever needs neither videos, nor a trained model, nor a browser.
RUNNABLE = ("count", "formats", "paper", "report", "sweep 'ucf50-kcp*'")


@pytest.mark.parametrize(("page", "line"), ALL_COMMANDS)
def test_every_command_is_understood(page: str, line: str) -> None:
    import typer

    command: Any = typer.main.get_command(build())
    rest = [word for word in arguments(line) if word != "..."]
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(command.name, rest)  # reads and checks all words, runs nothing


@pytest.mark.parametrize(
    "line",
    sorted({line for _, line in ALL_COMMANDS if line.startswith(tuple(f"kronecell {word}" for word in RUNNABLE))}),
)
def test_commands_that_need_no_data_run(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if "runs" in line:
        _report()
    with pytest.raises(SystemExit) as stop:
        main([*arguments(line), *(("--ranks", "2") if " figures " in line else ())])  # the rest takes half a minute
    out, err = capsys.readouterr()
    assert not stop.value.code, err
    assert out


@pytest.mark.parametrize("name", NAMES)
def test_commands_in_sentences_exist(name: str) -> None:
    from kronecell.cli.main import COMMANDS

    text = FENCE.sub("", (ROOT / name).read_text(encoding="utf-8"))
    for word in re.findall(r"`kronecell ([a-z]+)", text):
        assert word in COMMANDS, word


# Links and generated parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files(name: str) -> None:
    page = ROOT / name
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        if not target.startswith(("http://", "https://", "#", "mailto:")):
            assert (page.parent / target.split("#")[0]).exists(), target


def test_every_public_name_is_on_the_api_page() -> None:
    import kronecell.data

    page = (DOCS / "api.md").read_text()
    family = {name for name, value in vars(kc.errors).items() if isinstance(value, type)}  # ::: kronecell.errors
    for name in (*kc.__all__, *kronecell.data.__all__):
        assert name in family or re.search(rf"^(::: kronecell\..*\b|.*members: .*\b){name}\b", page, re.M), name


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_generated_parts_and_pictures_are_fresh() -> None:
    result = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason="the documentation tools are not installed (make docs installs them)")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    index = (tmp_path / "site" / "index.html").read_text()
    assert not re.search(r'(src|href)="https?://(?!github)', index), "the site fetches from elsewhere"
