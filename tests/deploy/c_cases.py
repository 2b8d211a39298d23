"""Modules to be exported as C, drawn over cells, formats, layers and bits; and programs of the tests' own."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import kronecell as kc
from kronecell.deploy.c_source.check import find_compiler

COMPILER = find_compiler()
SIZES = (6, 8, 12, 16, 18, 24, 30)  # with factors enough for every format
STRICT = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic")


def _recipe(draw: random.Random) -> str | None:
    r = draw.choice((1, 2, 3, 5))
    return draw.choice(
        (
            None, "dense", f"lowrank:r={r}", f"cp:r={r}", f"tucker:r={r}", f"tt:r={r}",
            f"tr:r={r}", f"bt:r={r},P=2", f"ht:r={r}", f"kt:K={r}",
            f"doped:0.05+tt:r={r}", f"doped:0.2,block=2+lowrank:r={r}",
            f"kcp:K=2,CA={r},CB=2", f"kcp:K=2,CA=2,CB={r},tie=all",
        )
    )  # fmt: skip


def drawn(seed: int) -> tuple[str, nn.Module]:
    """What a case is, and its module; ranks that a shape cannot use are drawn again."""
    draw = random.Random(seed)
    while True:
        with suppress(kc.RankError):
            return _drawn(draw, seed)


def _drawn(draw: random.Random, seed: int) -> tuple[str, nn.Module]:
    torch.manual_seed(seed)
    kind = draw.choice(
        ("LSTM", "LSTM", "GRU", "GRU", "LSTMCell", "GRUCell", "TensorLinear", "Linear", "VideoClassifier")
    )
    M, H = draw.choice(SIZES), draw.choice(SIZES)
    formats = {"input_format": _recipe(draw), "hidden_format": _recipe(draw)}
    words = {**formats, "shared": draw.random() < 0.5}
    module: nn.Module
    if kind in ("LSTM", "GRU"):
        more: dict[str, Any] = {"num_layers": draw.choice((1, 1, 2, 3)), "bidirectional": draw.random() < 0.3}
        more["bias"] = draw.random() < 0.8
        if kind == "LSTM" and draw.random() < 0.3:
            more["proj_size"] = H // 2
        words |= more
        module = getattr(kc, kind)(M, H, **words)
    elif kind.endswith("Cell"):
        module = getattr(kc, kind)(M, H, **words)
    elif kind == "TensorLinear":
        module = kc.GRU(M, H, input_format=formats["input_format"] or "tt:r=2").weight_ih_l0
    elif kind == "Linear":
        module = nn.Linear(M, H, bias=draw.random() < 0.5)
    else:
        words |= {"normalise": draw.choice(("pixel", "frame", "clip")), "cell": draw.choice(("lstm", "gru"))}
        words["readout"] = draw.choice(("last", "mean"))
        module = kc.VideoClassifier(M, H, draw.choice((2, 11)), pixel_mean=0.3, input_gain=2.0, **words)
    bits = draw.choice((None, 3, 4, 5, 6, 7, 8))
    if bits is not None:
        words |= {"bits": bits, "group": draw.choice((None, "row", 5, 32))}
        module = kc.quantize(module.eval(), bits=bits, group=words["group"])
    return f"{kind} {M} {H} {words}", module.eval()


def compiled(folder: Path, name: str, main: str, x: bytes, *flags: str) -> bytes:
    """What a program of the tests prints, under the address sanitizer."""
    assert COMPILER is not None
    (folder / "main.c").write_text(main)
    command = [COMPILER, *STRICT, "-O1", "-fsanitize=address,undefined", *flags]
    built = [str(folder / f"{name}.c"), str(folder / "main.c"), "-o", str(folder / "program")]
    subprocess.run([*command, *built], check=True, capture_output=True, text=True)
    ran = subprocess.run(
        [str(folder / "program")], input=x, capture_output=True, env={"ASAN_OPTIONS": "detect_leaks=0"}
    )
    assert ran.returncode == 0, ran.stderr.decode()
    return ran.stdout


def steps_of(name: str, module: nn.Module, folder: Path, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """What the file's and the module's outputs are for a sequence of steps."""
    M, N = (
        int(line.split()[-1])
        for line in (folder / f"{name}.h").read_text().splitlines()
        if "PUTS " in line and "#" in line
    )
    x = torch.randn(steps, M, generator=generator)
    main = f"""#include <stdio.h>
#include "{name}.h"
static {name}_state state;
int main(void)
{{
    float x[{M}], y[{N}];
    const size_t bytes = sizeof state;
    fwrite(&bytes, sizeof bytes, 1, stdout);
    {name}_reset(&state);
    while (fread(x, sizeof(float), {M}, stdin) == {M}) {{
        {name}_step(&state, x, y);
        fwrite(y, sizeof(float), {N}, stdout);
    }}
    return 0;
}}
"""
    printed = compiled(folder, name, main, x.numpy().tobytes())
    yield torch.tensor(int.from_bytes(printed[:8], "little"))
    yield torch.from_numpy(np.frombuffer(printed[8:], np.float32).copy()).reshape(steps, N)
    with torch.no_grad():
        y = module(x)
    yield y[0] if isinstance(y, tuple) else y
