"""Run directories: resumed to the same bits after kill -9, locked, done once, and never damaged by a failure."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kronecell.data import Store, open_store
from kronecell.errors import CheckpointError, KronecellError
from kronecell.training.checkpoint import load_tensors
from kronecell.training.loop import Diverged
from kronecell.training.run import run
from tests.training_cases import make_store, store, tiny, toml_file  # noqa: F401

RUN = Path("tiny") / "fold0-seed0"
EPOCHS = 5


def final_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and optimiser; numpy's and Python's generators start anew in every process and are not used."""
    record = json.loads((folder / "checkpoint.json").read_text())
    tensors = load_tensors(folder / record["tensors"])
    return {name: t for name, t in tensors.items() if not name.startswith(("random.numpy", "random.python"))}


def same_bits(one: Path, two: Path) -> bool:
    a, b = final_tensors(one), final_tensors(two)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def strip_times(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if "second" not in name}


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [strip_times(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A run that nobody interrupted."""
    out = tmp_path_factory.mktemp("whole")
    run(tiny(epochs=EPOCHS), store, out, show=False)
    return out / RUN


def test_a_run_directory_holds_what_the_report_reads(whole: Path, store: Store) -> None:  # noqa: F811
    result = json.loads((whole / "result.json").read_text())
    wanted = {
        "top1", "avg", "avg_over", "params_w", "params_model", "ratio_w", "ratio_model", "macs_paper", "macs_executed",
        "step_ms", "latency_ms", "seconds", "classes", "manifest_hash", "fold", "seed", "deviations",
    }  # fmt: skip
    assert wanted <= {*result}
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [*range(EPOCHS)]
    assert {"epoch", "loss", "train_accuracy", "top1", "seconds", "clips_per_second"} <= {*rows[0]}
    assert result["top1"] == max(row["top1"] for row in rows) and result["avg_over"] == 1
    assert result["top1_last"] == rows[-1]["top1"] and result["stopped"] == ""
    low, high = result["interval"]
    assert low <= result["top1_last"] <= high and result["clips"] == {"train": 22, "valid": 22, "all": 44}
    assert json.loads((whole / "status.json").read_text()) == {
        "state": "finished", "epoch": EPOCHS, "epochs": EPOCHS, "message": "",
    }  # fmt: skip
    assert result["classes"] == 11 and result["manifest_hash"] == store.manifest_hash
    assert result["params_w"] == tiny().weight_format().network(4).num_params  # type: ignore[union-attr]
    assert result["params_model"] == sum(p.numel() for p in tiny().build_model(11).parameters())
    assert any("not in the paper" in text for text in result["deviations"])
    assert {"torch", "numpy"} <= {*json.loads((whole / "environment.json").read_text())["packages"]}
    assert load_tensors(whole / "best.safetensors").keys() == tiny().build_model(11).state_dict().keys()


def _child(store_root: str, out: str) -> None:
    torch.set_num_threads(1)
    run(tiny(epochs=EPOCHS), open_store(store_root), out, show=False)


def start(store: Store, out: Path) -> Any:  # noqa: F811
    process = multiprocessing.get_context("fork").Process(target=_child, args=(str(store.root), str(out)))
    process.start()
    return process


def wait_until(condition: Callable[[], bool], process: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.0005)


def saved_steps(folder: Path) -> int:
    try:
        return int(json.loads((folder / "checkpoint.json").read_text())["facts"]["progress"]["steps"])
    except (OSError, ValueError, KeyError):
        return -1


def test_kill_9_at_random_points_then_resume_gives_the_same_bits(
    store: Store,  # noqa: F811
    whole: Path,
    tmp_path: Path,
) -> None:
    # 15 steps in 5 epochs of 3, a checkpoint after each: kills in the middle of epochs, of validations, of writes.
    generator, folder, kills = random.Random(7), tmp_path / RUN, 0
    for target in (1, 2, 4, 5, 8, 11, 13):
        process = start(store, tmp_path)
        wait_until(lambda target=target: saved_steps(folder) >= target, process)  # type: ignore[misc]
        time.sleep(generator.random() * 0.03)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.join()
        if (folder / "result.json").exists():  # a busy machine noticed too late and the run came to its end
            break
    assert kills >= 4
    run(tiny(epochs=EPOCHS), store, tmp_path, show=False)
    assert same_bits(whole, folder)
    assert metrics(whole) == metrics(folder)
    assert [*folder.glob(".*")] == [] and len([*folder.glob("checkpoint-*")]) == 1


def command(data: Path, out: Path, *more: str, experiment: Path) -> list[str]:
    words = [sys.executable, "-m", "kronecell", "train", str(experiment), "--data", str(data), "--out", str(out)]
    return [*words, "--threads", "1", *more]


def test_sigterm_saves_says_so_and_the_run_continues_to_the_same_bits(
    store: Store,  # noqa: F811
    whole: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / RUN
    experiment = toml_file(tmp_path, epochs=EPOCHS)
    process = subprocess.Popen(
        command(store.root, tmp_path, experiment=experiment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while saved_steps(folder) < 4 and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143 and out == "" and time.monotonic() - asked < 20
    assert err.splitlines()[-1].startswith("kronecell: stopped by a signal, checkpoint saved")
    assert json.loads((folder / "status.json").read_text())["state"] == "interrupted"
    done = subprocess.run(
        command(store.root, tmp_path, "--json", experiment=experiment), capture_output=True, text=True
    )
    assert done.returncode == 0 and json.loads(done.stdout)["epochs"] == EPOCHS
    assert same_bits(whole, folder)


def test_a_finished_run_is_read_not_repeated(store: Store, whole: Path) -> None:  # noqa: F811
    before = {path.name: path.stat().st_mtime_ns for path in whole.iterdir()}
    result = run(tiny(epochs=EPOCHS), store, whole.parent.parent, show=False)
    assert result == json.loads((whole / "result.json").read_text())
    assert before == {path.name: path.stat().st_mtime_ns for path in whole.iterdir()}


def test_other_settings_or_other_data_are_refused_in_the_same_directory(
    store: Store,  # noqa: F811
    whole: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(KronecellError, match="epochs was 5, is 6"):
        run(tiny(epochs=6), store, whole.parent.parent, show=False)
    other = make_store(tmp_path)
    other.manifest_hash = "0" * 64
    with pytest.raises(CheckpointError, match="other data"):
        run(tiny(epochs=EPOCHS), other, whole.parent.parent, show=False)


def test_two_runs_cannot_share_a_directory(store: Store, tmp_path: Path) -> None:  # noqa: F811
    process = start(store, tmp_path)
    try:
        wait_until(lambda: saved_steps(tmp_path / RUN) >= 1, process)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(KronecellError, match="another process is training here"):
            run(tiny(epochs=EPOCHS), store, tmp_path, show=False)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    run(tiny(epochs=EPOCHS), store, tmp_path, show=False)  # a dead owner holds no lock


def test_a_diverged_run_keeps_its_last_good_checkpoint_and_says_failed(store: Store, tmp_path: Path) -> None:  # noqa: F811
    experiment = tiny(learning_rate=1e30)
    with pytest.raises(Diverged, match="clips of this batch"):
        run(experiment, store, tmp_path, show=False)
    status = json.loads((tmp_path / RUN / "status.json").read_text())
    assert status["state"] == "failed" and "loss" in status["message"]
    tensors = final_tensors(tmp_path / RUN)
    assert all(bool(t.isfinite().all()) for name, t in tensors.items() if name.startswith("model."))


def test_a_damaged_checkpoint_is_named_not_trusted(store: Store, tmp_path: Path) -> None:  # noqa: F811
    process = start(store, tmp_path)
    wait_until(lambda: saved_steps(tmp_path / RUN) >= 2, process)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    tensors = tmp_path / RUN / json.loads((tmp_path / RUN / "checkpoint.json").read_text())["tensors"]
    tensors.write_bytes(tensors.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"cannot be read.*delete checkpoint\.json"):
        run(tiny(epochs=EPOCHS), store, tmp_path, show=False)


def _small_files_only() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))


def test_a_full_disk_is_one_line_and_the_old_checkpoint_survives(
    store: Store,  # noqa: F811
    whole: Path,
    tmp_path: Path,
) -> None:
    process = start(store, tmp_path)
    wait_until(lambda: saved_steps(tmp_path / RUN) >= 3, process)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    before = final_tensors(tmp_path / RUN)
    # Files may not pass 6 kB: the write of the tensors fails as on a full disk, in the middle of the file.
    words = command(store.root, tmp_path, experiment=toml_file(tmp_path, epochs=EPOCHS))
    failed = subprocess.run(words, capture_output=True, text=True, preexec_fn=_small_files_only)
    lines = [line for line in failed.stderr.splitlines() if line.startswith("kronecell: ")]
    assert failed.returncode == 2 and len(lines) == 1 and "Traceback" not in failed.stderr
    assert "cannot write" in lines[0]
    after = final_tensors(tmp_path / RUN)
    assert all(torch.equal(before[name], after[name]) for name in before)
    run(tiny(epochs=EPOCHS), store, tmp_path, show=False)  # space again: continues
    assert same_bits(whole, tmp_path / RUN)
