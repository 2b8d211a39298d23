"""Several processes on gloo: data parallel equals one process, branch parallel equals the serial operator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kronecell import KCP, TT, TensorLinear
from kronecell.data import Store
from kronecell.errors import PlanError
from kronecell.nn.branch_parallel import branch_parallel, share
from kronecell.training.checkpoint import load_checkpoint, load_tensors, read_facts
from kronecell.training.classifier import VideoClassifier
from kronecell.training.loop import Progress, fit, make_optimiser, make_sparsity
from kronecell.training.splits import loaders
from tests.training.distributed_cases import (
    DDP,
    DOPED,
    branch_parallel_equals_serial,
    doped_trains_in_several,
    launch,
    recurrent_layers_equal_serial,
    train_in_two,
)
from tests.training_cases import make_store, store, tiny, toml_file  # noqa: F401


@pytest.mark.parametrize("size", [2, 3])
def test_branch_parallel_equals_the_serial_operator_values_and_gradients(tmp_path: Path, size: int) -> None:
    launch(branch_parallel_equals_serial, size, tmp_path)


def test_branch_parallel_recurrent_layers_equal_the_serial_ones(tmp_path: Path) -> None:
    launch(recurrent_layers_equal_serial, 2, tmp_path)


@pytest.mark.parametrize(("K", "size"), [(4, 2), (4, 3), (6, 4), (5, 5), (3, 1)])
def test_every_branch_has_exactly_one_owner(K: int, size: int) -> None:
    owned = [k for rank in range(size) for k in range(*share(K, rank, size))]
    assert owned == [*range(K)]


def test_more_processes_than_branches_and_missing_process_groups_are_refused() -> None:
    with pytest.raises(PlanError, match="5 processes cannot share K = 4"):
        share(4, 0, 5)
    for fmt in (KCP((4, 3), (2, 3), 2, 2, 2), TT((4, 3), (2, 3), 2)):
        with pytest.raises(PlanError, match="init_process_group"):
            branch_parallel(TensorLinear(fmt))


def damaged(folder: Path) -> Store:
    """A store of which one training clip cannot be read."""
    store = make_store(folder)  # noqa: F811
    train, _ = loaders(tiny(**DDP), store, 0, 0)
    clip = store.root / "clips" / store.files[int(train.indices[5])]
    clip.write_bytes(clip.read_bytes()[:500])
    return store


def alone(store: Store, folder: Path | None = None) -> tuple[VideoClassifier, Progress]:  # noqa: F811
    """One process on the same global batches, from the start or from a checkpoint."""
    experiment = tiny(**DDP)
    torch.manual_seed(0)
    model = experiment.build_model(11)
    settings = experiment.train_settings(0)
    optimiser = make_optimiser(model, settings)
    facts = None if folder is None else load_checkpoint(folder, model, optimiser)
    progress = Progress() if facts is None else Progress(**facts["progress"])
    train, valid = loaders(experiment, store, 0, 0)
    with pytest.warns(RuntimeWarning, match="clip replaced"):
        fit(model, train, valid, settings, optimiser=optimiser, progress=progress)
    return model, progress


def largest_difference(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def test_two_processes_equal_one_after_20_steps_with_a_bad_video_and_checkpoints_fit_any_world(tmp_path: Path) -> None:
    store = damaged(tmp_path)  # noqa: F811
    model, progress = alone(store)
    wanted = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    assert progress.steps >= 20
    for stop_after in (10_000, 11):  # to the end in two processes; eleven steps in two, the rest in one
        folder = tmp_path / f"stop{stop_after}"
        folder.mkdir()
        launch(train_in_two, 2, folder, str(store.root), str(folder), stop_after)
        facts = read_facts(folder)
        assert facts is not None
        together = Progress(**facts["progress"])
        if stop_after == 11:
            assert together.steps == 11 and together.step == 2  # in the middle of an epoch
            resumed, together = alone(store, folder)
            got = resumed.state_dict()
        else:
            tensors = load_tensors(next(folder.glob("*.safetensors")))
            got = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
        assert together.steps == progress.steps
        assert largest_difference(wanted, got) < 1e-6
        for one, two in zip(progress.history, together.history, strict=True):
            assert one["loss"] == pytest.approx(two["loss"], abs=1e-6) and one["top1"] == two["top1"]


@pytest.mark.slow
def test_torchrun_trains_an_experiment_and_only_rank_0_writes(store: Store, tmp_path: Path) -> None:  # noqa: F811
    experiment = toml_file(tmp_path, dropout=0.0)
    common = ["train", str(experiment), "--data", str(store.root), "--threads", "1", "--json", "--out"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m"]
    two = subprocess.run([*launcher, "kronecell", *common, str(tmp_path / "two")], capture_output=True, text=True)
    assert two.returncode == 0, two.stderr
    one = subprocess.run(
        [sys.executable, "-m", "kronecell", *common, str(tmp_path / "one")], capture_output=True, text=True
    )
    a, b = json.loads(one.stdout), json.loads(two.stdout)
    assert a["top1"] == b["top1"] and a["steps"] == b["steps"]
    environment = json.loads((tmp_path / "two" / "tiny" / "fold0-seed0" / "environment.json").read_text())
    assert environment["processes"] == 2


def test_a_doped_format_trains_in_two_processes_as_in_one(store: Store, tmp_path: Path) -> None:  # noqa: F811
    launch(doped_trains_in_several, 2, tmp_path, str(store.root), str(tmp_path / "state.pt"))
    experiment = tiny(**DOPED)
    settings = experiment.train_settings(0)
    torch.manual_seed(0)
    model = experiment.build_model(11)
    train, valid = loaders(experiment, store, 0, 0)
    sparsity = make_sparsity(model, settings, len(train))
    fit(model, train, valid, settings, optimiser=make_optimiser(model, settings), sparsity=sparsity)
    assert largest_difference(torch.load(tmp_path / "state.pt"), model.state_dict()) < 1e-4
