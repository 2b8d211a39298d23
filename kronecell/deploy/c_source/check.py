"""The C file is compiled, run on seeded inputs and compared with the module, one step at a time and as a sequence."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kronecell.deploy.c_source.parts import Network
from kronecell.deploy.comparison import distance, is_rounding
from kronecell.errors import CheckpointError
from kronecell.nn.cells import RecurrentCell
from kronecell.nn.quantize import dequantize
from kronecell.nn.recurrent import Recurrent

STEPS, SEGMENTS = 5, 2
FLAGS = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O1")
SANITIZER = ("-fsanitize=undefined", "-fno-sanitize-recover=undefined")
FLOAT_TOLERANCE, INTEGER_TOLERANCE = 1e-5, 1e-4
PATIENCE = 600.0  # seconds for a compiler


@dataclass(frozen=True)
class Check:
    """How a file was checked."""

    compiler: str
    sanitized: bool
    difference: float  # largest, relative to the largest value

    def __str__(self) -> str:
        how = f"{' '.join(FLAGS)}{', undefined behaviour sanitizer' if self.sanitized else ''}"
        return f"checked with {self.compiler} ({how}): largest relative difference {self.difference:.1e}"


def find_compiler() -> str | None:
    """$CC, or the first C compiler on the path."""
    wanted = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    return next((found for name in wanted if (found := shutil.which(name))), None)


def check(network: Network, name: str, header: str, source: str, compiler: str) -> Check:
    """Compile, run, compare; refused if the compiler complains or the answers differ."""
    x = inputs(network)
    with tempfile.TemporaryDirectory(prefix="kronecell-") as folder:
        place = Path(folder)
        (place / f"{name}.h").write_text(header)
        (place / f"{name}.c").write_text(source)
        (place / "main.c").write_text(harness(network, name))
        program = place / "check"
        files = [str(place / f"{name}.c"), str(place / "main.c"), "-o", str(program)]
        result = run([compiler, *FLAGS, *SANITIZER, *files])
        sanitized = result.returncode == 0
        if not sanitized:  # a compiler without the sanitizer's library, or a warning
            result = run([compiler, *FLAGS, *files])
        if result.returncode:
            raise CheckpointError(f"{compiler} refuses the C file, nothing was written: {_first_line(result.stderr)}")
        ran = run([str(program)], x.numpy().tobytes())
        if ran.returncode:
            raise CheckpointError(f"the compiled file fails, nothing was written: {_first_line(ran.stderr)}")
        got = torch.from_numpy(np.frombuffer(ran.stdout, np.float32).copy())
    worst = compare(network, x, got)
    return Check(Path(compiler).name, sanitized, worst)


def compare(network: Network, x: Tensor, got: Tensor) -> float:
    """The largest difference of what the harness printed to the module; refused above the tolerance."""
    expected = answers(network.module, x)
    sizes = [part.numel() for part in expected]
    if got.numel() != sum(sizes):
        raise CheckpointError(
            f"the compiled file gave {got.numel()} numbers, expected {sum(sizes)}; nothing was written"
        )
    results = [part.reshape(like.shape) for part, like in zip(got.split(sizes), expected, strict=True)]
    worst = distance(results, expected)
    tolerance = INTEGER_TOLERANCE if network.quantized else FLOAT_TOLERANCE
    if not worst <= tolerance:
        exact = answers(_double(network.module), x)
        if not is_rounding(results, expected, exact):
            raise CheckpointError(
                f"the C file differs from the module by {worst:.1e}, more than {tolerance:.0e}; nothing was written"
            )
    return worst


def _double(module: Any) -> Any:
    return dequantize(copy.deepcopy(module)).eval().double()


def run(command: Sequence[str], given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end."""
    try:
        return subprocess.run(command, input=given, capture_output=True, timeout=PATIENCE)
    except (OSError, subprocess.SubprocessError) as error:
        raise CheckpointError(f"{command[0]} cannot be run, nothing was written: {error}") from None


def _first_line(text: bytes) -> str:
    lines = text.decode(errors="replace").splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no reason given")


def inputs(network: Network) -> Tensor:
    """Seeded inputs: steps of one sequence, or segments of bytes for a classifier."""
    generator = torch.Generator().manual_seed(network.inputs)
    if network.bytes:
        shape = (SEGMENTS, STEPS, network.inputs)
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return torch.randn(STEPS, network.inputs, generator=generator)


@torch.no_grad()
def answers(module: Any, x: Tensor) -> list[Tensor]:
    """What the harness should print."""
    dtype = next(t for t in module.state_dict().values() if t.is_floating_point()).dtype
    if x.dtype == torch.uint8:
        scores = module(x)
        chances = scores.softmax(-1).mean(0)
        return [chances] if module.normalise == "clip" else [chances, scores[-1]]
    x = x.to(dtype)
    last: Any = None
    if isinstance(module, RecurrentCell):
        outputs = []
        for row in x:
            last = module(row, last)
            outputs.append(last[0] if isinstance(last, tuple) else last)
        y = torch.stack(outputs)
    elif isinstance(module, Recurrent):
        y, last = module(x)
    else:
        y = module(x)
        return [y, y]
    parts = list(last) if isinstance(last, tuple) else [last]
    return [y, *parts, *([] if getattr(module, "bidirectional", False) else [y])]


def harness(network: Network, name: str) -> str:
    """A program that reads the inputs from stdin and prints the numbers of `answers`."""
    upper = name.upper()
    kind = "uint8_t" if network.bytes else "float"
    count = (SEGMENTS * STEPS if network.bytes else STEPS) * network.inputs
    states = ""
    if network.layers and not network.classifier:
        c = "    fwrite(state.c, 1, sizeof state.c, stdout);\n" if network.layers[0][0].gates == 4 else ""
        states = f"    fwrite(state.h, 1, sizeof state.h, stdout);\n{c}"
    if network.classifier is not None:
        body = f"""    {name}_predict(&state, x, {SEGMENTS}, {STEPS}, y);
    fwrite(y, sizeof(float), {upper}_OUTPUTS, stdout);
"""
        if network.classifier.normalise != "clip":
            body += f"""    {name}_reset(&state);
    for (size_t step = 0; step < {STEPS}; step++)
        {name}_step(&state, x + ({(SEGMENTS - 1) * STEPS} + step) * {upper}_INPUTS, y);
    fwrite(y, sizeof(float), {upper}_OUTPUTS, stdout);
"""
        work = ""
    else:
        several = network.directions > 1
        needs_work = several and len(network.layers) > 1
        work = f"static float work[{upper}_WORK({STEPS})];\n" if needs_work else ""
        body = f"""    {name}_run(&state, x, {STEPS}, y{", work" if needs_work else ""});
    fwrite(y, sizeof(float), {STEPS} * {upper}_OUTPUTS, stdout);
{states}"""
        if not several:
            body += f"""    {name}_reset(&state);
    for (size_t step = 0; step < {STEPS}; step++)
        {name}_step(&state, x + step * {upper}_INPUTS, y + step * {upper}_OUTPUTS);
    fwrite(y, sizeof(float), {STEPS} * {upper}_OUTPUTS, stdout);
"""
    return f"""#include <stdio.h>
#include "{name}.h"

static {kind} x[{count}];
static float y[{STEPS} * {upper}_OUTPUTS];
{work}static {name}_state state;

int main(void)
{{
    if (fread(x, sizeof x[0], {count}, stdin) != {count})
        return 1;
    {name}_reset(&state);
{body}    return 0;
}}
"""
