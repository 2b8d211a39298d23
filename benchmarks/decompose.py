"""Decompositions against tensorly, the SVD bound, and the paper's largest matrix: python -m benchmarks.decompose

Same tensors, same ranks, one thread each, so that numpy and torch run alike on a busy machine. Closed forms meet closed
forms (tensor_train and tensor_ring do not refine: refine=False), HOOI meets HOOI at tensorly's own tolerance, ALS meets
ALS (joint=False, at most 60 sweeps; theirs up to 100); the error that `from_dense` reaches by default stands beside.
Times are the best of three after one warm-up, and are meant to be read as ratios. The 57,600 x 1,024 fits run in
processes of their own, so that peak memory above the weights can be read from the operating system.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kronecell as kc

RESULTS = Path(__file__).parent / "results"
SHAPE = (24, 20, 18, 16)
GIGABYTE = 1 << 30

m, n = (8, 20, 20, 18), (4, 4, 4, 4)
PAPER: dict[str, kc.Format] = {
    "TT": kc.TT(m, n, r=4),
    "TR": kc.TR((4, 2, 5, 8, 6, 5, 3, 2), (4, 4, 2, 4, 2), r=(10, *[5] * 7, 10, *[5] * 4)),
    "HT": kc.HT(m, n, r=4),
    "KT": kc.KT(m, n, K=4),
    "KCP pair": kc.KCP(m, n, K=4, CA=4, CB=2),
    "KCP all": kc.KCP(m, n, K=4, CA=4, CB=2, tie="all"),
    "BT": kc.BT(m, n, r=4, P=2),
}


def tensors() -> dict[str, torch.Tensor]:
    """A random tensor, one of low rank with noise, and a smooth one."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    factors = [torch.randn(size, 8, generator=generator, dtype=torch.float64) for size in SHAPE]
    low = torch.einsum("ar,br,cr,dr->abcd", *factors)
    grids = torch.meshgrid(*(torch.arange(1.0, size + 1, dtype=torch.float64) for size in SHAPE), indexing="ij")
    return {"random": noise, "low rank + noise": low + 0.3 * low.std() * noise, "1 / sum": 1 / sum(grids)}


def timed(call: Callable[[], Any], repeats: int = 3) -> tuple[Any, float]:
    """The result and the best seconds of a few runs, after a warm-up."""
    result = call()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - started)
    return result, min(seconds)


def against_tensorly() -> list[dict[str, Any]]:
    """One row per tensor and decomposition."""
    import tensorly
    from tensorly.decomposition import parafac, tensor_ring, tensor_train, tucker

    ones = (1,) * len(SHAPE)
    cases: list[tuple[str, kc.Format, dict[str, Any], Callable[[Any], Any], Callable[[Any], Any]]] = [
        ("tensor_train", kc.TT(SHAPE, ones, r=(8, 10, 8)), {"refine": False},
         lambda T: tensor_train(T, rank=[1, 8, 10, 8, 1]), tensorly.tt_to_tensor),
        ("tensor_ring", kc.TR(SHAPE[:2], SHAPE[2:], r=(3, 8, 10, 8)), {"refine": False},
         lambda T: tensor_ring(T, rank=[3, 8, 10, 8, 3]), tensorly.tr_to_tensor),
        ("tucker", kc.Tucker(SHAPE, ones, r=(6, 6, 6, 6)), {"tolerance": 1e-4},
         lambda T: tucker(T, rank=[6, 6, 6, 6]), tensorly.tucker_to_tensor),
        ("parafac", kc.CP(SHAPE, ones, r=8), {"starts": 0, "joint": False, "sweeps": 48},
         lambda T: parafac(T, rank=8), tensorly.cp_to_tensor),
    ]  # fmt: skip
    rows = []
    for title, T in tensors().items():
        array, norm = T.numpy(), float(T.norm())
        for name, fmt, options, theirs, dense in cases:
            W = T.reshape(fmt.M, fmt.N)
            result, their_seconds = timed(lambda theirs=theirs, array=array: theirs(array))
            (_, our_error), our_seconds = timed(lambda fmt=fmt, W=W, options=options: fmt.from_dense(W, **options))
            refined = fmt.from_dense(W, starts=0)[1]
            their_error = float(np.linalg.norm(dense(result) - array)) / norm
            rows.append(
                {
                    "tensor": title, "decomposition": name, "format": str(fmt), "error": our_error,
                    "tensorly_error": their_error, "error_ratio": our_error / their_error, "refined_error": refined,
                    "seconds": our_seconds, "tensorly_seconds": their_seconds,
                    "time_ratio": our_seconds / their_seconds,
                }
            )  # fmt: skip
            print(f"{title:18} {name:14} error x{rows[-1]['error_ratio']:.5f} time x{rows[-1]['time_ratio']:.2f}",
                  file=sys.stderr)  # fmt: skip
    return rows


def svd_bound() -> dict[str, float]:
    """KT beside the truncated SVD of the rearranged matrix (which is W itself)."""
    W = tensors()["low rank + noise"].reshape(480, 288)
    values = torch.linalg.svdvals(W)
    return {
        "bound": float(values[6:].norm() / values.norm()),
        "error": kc.KT((24, 20), (18, 16), K=6).from_dense(W)[1],
    }


def weights() -> torch.Tensor:
    """4 gates of 57,600 x 256 in float32 with a decaying part, as trained weights have, on noise."""
    generator = torch.Generator().manual_seed(1)
    W = torch.randn(4, 57600, 256, generator=generator).mul_(0.01)
    left = torch.randn(4, 57600, 12, generator=generator) * torch.linspace(1, 0.1, 12)
    return W.baddbmm_(left, torch.randn(4, 12, 256, generator=generator), alpha=0.01)


def one_paper_fit(name: str) -> dict[str, Any]:
    """Time and peak memory above the weights of one fit; run in a fresh process."""
    torch.set_num_threads(2)
    W = weights()
    kc.TT((4, 4), (2, 2), r=2).from_dense(torch.randn(16, 4))  # libraries load and warm up
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    _, start_error = PAPER[name].from_dense(W, gates=4, refine=False)
    start_seconds = time.perf_counter() - started
    started = time.perf_counter()
    _, error = PAPER[name].from_dense(W, gates=4)
    seconds = time.perf_counter() - started
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {
        "name": name, "format": str(PAPER[name]), "start_error": start_error, "start_seconds": start_seconds,
        "error": error, "seconds": seconds, "additional_gigabytes": peak / GIGABYTE,
    }  # fmt: skip


def paper_fits() -> list[dict[str, Any]]:
    """Every format in a process of its own."""
    rows = []
    for name in PAPER:
        command = [sys.executable, "-m", "benchmarks.decompose", "--one", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout))
        print(f"{name:10} {rows[-1]['seconds']:.1f} s, {rows[-1]['additional_gigabytes']:.2f} GB", file=sys.stderr)
    return rows


def markdown(record: dict[str, Any]) -> str:
    """The record as tables."""
    lines = ["# Decompositions", "", "## Against tensorly " + record["versions"]["tensorly"], ""]
    lines += [
        f"Tensors {'x'.join(map(str, SHAPE))}, float64, {record['versions']['threads']} threads. Ratios are ours over "
        "theirs; `refined` is our error after refinement.",
        "",
        "| tensor | decomposition | error | theirs | error ratio | refined | time ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in record["tensorly"]:
        lines.append(
            f"| {row['tensor']} | {row['decomposition']} | {row['error']:.6f} | {row['tensorly_error']:.6f} | "
            f"{row['error_ratio']:.5f} | {row['refined_error']:.6f} | {row['time_ratio']:.2f} |"
        )
    bound = record["kt"]
    lines += ["", f"KT error {bound['error']:.12f}, SVD bound {bound['bound']:.12f}.", ""]
    lines += [
        "## 57,600 x 1,024 (4 gates of 256), float32, the paper's ranks",
        "",
        "| format | start error | start s | refined error | s | additional GB |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["paper"]:
        lines.append(
            f"| {row['name']} | {row['start_error']:.5f} | {row['start_seconds']:.1f} | {row['error']:.5f} | "
            f"{row['seconds']:.1f} | {row['additional_gigabytes']:.2f} |"
        )
    return "\n".join([*lines, ""])


def main(arguments: list[str]) -> None:
    """Everything, or one paper fit."""
    if arguments[:1] == ["--tensorly"]:
        torch.set_num_threads(1)
        print(json.dumps(against_tensorly()))
        return
    if arguments[:1] == ["--one"]:
        print(json.dumps(one_paper_fit(arguments[1])))
        return
    import tensorly

    versions = {"torch": torch.__version__, "tensorly": tensorly.__version__, "threads": 1}
    fields = subprocess.run(
        [sys.executable, "-m", "benchmarks.decompose", "--tensorly"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, text=True, check=True,
    ).stdout  # fmt: skip
    record = {"versions": versions, "tensorly": json.loads(fields), "kt": svd_bound(), "paper": paper_fits()}
    RESULTS.mkdir(exist_ok=True)
    for name, text in (("decompose.json", json.dumps(record, indent=1) + "\n"), ("decompose.md", markdown(record))):
        (RESULTS / name).write_text(text)
    print(markdown(record))


if __name__ == "__main__":
    main(sys.argv[1:])
