"""`kronecell data`: verify agrees with a count frame by frame, errors are one line, --json is one document."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import av
import pytest
from typer.testing import CliRunner

from kronecell import data
from kronecell.cli.data import app
from tests.data.videos import pictures, write_video


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def count_frames(path: Path) -> int:
    """Independent of the code under test."""
    with av.open(str(path)) as container:
        return sum(1 for _ in container.decode(video=0))


@pytest.mark.slow
def test_verify_of_the_surveillance_set_agrees_with_an_independent_count(shared: Path, tmp_path: Path) -> None:
    code, out, _ = run("verify", shared / "surveillance", "--manifest", tmp_path / "m.json", "--json")
    summary = json.loads(out)
    assert code == 0
    manifest = json.loads((tmp_path / "m.json").read_text())
    counts = {record["path"]: record["frames"] for record in manifest["clips"]}
    expected = {
        str(path.relative_to(shared / "surveillance")): count_frames(path)
        for path in sorted((shared / "surveillance").glob("*/*.mp4"))
    }
    assert len(expected) == summary["clips"] == 300 and summary["bad"] == []
    assert counts == expected
    assert summary["frames"]["total"] == sum(expected.values())
    assert {label: row["clips"] for label, row in summary["classes"].items()} == {"fight": 150, "noFight": 150}


def test_a_flat_folder_is_not_told_to_use_the_layout_that_it_was_given(tmp_path: Path) -> None:
    write_video(tmp_path / "clip.avi", pictures(3))
    code, _, err = run("verify", tmp_path, "--layout", "folder")
    assert code == 2 and "folder named like its class" in err and "--layout folder" not in err


def test_verify_names_bad_files_and_writes_the_manifest(tmp_path: Path, shared: Path) -> None:
    root = tmp_path / "set"
    for label in ("a", "b"):
        (root / label).mkdir(parents=True)
    write_video(root / "a" / "good.avi", pictures(7))
    (root / "a" / "bad.mp4").write_text("no")
    (root / "b" / "hurt.mp4").write_bytes((shared / "videos" / "decord_corrupted.mp4").read_bytes())
    with open(os.fsencode(root) + b"/b/\xe9.avi", "wb") as file:
        file.write(b"x")
    code, out, _ = run("verify", root, "--manifest", tmp_path / "m.json", "--workers", 1)
    assert code == 0
    assert "bad: 2" in out and "bad.mp4: cannot be decoded" in out and "\\xe9.avi" in out
    assert "hurt.mp4" in out.split("damaged")[1].split("bad:")[0]
    manifest = json.loads((tmp_path / "m.json").read_text())
    good = manifest["clips"][0]
    assert good["path"] == "a/good.avi" and good["frames"] == 7 and good["class"] == "a"
    assert good["sha256"] == hashlib.sha256((root / "a" / "good.avi").read_bytes()).hexdigest()
    assert good["size"] == (root / "a" / "good.avi").stat().st_size
    assert len(manifest["bad"]) == 2


def test_synthetic_prepare_and_open(tmp_path: Path) -> None:
    small = ("--clips-per-class", 2, "--groups", 2, "--frames", 6, "--width", 32, "--height", 24)
    code, out, _ = run("synthetic", tmp_path / "set", *small, "--json")
    assert code == 0 and json.loads(out)["clips"] == 22
    code, out, _ = run("prepare", tmp_path / "set", tmp_path / "store", "--width", 32, "--height", 24, "--json")
    facts = json.loads(out)
    assert code == 0 and facts["clips"] == 22 and facts["bad"] == []
    assert data.open_store(tmp_path / "store").manifest_hash == facts["hash"]
    code, out, _ = run("prepare", tmp_path / "set", tmp_path / "store", "--width", 32, "--height", 24)
    assert code == 0 and "22 clips of 11 classes" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "nowhere"),
        ("verify", ".", "--layout", "x"),
        ("prepare", "nowhere", "out"),
        ("extract", "nowhere.zip", "out"),
        ("synthetic", "new", "--groups", "9", "--clips-per-class", "2"),
        ("synthetic", "new", "--container", "mov"),
    ],
)
def test_errors_are_one_line_and_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments)
    assert code == 2 and out == ""
    assert err.startswith("kronecell: error: ") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["verify", "prepare", "extract", "synthetic"])
def test_help_has_an_example(command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0 and f"Example: kronecell data {command}" in " ".join(out.split())
