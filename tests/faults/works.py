"""What is disturbed: each work fills a folder, and says what of it must be the same bits in the end."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import kronecell as kc
from kronecell.cli.main import main
from kronecell.compress.statefile import read_model
from kronecell.data import find_dataset, open_store, prepare, write_synthetic
from kronecell.training.checkpoint import load_tensors
from kronecell.training.run import run
from tests.training_cases import tiny, toml_file

RUN = Path("tiny") / "fold0-seed0"
TIMES = ("second", "_ms", "latency", "clips_per_second")


@dataclass(frozen=True)
class Work:
    """`do` fills a folder from the inputs; `bits` is what has to be the same; `whole` raises if a reader would.

    `inside` is what the processes do that `do` starts, where the faults are theirs: it is how their places are counted.
    """

    do: Callable[[Path, Path], object]
    bits: Callable[[Path], dict[str, str]]
    whole: Callable[[Path], object]
    inside: Callable[[Path, Path], object] | None = None


def make_inputs(folder: Path) -> Path:
    """Videos, a store, a module and a file of weights."""
    videos = write_synthetic(folder / "videos", 2, 2, (32, 24), 8, progress=False)
    prepare(find_dataset(videos), folder / "store", 32, 24, workers=1, progress=False, folds=2)
    torch.manual_seed(0)
    toml_file(folder, epochs=2, workers=1)
    kc.save(kc.LSTM(24, 16, input_format="tt:r=2"), folder / "module")
    model = torch.nn.ModuleDict({"rnn": torch.nn.LSTM(24, 16), "head": torch.nn.Linear(16, 2)})
    save_file(model.state_dict(), folder / "weights.safetensors")
    return folder


def _train(inputs: Path, out: Path) -> None:
    run(tiny(epochs=2), open_store(inputs / "store"), out, show=False)


def _train_bits(out: Path) -> dict[str, str]:
    return _run_bits(out / RUN)


def _run_bits(folder: Path) -> dict[str, str]:
    record = json.loads((folder / "checkpoint.json").read_text())
    tensors = load_tensors(folder / record["tensors"])  # weights, optimiser, and the generators of torch and numpy
    found = {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in tensors.items()}
    found["python"] = str(record["random"]["python"])
    found["best"] = _digest(folder / "best.safetensors")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found["metrics"] = json.dumps(_without_times(rows))
    found["result"] = json.dumps(_without_times(json.loads((folder / "result.json").read_text())))
    found["status"] = json.loads((folder / "status.json").read_text())["state"]
    found["files"] = str(sorted(path.name for path in folder.iterdir() if "checkpoint-" not in path.name))
    return found


def _train_whole(out: Path) -> None:
    if (out / RUN / "best.safetensors").exists():
        kc.load(out / RUN)


def _sweep(inputs: Path, out: Path) -> None:
    words = ["--data", str(inputs / "store"), "--out", str(out), "--folds", "0,1", "--threads", "1", "--jobs", "2"]
    _command("sweep", str(inputs / "tiny.toml"), *words)


def _each_run(out: Path) -> list[Path]:
    return sorted(path for path in out.glob("tiny/*") if path.is_dir())


def _sweep_bits(out: Path) -> dict[str, str]:
    runs = {folder.name: _run_bits(folder) for folder in _each_run(out)}
    return {f"{run}/{name}": value for run, bits in runs.items() for name, value in bits.items()}


def _sweep_whole(out: Path) -> None:
    for folder in _each_run(out):
        if (folder / "best.safetensors").exists():
            kc.load(folder)


def _prepare(inputs: Path, out: Path) -> None:
    prepare(find_dataset(inputs / "videos"), out / "store", 32, 24, workers=1, progress=False, folds=2)


def _files(out: Path) -> dict[str, str]:
    """Every file but what a killed writer left under a temporary name, which the next one need not know."""
    files = [path for path in sorted(out.rglob("*")) if path.is_file() and not path.name.startswith(".tmp")]
    return {str(path.relative_to(out)): _digest(path) for path in files}


def _prepare_whole(out: Path) -> None:
    if (out / "store" / "manifest.json").exists():
        assert open_store(out / "store").verify() == []


def _save(inputs: Path, out: Path) -> None:
    module = kc.load(inputs / "module")
    with torch.no_grad():
        module.bias_ih_l0 += 1
    kc.save(module, out / "model")


def _save_whole(out: Path) -> None:
    kc.load(out / "model")  # the old or the new: there was one before


def _compress(inputs: Path, out: Path) -> None:
    words = [str(inputs / "weights.safetensors"), str(out / "small"), "--rule", "rnn=tt:r=2"]
    _command("compress", *words)


def _command(*words: str) -> None:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            main([*words])
        except SystemExit as end:
            if end.code:
                raise kc.KronecellError(f"exit {end.code}") from None


def _compress_bits(out: Path) -> dict[str, str]:
    found = _files(out)
    report = json.loads((out / "small" / "compression.json").read_text())
    return found | {"small/compression.json": json.dumps(_without_times(report))}


def _compress_whole(out: Path) -> None:
    if (out / "small" / "config.json").exists():
        read_model(out / "small")


def _export(inputs: Path, out: Path) -> None:
    kc.export_onnx(kc.load(inputs / "module").eval(), out / "model.onnx", torch.zeros(3, 2, 24))


def _export_whole(out: Path) -> None:
    import onnx

    if (out / "model.onnx").exists():
        onnx.checker.check_model(str(out / "model.onnx"))


WORKS: dict[str, Work] = {
    "train": Work(_train, _train_bits, _train_whole),
    "sweep": Work(_sweep, _sweep_bits, _sweep_whole, inside=_train),
    "prepare": Work(_prepare, _files, _prepare_whole),
    "save": Work(_save, _files, _save_whole),
    "compress": Work(_compress, _compress_bits, _compress_whole),
    "export": Work(_export, _files, _export_whole),
}


def begin(name: str, inputs: Path, out: Path) -> Path:
    """The folder as it is before the work."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if name == "save":
        shutil.copytree(inputs / "module", out / "model")
    return out


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_times(v) for k, v in value.items() if not any(word in k for word in TIMES)}
    return [_without_times(v) for v in value] if isinstance(value, list) else value
