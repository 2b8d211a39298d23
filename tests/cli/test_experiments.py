"""Packaged experiments are listed and copied; own files take the same defaults; a sweep asks and stops."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kronecell.cli.main import COMMANDS, PANELS, main
from kronecell.data import Store
from kronecell.deploy import records
from kronecell.training.experiment import Experiment, list_experiments, load_experiment
from kronecell.training.run import run, run_folder
from tests.training_cases import store, tiny, toml_file  # noqa: F401


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_a_copy_is_the_experiment_with_room_for_own_classes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, "experiments", "copy", "ucf11-kcp442-shared", "mine.toml")
    mine, theirs = load_experiment("mine.toml"), load_experiment("ucf11-kcp442-shared")
    assert code == 0 and "kronecell train mine.toml" in out
    assert (mine.format, mine.epochs, mine.classes, mine.name) == (theirs.format, theirs.epochs, 0, "mine")
    code, _, err = call(capsys, "experiments", "copy", "ucf11-kcp442-shared", "mine.toml")
    assert code == 2 and "--force" in err
    code, out, _ = call(capsys, "experiments")
    assert code == 0 and "ucf11-kcp442-shared" in out
    code, out, _ = call(capsys, "experiments", "list", "ycf-*", "--json")
    assert {entry["name"] for entry in json.loads(out)} == set(list_experiments("ycf-*"))


def test_a_file_anywhere_takes_the_packaged_defaults_and_recipes(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('dataset = "surveillance"\nformat = "tt:r=3"\n')
    own, packaged = load_experiment(str(tmp_path / "own.toml")), load_experiment("surveillance-tt")
    for name in ("width", "height", "epochs", "schedule", "learning_rate", "normalise", "shared"):
        assert getattr(own, name) == getattr(packaged, name), name
    assert own.format.startswith("tt:m=") and own.weight_format().M == 3600
    assert tiny(format="kcp:K=2,CA=2,CB=2", channels=1).weight_format().M == 32 * 24


def test_other_data_are_not_recorded_as_the_papers(
    store: Store,  # noqa: F811
    tmp_path: Path,
) -> None:
    experiment = tiny(dataset="UCF11", epochs=1)
    assert run(experiment, store, tmp_path, show=False)["dataset"] == "videos"
    config = (run_folder(tmp_path, experiment, 0, 0) / "config.toml").read_text()
    assert 'dataset = "videos"' in config
    assert run(experiment, store, tmp_path, show=False)["dataset"] == "videos"  # finished: read again


def test_classes_are_checked_before_anything_is_decoded(
    capsys: pytest.CaptureFixture[str],
    store: Store,  # noqa: F811
    tmp_path: Path,
) -> None:
    videos = store.manifest["root"]
    words = ("train", toml_file(tmp_path, classes=5), "--data", videos, "--out", tmp_path / "runs")
    code, _, err = call(capsys, *words)
    assert code == 2 and "has 11 classes (blink" in err and not (tmp_path / "runs").exists()


def test_a_run_that_never_made_a_step_can_be_corrected(
    capsys: pytest.CaptureFixture[str],
    store: Store,  # noqa: F811
    tmp_path: Path,
) -> None:
    folder = tmp_path / "runs" / "tiny" / "fold0-seed0"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(tiny(epochs=7).to_toml())  # stopped before its first checkpoint
    words = ("train", toml_file(tmp_path, epochs=1), "--data", store.root, "--out", tmp_path / "runs")
    assert call(capsys, *words)[0] == 0
    code, _, err = call(capsys, *words, "--set", "epochs=2")
    assert code == 2 and "was started with other settings" in err


def test_a_sweep_of_many_runs_needs_yes_and_quiet_says_nothing(
    capsys: pytest.CaptureFixture[str],
    store: Store,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    words = ("sweep", toml_file(tmp_path), "--data", store.root, "--seeds", ",".join(map(str, range(11))))
    code, _, err = call(capsys, *words)
    assert code == 2 and "22 runs of 1 experiments: --yes starts that many" in err
    words = ("train", toml_file(tmp_path, epochs=1), "--data", store.root, "--out", tmp_path / "runs")
    code, out, err = call(capsys, *words, "--quiet", "--json")
    assert code == 0 and err == "" and json.loads(out)["experiment"] == "tiny"


@pytest.mark.slow
def test_a_sweep_stops_when_a_run_is_refused(
    capsys: pytest.CaptureFixture[str],
    store: Store,  # noqa: F811
    tmp_path: Path,
) -> None:
    experiment = toml_file(tmp_path, batch_size=8, classes=5)
    code, out, err = call(capsys, "sweep", experiment, "-d", store.root, "-o", tmp_path / "runs", "--json")
    rows = json.loads(out)
    assert code == 1 and [row["state"] for row in rows] == ["failed", "not started"] and "was refused" in err


def test_without_a_terminal_every_validated_epoch_is_a_line(
    capsys: pytest.CaptureFixture[str],
    store: Store,  # noqa: F811
    tmp_path: Path,
) -> None:
    words = ("train", toml_file(tmp_path, epochs=3, eval_every=1), "--data", store.root, "--out", tmp_path / "runs")
    _, _, err = call(capsys, *words)
    assert [len(re.findall(rf"epoch {n}/3: loss .* accuracy", err)) for n in (1, 2, 3)] == [1, 1, 1]
    assert "44 of 44 clips have fewer than 60 frames" in err


def test_help_is_in_panels_and_shells_complete() -> None:
    assert sorted(name for names in PANELS.values() for name in names) == sorted(COMMANDS)
    command = [sys.executable, "-m", "kronecell"]
    text = subprocess.run([*command, "-h"], capture_output=True, text=True, check=True).stdout
    assert all(panel in text for panel in PANELS)
    environment = {"_KRONECELL_COMPLETE": "complete_bash", "COMP_WORDS": "kronecell pred", "COMP_CWORD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **environment})
    assert done.stdout.strip() == "predict"


def test_every_setting_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "experiments", "settings")
    assert code == 0
    for field in dataclasses.fields(Experiment):
        (line,) = [line for line in out.splitlines() if line.split("  ")[0].strip() == field.name]
        assert len(line.split()) > 3, field.name
    code, out, _ = call(capsys, "experiments", "settings", "--json")
    facts = json.loads(out)
    assert code == 0 and [fact["name"] for fact in facts] == [field.name for field in dataclasses.fields(Experiment)]
    assert all(fact["meaning"] and fact["change"] and records.parse_toml(f"x = {fact['default']}") for fact in facts)
