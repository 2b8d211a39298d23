"""Files that nobody wrote: whatever config.json says, kc.load is right or says what is wrong, in one short line."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kronecell as kc
from kronecell.deploy.modules import CONFIG, TENSORS
from kronecell.errors import CheckpointError, DataError, KronecellError, on_one_line


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return kc.save(kc.LSTM(12, 8, 2, input_format=["tt:r=2", None], hidden_format="lowrank:r=2"), tmp_path / "lstm")


def sign(folder: Path, content: bytes) -> None:
    """Put in a config, and tensors that say they belong to it: what somebody does who means harm."""
    (folder / CONFIG).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    save_file(load_file(folder / TENSORS), folder / TENSORS, {"config_sha256": digest})


def arguments(**changes: Any) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        config["modules"][""]["arguments"].update(changes)
        sign(folder, json.dumps(config).encode())

    return damage


def content(text: bytes) -> Callable[[Path], object]:
    return lambda folder: sign(folder, text)


def pipe(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


def described(folder: Path, value: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    config["modules"][""] = value
    sign(folder, json.dumps(config).encode())


DEEP = b"[" * 200_000
DAMAGE: dict[str, Callable[[Path], object]] = {
    "brackets": content(DEEP),
    "objects": content(b'{"a":' * 100_000),
    "an open text of escapes": content(b'{"kronecell_file": 1, "a": "' + b'\\"' * 1_000_000),
    "many empty lists": content(b'{"a":[' + b"[]," * 1_500_000 + b"[]]}"),
    "a number of 5,000 digits": content(b'{"kronecell_file": ' + b"9" * 5000 + b"}"),
    "NaN": content(b'{"kronecell_file": NaN}'),
    "true as a version": content(b'{"kronecell_file": true, "modules": {}, "tensors": {}}'),
    "UTF-16": content('{"kronecell_file": 1}'.encode("utf-16")),
    "nine megabytes": content(b" " * (9 << 20)),
    "deep order": lambda f: sign(
        f, (f / CONFIG).read_bytes().replace(b'"order": "auto"', b'"order": ' + b"[" * 9000 + b"]" * 9000)
    ),
    "deep shared": lambda f: sign(
        f, (f / CONFIG).read_bytes().replace(b'"shared": false', b'"shared": ' + b"[" * 9000 + b"]" * 9000)
    ),
    "1e30 layers": arguments(num_layers=1e30),
    "10**30 layers": arguments(num_layers=10**30),
    "2**31 layers": arguments(num_layers=2**31),
    "10**4 layers": arguments(num_layers=10**4, input_format=[None] * 10**4, hidden_format=[None] * 10**4),
    "no layers": arguments(num_layers=0),
    "900 layers": arguments(num_layers=900, input_format=[None] * 900, hidden_format=[None] * 900),
    "empty order": arguments(order=[]),
    "nested empty order": arguments(order=[[]]),
    "order of numbers": arguments(order=[1, [2, None]]),
    "order of one": arguments(order=["x"]),
    "huge bias": arguments(forget_bias=10**30 + 1),
    "arguments are a text": lambda f: described(f, {"class": "LSTM", "arguments": "x"}),
    "a module is a list": lambda f: described(f, []),
    "class of another": lambda f: described(f, {"class": "os.system", "arguments": {}}),
    "class is a number": lambda f: described(f, {"class": 3, "arguments": {}}),
    "petabytes of input": arguments(input_size=10**15),
    "wide": arguments(hidden_size=10**7),
    "wider than a pointer": arguments(input_size=2**39, hidden_size=2**39, input_format=[None, None]),
    "negative": arguments(hidden_size=-8),
    "dropout of 3": arguments(dropout=3.0),
    "unknown argument": arguments(device="cuda"),
    "dtype as argument": arguments(dtype="float64"),
    "format of 10**9 branches": arguments(input_format=["kcp:m=3x4,n=2x4,K=1000000000,CA=1,CB=1", None]),
    "format of 10**9": arguments(input_format=["bt:m=3x4,n=2x4,r=1000000000,P=1000000000", None]),
    "format of 900 modes": arguments(input_format=["ht:m=" + "1x" * 900 + "12,n=" + "1x" * 900 + "8,r=1", None]),
    "format of 500 kB": arguments(input_format=["tt:" + "9" * 500_000, None]),
    "a number as a format": arguments(input_format=[7, None]),
    "recurrence": arguments(recurrence="x" * 100_000),
    "config is a pipe": lambda f: pipe(f, CONFIG),
    "tensors are a pipe": lambda f: pipe(f, TENSORS),
    "config is a folder": lambda f: ((f / CONFIG).unlink(), (f / CONFIG).mkdir()),
    "config is a device": lambda f: ((f / CONFIG).unlink(), (f / CONFIG).symlink_to("/dev/zero")),
    "config is a link to itself": lambda f: ((f / CONFIG).unlink(), (f / CONFIG).symlink_to(CONFIG)),
    "a header of 2**60": lambda f: (f / TENSORS).write_bytes((2**60).to_bytes(8, "little") + b"{}"),
    "an empty file of tensors": lambda f: (f / TENSORS).write_bytes(b""),
    "a name of 500 kB": lambda f: described(f, {"class": "x" * 500_000, "arguments": {}}),
}


@pytest.mark.parametrize("name", [*DAMAGE])
def test_damage_is_one_short_line_at_once(name: str, folder: Path) -> None:
    DAMAGE[name](folder)
    started = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        kc.load(folder)
    assert time.monotonic() - started < 5
    assert len(str(caught.value)) <= 300 and "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["\0", "a\0b", "x" * 5000, "/dev/null", "/proc/self/mem", ""])
def test_names_that_no_folder_has_are_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        kc.load(path)


def test_files_of_release_0_1_have_no_digest_and_are_read(folder: Path) -> None:
    sign(folder, (folder / CONFIG).read_bytes())
    x = torch.randn(3, 2, 12)
    assert torch.equal(kc.load(folder)(x)[0], kc.load(folder)(x)[0])


def test_saved_files_have_the_permissions_of_any_new_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new").touch()
    expected = stat.S_IMODE((tmp_path / "new").stat().st_mode)
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {expected}
    before = os.umask(0o027)
    try:
        kc.save(kc.load(folder), folder)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o640}


@pytest.mark.parametrize("kind", [KronecellError, DataError, CheckpointError])
def test_messages_stay_short_and_plain_whatever_they_quote(kind: type[KronecellError]) -> None:
    text = str(kind("it starts " + "x" * 500_000 + "\n\x1b[2J and \udcff ends so"))
    assert len(text) <= kind.LONGEST and text.startswith("it starts") and text.endswith("ends so")
    assert text.isprintable()
    assert on_one_line("short", 300) == "short"


def test_a_long_name_of_a_format_is_not_repeated() -> None:
    with pytest.raises(kc.ShapeError) as caught:
        kc.parse("x" * 5000 + ":m=2,n=2")
    assert len(str(caught.value)) <= 1000
