"""What a sparse part costs at run time: frozen LSTMs of 512 and 1024, a batch of 1, 1 and 50 steps, one thread.

    python -m benchmarks.doped_speed

Against nn.LSTM, torch's dynamic int8, and the structure alone. W and U are in the same format.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from statistics import quantiles
from typing import Any

import torch
from torch import nn

import kronecell as kc
from benchmarks.results import Options, machine, main, table, write
from benchmarks.timing import interleave
from kronecell.nn.sparse import SparseMatrix

STRUCTURES = {"low rank, H / 16": "lowrank:r={rank}", "KCP(8,4,2)": "kcp:K=8,CA=4,CB=2", "TT, rank 8": "tt:r=8"}
DOPING = {"alone": "", "2%": "doped:0.02+", "2% in blocks of 16": "doped:0.02,block=16+"}


def frozen(size: int, text: str) -> nn.Module:
    """A frozen LSTM whose sparse parts are not zero."""
    rnn = kc.LSTM(size, size, input_format=text, hidden_format=text)
    for part in rnn.modules():
        if isinstance(part, SparseMatrix):
            nn.init.normal_(part.entries, std=size**-0.5)
    return kc.freeze(rnn)


def times(modules: dict[str, nn.Module], size: int, steps: int, repeats: int) -> list[dict[str, Any]]:
    """Of all modules in turn, and how they compare."""
    x = torch.randn(steps, 1, size)
    cases: dict[str, Callable[[], object]] = {name: lambda m=m: m(x) for name, m in modules.items()}  # type: ignore[misc]
    with torch.inference_mode():
        samples = interleave(cases, repeats)
    # The lower quartile: on a shared machine, what is above it is other work.
    seconds = {name: quantiles(s, n=4)[0] if len(s) > 1 else s[0] for name, s in samples.items()}
    facts = []
    for name, time in seconds.items():
        structure = seconds.get(f"{name.rpartition(' / ')[0]} / alone", time)
        facts.append(
            {
                "hidden": size, "steps": steps, "name": name, "ms": 1e3 * time, "of_dense": seconds["nn.LSTM"] / time,
                "of_int8": seconds["torch dynamic int8"] / time, "over_structure": time / structure,
            }
        )  # fmt: skip
    return facts


def run(options: Options) -> None:
    """All sizes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    facts: list[dict[str, Any]] = []
    for size in (32,) if options.quick else (512, 1024):
        dense = nn.LSTM(size, size).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about its own quantization
            int8 = torch.ao.quantization.quantize_dynamic(
                nn.Sequential(dense), {nn.LSTM}, dtype=torch.qint8
            )  # children alone
        modules = {"nn.LSTM": dense, "torch dynamic int8": int8}
        for name, recipe in STRUCTURES.items():
            for doping, head in DOPING.items():
                text = head + recipe.format(rank=max(1, size // 16))
                modules[f"{name} / {doping}"] = frozen(size, text)
        for steps in (1, 3) if options.quick else (1, 50):
            facts += times(modules, size, steps, 1 if options.quick else 15)
    rows = []
    for fact in facts:
        over = f"{fact['over_structure']:.2f}" if " / " in fact["name"] else "-"
        rows.append([fact["hidden"], fact["steps"], fact["name"], f"{fact['ms']:.3f}", f"{fact['of_dense']:.1f}x",
                     f"{fact['of_int8']:.1f}x", over])  # fmt: skip
        options.say(" ".join(map(str, rows[-1])))
    head = ["hidden", "steps", "W and U", "ms", "times nn.LSTM", "times int8", "time over the structure alone"]
    text = f"# What a sparse part costs at run time\n\n{machine()}\n\nFrozen, batch 1.\n\n"
    write(options, "doped_speed", {"machine": machine(), "rows": facts}, text + table(head, rows))


if __name__ == "__main__":
    main(run, __doc__)
