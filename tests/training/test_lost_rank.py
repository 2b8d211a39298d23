"""Several processes of which one dies, fails or is slow: all end soon and say which it was, or end well."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kronecell.data import Store, open_store
from kronecell.errors import DataError, KronecellError
from kronecell.training.distributed import torchrun_world
from kronecell.training.run import run
from tests.training.test_experiment import metrics, same_bits, saved_steps
from tests.training_cases import store, tiny, toml_file  # noqa: F401

RUN = Path("tiny") / "fold0-seed0"
SETTINGS = {"epochs": 6, "batch_size": 12, "dropout": 0.0}


def _child(rank: int, size: int, port: int, root: str, out: str, trouble: Callable[[int], None] | None) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    said = ""
    try:
        with torchrun_world("cpu") as world:
            if trouble is not None:
                trouble(rank)
            run(tiny(**SETTINGS), open_store(root), out, world=world, show=False)
    except KronecellError as error:
        said = "" if getattr(error, "quiet", False) else str(error)
    Path(f"{out}-said{rank}").write_text(said)
    os._exit(2 if said else 0)


def start(size: int, store: Store, out: Path, trouble: Callable[[int], None] | None = None) -> list[Any]:  # noqa: F811
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    common = size, port, str(store.root), str(out), trouble
    processes = [context.Process(target=_child, args=(rank, *common)) for rank in range(size)]
    for process in processes:
        process.start()
    return processes


def what_they_said(out: Path, size: int) -> list[str]:
    texts = [Path(f"{out}-said{rank}") for rank in range(size)]
    return [text for path in texts if path.exists() and (text := path.read_text())]


@pytest.fixture(scope="module")
def whole(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A run of two processes that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole")
    for process in start(2, store, out):
        process.join(60)
    assert what_they_said(out, 2) == []
    return out / RUN


@pytest.mark.parametrize(("size", "victim"), [(3, 1), (2, 0), pytest.param(4, 3, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_and_nobody_waits_for_it(
    size: int,
    victim: int,
    store: Store,  # noqa: F811
    whole: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    processes = start(size, store, out)
    while saved_steps(out / RUN) < 4 and all(process.is_alive() for process in processes):
        time.sleep(0.001)
    os.kill(processes[victim].pid, signal.SIGKILL)
    killed = time.monotonic()
    for process in processes:
        process.join(60)
    assert time.monotonic() - killed < 30
    said = what_they_said(out, size)
    assert len(said) == 1 and f"rank {victim} of {size} ended" in said[0] and "run again" in said[0], said
    if size == 2:
        for process in start(2, store, out):
            process.join(60)
        assert same_bits(whole, out / RUN) and metrics(whole) == metrics(out / RUN)


def _fails(rank: int) -> None:
    if rank == 1:
        time.sleep(0.5)
        raise DataError("clips/x.clip: cannot be read")


def _dawdles(rank: int) -> None:
    if rank == 1:
        time.sleep(3)


def test_a_rank_that_fails_says_why_and_the_others_end_without_a_word(store: Store, tmp_path: Path) -> None:  # noqa: F811
    started = time.monotonic()
    for process in start(3, store, tmp_path / "out", _fails):
        process.join(60)
    assert time.monotonic() - started < 30
    assert what_they_said(tmp_path / "out", 3) == ["clips/x.clip: cannot be read"]


def test_a_slow_rank_is_waited_for(store: Store, whole: Path, tmp_path: Path) -> None:  # noqa: F811
    for process in start(2, store, tmp_path / "out", _dawdles):
        process.join(60)
    assert what_they_said(tmp_path / "out", 2) == [] and same_bits(whole, tmp_path / "out" / RUN)


@pytest.mark.slow
def test_torchrun_starts_again_after_a_kill_and_comes_to_the_same_result(
    store: Store,  # noqa: F811
    whole: Path,
    tmp_path: Path,
) -> None:
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "--max-restarts",
        "2",
    ]
    words += ["-m", "kronecell", "train", str(toml_file(tmp_path, **SETTINGS)), "--data", str(store.root)]
    launcher = subprocess.Popen([*words, "--threads", "1", "--out", str(tmp_path)], stderr=subprocess.PIPE, text=True)
    while saved_steps(tmp_path / RUN) < 4 and launcher.poll() is None:
        time.sleep(0.001)
    children = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, err
    assert same_bits(whole, tmp_path / RUN)
