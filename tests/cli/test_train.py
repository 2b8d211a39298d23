"""`train`, `sweep`, `demo` and `paper parallel` as people meet them; every mistake is one line and exit 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kronecell.cli.main import main
from kronecell.data import Store
from tests.training_cases import store, tiny, toml_file  # noqa: F401


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "epoch=3"], "unknown setting 'epoch' (did you mean 'epochs'?)"),
        (["--set", "epochs=many"], "epochs must be a whole number, got 'many'"),
        (["--set", "format=kcp:m=6x8x6x8,n=2x2x2x2,K=5000,CA=2,CB=2"], "K"),
        (["--set", "epochs"], "--set needs key=value"),
        (["--set", "classes=5"], "has 11 classes"),
        (["--set", "width=64", "--set", "format=dense"], "frames of 32 x 24"),
        (["--fold", "9"], "fold must be 0 to 1"),
        (["--data", "no/such/data"], "no data at no/such/data"),
        (["--out", "FILE/below"], "cannot write"),
        (["--out", "/proc/kronecell"], "cannot write"),  # a file system that nobody may write to
        (["--device", "abacus"], "device must be auto, cpu or cuda"),
    ],
)
def test_mistakes_are_one_line_exit_2_and_leave_nothing_behind(
    capsys: pytest.CaptureFixture[str],
    store: Store,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("a file, not a folder")
    experiment = toml_file(tmp_path)
    before = sorted(path for path in tmp_path.rglob("*"))
    code, out, err = call(capsys, "train", experiment, "--data", store.root, *arguments)
    assert code == 2 and out == ""
    assert err.startswith("kronecell: error: ") and err.count("\n") == 1 and message in err
    after = [path for path in sorted(tmp_path.rglob("*")) if path not in before]
    assert not [path for path in after if path.name in ("result.json", "metrics.jsonl", "checkpoint.json")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--fold", 9), "fold must be 0 to 1"),
        (("--set", "folds=0", "--fold", 5), "fold must be 0 to 4"),
        (("--set", "classes=5"), "has 11 classes"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_decoded(
    capsys: pytest.CaptureFixture[str],
    store: Store,  # noqa: F811
    tmp_path: Path,
    words: tuple[object, ...],
    message: str,
) -> None:
    videos = Path(store.manifest["root"])
    code, _, err = call(capsys, "train", toml_file(tmp_path), "--data", videos, "--out", tmp_path / "runs", *words)
    assert code == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_the_advice_of_an_error_can_be_followed_in_the_same_folder(
    capsys: pytest.CaptureFixture[str],
    store: Store,  # noqa: F811
    tmp_path: Path,
) -> None:
    words = ("train", toml_file(tmp_path, epochs=1), "--data", store.root, "--out", tmp_path / "runs")
    code, _, err = call(capsys, *words, "--set", "classes=5")
    assert code == 2 and "expects 5; --set classes=0 takes what the data has" in err
    code, out, _ = call(capsys, *words, "--set", "classes=0")
    assert code == 0 and "accuracy" in out


def test_an_unknown_experiment_and_a_broken_file_are_named(
    capsys: pytest.CaptureFixture[str],
    store: Store,  # noqa: F811
    tmp_path: Path,
) -> None:
    code, _, err = call(capsys, "train", "ucf11-kpc442", "--data", store.root)
    assert code == 2 and "did you mean 'ucf11-kcp442'" in err and err.count("\n") == 1
    (tmp_path / "broken.toml").write_text("epochs = = 3")
    code, _, err = call(capsys, "train", tmp_path / "broken.toml", "--data", store.root)
    assert code == 2 and "is not TOML" in err and err.count("\n") == 1


def test_train_decodes_a_folder_of_videos_itself_and_prints_the_result(
    capsys: pytest.CaptureFixture[str],
    store: Store,  # noqa: F811
    tmp_path: Path,
) -> None:
    videos = Path(store.manifest["root"])
    arguments = ("train", toml_file(tmp_path, epochs=1), "--data", videos, "--out", tmp_path / "runs")
    code, out, _ = call(capsys, *arguments)
    assert code == 0 and "accuracy" in out and "whole model" in out and "kronecell predict" in out
    assert "x fewer)" in out and "mean of the last 1 epoch " in out
    code, out, err = call(capsys, *arguments, "--json")  # finished: read, not trained again
    assert code == 0 and json.loads(out)["experiment"] == "tiny" and "was finished before" in err
    assert (tmp_path / "runs" / "stores" / "videos-32x24" / "manifest.json").is_file()


def test_predict_says_that_the_training_of_its_model_is_not_over(
    capsys: pytest.CaptureFixture[str],
    store: Store,  # noqa: F811
    tmp_path: Path,
) -> None:
    call(capsys, "train", toml_file(tmp_path, epochs=1), "--data", store.root, "--out", tmp_path)
    folder, clip = tmp_path / "tiny" / "fold0-seed0", next(Path(store.manifest["root"]).rglob("*.avi"))
    code, _, err = call(capsys, "predict", folder, clip)
    assert code == 0 and err == ""
    status = json.loads((folder / "status.json").read_text()) | {"state": "interrupted", "epochs": 4000}
    (folder / "status.json").write_text(json.dumps(status))
    code, _, err = call(capsys, "predict", folder, clip)
    assert code == 0 and "interrupted after 1 of 4,000 epochs" in err and "best epoch so far" in err
    assert call(capsys, "predict", folder, clip, "--quiet")[2] == ""


@pytest.mark.slow
def test_sweep_runs_everything_once_also_through_a_launcher(
    capsys: pytest.CaptureFixture[str],
    store: Store,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = toml_file(tmp_path, epochs=1)
    arguments = ["sweep", experiment, "--data", store.root, "--out", tmp_path / "runs", "--json"]
    code, out, _ = call(capsys, *arguments, "--dry-run")
    commands = json.loads(out)
    assert code == 0 and len(commands) == 2 and all("kronecell train" in line for line in commands)
    code, out, err = call(capsys, *arguments, "--nodes", "left,right", "--launcher", "env NODE={node} sh -c")
    rows = json.loads(out)
    assert code == 0, err
    assert [(row["fold"], row["state"]) for row in rows] == [(0, "finished"), (1, "finished")]
    assert {row["node"] for row in rows} == {"left", "right"}
    assert (tmp_path / "runs" / "tiny" / "fold1-seed0" / "result.json").is_file()


def test_sweep_refuses_patterns_and_numbers_that_mean_nothing(
    capsys: pytest.CaptureFixture[str],
    store: Store,  # noqa: F811
) -> None:
    for arguments, message in (
        (["nothing-*"], "no experiment matches"),
        (["ucf11-kcp442", "--seeds", "one", "--dry-run"], "--seeds must be numbers"),
    ):
        code, _, err = call(capsys, "sweep", *arguments, "--data", store.root)
        assert code == 2 and message in err and err.count("\n") == 1


def test_paper_parallel_agrees_between_all_ways_and_prints_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "parallel.svg"
    code, out, _ = call(
        capsys, "paper", "parallel", "--dataset", "ucf11", "--ranks", "2,3", "--repeats", 1, "--json", "--plot", target
    )
    rows = json.loads(out)
    assert code == 0 and [row["C"] for row in rows] == [2, 3]
    assert {"serial", "threads", "processes", "batched"} <= {*rows[0]}
    assert target.read_bytes().startswith(b"<?xml")
    code, _, err = call(capsys, "paper", "parallel", "--ranks", "two")
    assert code == 2 and "--ranks must be numbers" in err


def test_no_module_of_training_pickles() -> None:
    package = Path(sys.modules["kronecell"].__file__ or "").parent
    files = sorted((package / "training").glob("*.py"))
    assert files
    for path in files:
        text = path.read_text()
        assert "import pickle" not in text and "torch.save" not in text and "torch.load" not in text, path.name


def test_the_tiny_experiment_is_what_the_tests_say() -> None:
    assert tiny().input_size == 2304


def test_packaged_experiments_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, "train", "--list")
    assert code == 0 and "ucf11-kcp442" in out.split() and "defaults" not in out.split()
    code, _, err = call(capsys, "train", "ucf11-kcp442", "--data", "no-such-store")
    assert code == 2 and "no data at no-such-store" in err
    code, _, err = call(capsys, "train", "ucf11-kcp444x", "--data", "no-such-store")
    assert code == 2 and "kronecell experiments list" in err and "did you mean 'ucf11-kcp444'" in err
