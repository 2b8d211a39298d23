"""Run directories with damaged records: the file is named on one line, or what is whole is used; nothing is guessed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kronecell.data import Store
from kronecell.deploy.tensorfile import write_tensors
from kronecell.errors import KronecellError
from kronecell.training.checkpoint import load_tensors
from kronecell.training.run import run
from tests.training_cases import store, tiny  # noqa: F401

RUN = Path("tiny") / "fold0-seed0"


@pytest.fixture(scope="module")
def finished(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    out = tmp_path_factory.mktemp("finished")
    run(tiny(epochs=2), store, out, show=False)
    return out


def record(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change checkpoint.json of an unfinished run and leave no digest: what somebody does who means harm."""

    def damage(folder: Path) -> None:
        (folder / "result.json").unlink()
        value = json.loads((folder / "checkpoint.json").read_text())
        value.pop("record_sha256")
        change(value)
        (folder / "checkpoint.json").write_text(json.dumps(value))

    return damage


def content(name: str, text: bytes, unfinished: bool = True) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        if unfinished:
            (folder / "result.json").unlink()
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(text)

    return damage


def pipe(name: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        if name != "result.json":
            (folder / "result.json").unlink()
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def flip(folder: Path) -> None:
    (folder / "result.json").unlink()
    (path,) = folder.glob("checkpoint-*.safetensors")
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def other_tensors(folder: Path) -> None:
    """Tensors with a digest of their own that the record does not have."""
    (folder / "result.json").unlink()
    (path,) = folder.glob("checkpoint-*.safetensors")
    tensors = load_tensors(path)
    write_tensors(path, tensors | {"model.classifier.bias": tensors["model.classifier.bias"] + 1})


def edited_without_digest(folder: Path) -> None:
    (folder / "result.json").unlink()
    text = (folder / "checkpoint.json").read_text()
    (folder / "checkpoint.json").write_text(text.replace('"steps": 6', '"steps": 5', 1))


DEEP = b"[" * 100_000
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "status empty": (content("status.json", b""), "status.json"),
    "status not UTF-8": (content("status.json", b"\xff\xfe{"), "status.json"),
    "status deep": (content("status.json", DEEP), "status.json"),
    "status of another kind": (content("status.json", b'{"state": "asleep"}'), "status.json"),
    "status is a pipe": (pipe("status.json"), "status.json"),
    "result null": (content("result.json", b"null", False), "result.json"),
    "result deep": (content("result.json", DEEP, False), "result.json"),
    "result without figures": (content("result.json", b"{}", False), "result.json"),
    "result is a pipe": (pipe("result.json"), "result.json"),
    "config deep": (content("config.toml", b"a = " + DEEP), "config.toml"),
    "config of dots": (content("config.toml", b"a." * 20_000 + b"a = 1"), "config.toml"),
    "config huge": (content("config.toml", b"#" * 100_000), "config.toml"),
    "config is a pipe": (pipe("config.toml"), "config.toml"),
    "config missing": (lambda f: (f / "config.toml").unlink(), "config.toml"),
    "checkpoint deep": (content("checkpoint.json", DEEP), "checkpoint.json"),
    "checkpoint is a pipe": (pipe("checkpoint.json"), "checkpoint.json"),
    "checkpoint edited": (edited_without_digest, "checkpoint.json"),
    "tensors a number": (record(lambda r: r.update(tensors=3)), "checkpoint.json"),
    "tensors elsewhere": (record(lambda r: r.update(tensors="../../x.safetensors")), "checkpoint.json"),
    "random a list": (record(lambda r: r.update(random=[])), "checkpoint.json"),
    "random without numpy": (record(lambda r: r["random"].pop("numpy")), "checkpoint.json"),
    "python's generator short": (record(lambda r: r["random"]["python"].__setitem__(1, [1])), "checkpoint.json"),
    "numpy's generator beyond": (record(lambda r: r["random"].update(numpy=[10**9, 0, 0.0])), "checkpoint"),
    "facts a text": (record(lambda r: r.update(facts="x")), "checkpoint.json"),
    "progress of another kind": (record(lambda r: r["facts"].update(progress={"epoch": "x"})), "checkpoint.json"),
    "an epoch too many": (record(lambda r: r["facts"]["progress"].update(epoch=3)), "checkpoint.json"),
    "a step beyond the epoch": (
        record(lambda r: r["facts"]["progress"].update(epoch=1, step=10**6)),
        "checkpoint.json",
    ),
    "history of texts": (record(lambda r: r["facts"]["progress"].update(history=["x", "y"])), "checkpoint.json"),
    "another fold": (record(lambda r: r["facts"].update(fold=1)), "checkpoint.json"),
    "optimiser a text": (record(lambda r: r.update(optimiser="adam")), "checkpoint.json"),
    "optimiser of none": (record(lambda r: r.update(optimiser=[])), "fold0-seed0"),
    "betas of texts": (record(lambda r: r["optimiser"][0].update(betas=["a", "b"])), "fold0-seed0"),
    "one bit of the tensors": (flip, "checkpoint-"),
    "tensors of another time": (other_tensors, "checkpoint-"),
}


@pytest.mark.parametrize("name", [*REFUSED])
def test_damage_is_named_on_one_line(name: str, finished: Path, store: Store, tmp_path: Path) -> None:  # noqa: F811
    damage, said = REFUSED[name]
    shutil.copytree(finished, tmp_path / "out")
    damage(tmp_path / "out" / RUN)
    with pytest.raises(KronecellError, match=said) as caught:
        run(tiny(epochs=2), store, tmp_path / "out", show=False)
    assert len(str(caught.value)) <= 1000 and "\n" not in str(caught.value)


def test_a_checkpoint_of_release_0_1_has_no_digests_and_is_continued(
    finished: Path,
    store: Store,  # noqa: F811
    tmp_path: Path,
) -> None:
    shutil.copytree(finished, tmp_path / "out")
    record(lambda r: r.pop("tensors_sha256"))(tmp_path / "out" / RUN)
    result = run(tiny(epochs=2), store, tmp_path / "out", show=False)
    assert result["top1"] == json.loads((finished / RUN / "result.json").read_text())["top1"]


def test_a_run_whose_checkpoint_is_gone_says_that_it_starts_again(
    finished: Path,
    store: Store,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(finished, tmp_path / "out")
    for name in ("result.json", "checkpoint.json"):
        (tmp_path / "out" / RUN / name).unlink()
    run(tiny(epochs=2), store, tmp_path / "out", show=False)
    assert "has no checkpoint.json; starts from the first epoch" in capfd.readouterr().err


def test_every_generator_of_random_numbers_goes_on_where_it_was(store: Store, tmp_path: Path) -> None:  # noqa: F811
    """Also numpy's, whatever a program did with it before."""
    found = []
    for before in (1, 2):
        np.random.seed(before)  # noqa: NPY002
        torch.manual_seed(before)
        out = tmp_path / str(before)
        run(tiny(epochs=1), store, out, show=False)
        value = json.loads((out / RUN / "checkpoint.json").read_text())
        tensors = load_tensors(out / RUN / value["tensors"])
        found.append((value["random"], {k: v.tolist() for k, v in tensors.items() if k.startswith("random.")}))
    assert found[0] == found[1]
