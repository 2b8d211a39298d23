"""`kronecell doctor`: what is installed, what the processor can do, and whether everything gives right numbers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import typer

from kronecell.cli.models import AsJson

# Optional packages, and what needs them.
OPTIONAL = {
    "av": "reading and writing video (kronecell[video])",
    "rich": "progress bars and coloured help (kronecell[video])",
    "matplotlib": "plots (kronecell[report])",
    "onnx": "export --to onnx (kronecell[export])",
    "onnxruntime": "export --to onnx (kronecell[export])",
    "onnxscript": "export --to onnx (kronecell[export])",
    "tensorboard": "curves in TensorBoard",
}
CHECKED = ("lowrank", "cp", "tucker", "tt", "tr", "bt", "ht", "kt", "kcp")


def doctor(as_json: AsJson = False) -> None:
    """Versions, processor, compiled kernels and why not, optional packages, and a self-check of a few seconds.

    The exit code is 1 if a check fails. Paste the output into a bug report.

    Example: kronecell doctor
    """
    from importlib import metadata

    from kronecell.ops.library import why_not
    from kronecell.training.environment import environment

    machine = environment()
    reason = why_not()
    packages: dict[str, str | None] = {}
    for name in OPTIONAL:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    checks = [_run(name, check) for name, check in _checks(packages).items()]
    failed = [check for check in checks if check["error"]]
    if as_json:
        facts = {"machine": machine, "why_no_kernels": reason, "optional": packages, "checks": checks}
        typer.echo(json.dumps(facts, indent=1))
    else:
        versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
        typer.echo(f"versions    Python {machine['python']}, {versions}")
        typer.echo(f"machine     {machine['system']}, {machine['processor']}")
        typer.echo(f"threads     torch uses {machine['threads']} of {machine['cores']} cores")
        typer.echo(f"kernels     {'compiled and used' if not reason else f'not used, everything is slower: {reason}'}")
        for name, version in packages.items():
            typer.echo(f"{name:<11} {version or f'not installed; needed for {OPTIONAL[name]}'}")
        for check in checks:
            verdict = f"FAILED: {check['error']}" if check["error"] else "ok"
            typer.echo(f"check       {check['name']}: {verdict} ({check['seconds']:.1f} s)")
    if failed:
        raise typer.Exit(1)


def _run(name: str, check: Callable[[], object]) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        check()
        error = None
    except Exception as problem:  # a doctor reports every failure, whatever it is
        error = " ".join(f"{type(problem).__name__}: {problem}".split())[:300]
    return {"name": name, "error": error, "seconds": time.perf_counter() - started}


def _checks(packages: dict[str, str | None]) -> dict[str, Callable[[], object]]:
    checks: dict[str, Callable[[], object]] = {
        "products and gradients against dense ones, every format": _formats,
        "LSTM and GRU": _recurrent,
    }
    if packages["av"]:
        checks["a video is written and decoded"] = _video
    if all(packages[name] for name in ("onnx", "onnxruntime", "onnxscript")):
        checks["an ONNX file gives the same answers"] = _onnx
    return checks


def _formats() -> None:
    import torch

    import kronecell as kc

    generator = torch.Generator().manual_seed(0)
    for kind in CHECKED:
        layer: Any = kc.LSTM(96, 16, batch_first=True, input_format=f"{kind}:{_ranks(kind)}").weight_ih_l0
        x = torch.randn(5, 96, generator=generator, requires_grad=True)
        oracle = x.detach().double().requires_grad_()
        out = layer(x)
        expected = oracle @ layer.dense_weight().detach().double().T
        weights = torch.randn(out.shape, generator=generator)
        (out * weights).sum().backward()
        (expected * weights.double()).sum().backward()
        _close(out, expected, kind)
        _close(x.grad, oracle.grad, f"{kind}, gradient")


def _ranks(kind: str) -> str:
    return {"kcp": "K=2,CA=2,CB=2", "kt": "K=2", "bt": "r=2,P=2"}.get(kind, "r=2")


def _recurrent() -> None:
    import torch

    import kronecell as kc

    x = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(0))
    for kind in (kc.LSTM, kc.GRU):
        layer = kind(96, 16, batch_first=True, input_format="tt:r=2").eval()
        dense = layer.to_dense().double()
        with torch.no_grad():
            _close(layer(x)[0], dense(x.double())[0], kind.__name__)
            _close(kc.freeze(layer)(x)[0], dense(x.double())[0], f"{kind.__name__}, frozen")


def _close(found: Any, expected: Any, what: str) -> None:
    error = ((found.double() - expected).abs().max() / expected.abs().max()).item()
    if not error < 1e-5:
        raise ArithmeticError(f"{what}: relative error {error:.1e}")


def _video() -> None:
    import tempfile
    from pathlib import Path

    from kronecell.data import decode, find_dataset, write_synthetic

    with tempfile.TemporaryDirectory() as folder:
        root = write_synthetic(Path(folder) / "motions", 1, 1, (32, 24), 6, progress=False)
        clip = find_dataset(root).clips[0]
        if decode(clip.path, 32, 24).frames.shape != (6, 24, 32, 3):
            raise ArithmeticError("a video of 6 frames decodes to another number")


def _onnx() -> None:
    import tempfile
    from pathlib import Path

    from kronecell.cli.export import write_onnx
    from kronecell.training.classifier import VideoClassifier

    with tempfile.TemporaryDirectory() as folder:
        write_onnx(VideoClassifier(96, 16, 3, input_format="tt:r=2"), Path(folder) / "check.onnx")
