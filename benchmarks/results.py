"""What every benchmark shares: its options, progress lines, Markdown tables, and result files written whole."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kronecell.deploy.atomic import write_atomically
from kronecell.ops.library import load

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Options:
    """`quick` runs tiny shapes once, to see that everything works; results go to the folder `results`."""

    quick: bool = False
    results: Path = RESULTS

    def say(self, line: str) -> None:
        """A progress line."""
        print(line, file=sys.stderr, flush=True)

    def read(self, name: str) -> dict[str, Any] | None:
        """The JSON result of a benchmark, None before it has run."""
        path = self.results / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None


def machine(threads: Sequence[int] = (1,)) -> str:
    """The machine in general words."""
    kind = {"x86_64": "x86-64", "AMD64": "x86-64", "aarch64": "ARM64"}.get(platform.machine(), platform.machine())
    used = " and ".join(map(str, threads)) + (" thread" if threads == (1,) else " threads")
    vectors = torch.backends.cpu.get_cpu_capability()
    where = f"{os.cpu_count()} cores of a {kind} machine ({vectors}{', AMD' if made_by_amd() else ''})"
    kernels = "with" if load() else "without"
    return f"Measured on {where}, {used}, torch {torch.__version__}, float32, {kernels} the compiled kernels."


def made_by_amd() -> bool:
    """Whether this processor is AMD's, for which torch's BLAS is slower."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def available_memory() -> float:
    """Free memory in GB; infinite where the system does not say."""
    try:
        import psutil
    except ImportError:
        return float("inf")
    return float(psutil.virtual_memory().available) / 1e9


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(map(str, head)) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write(options: Options, name: str, data: dict[str, Any], text: str) -> None:
    """Write <name>.json and <name>.md."""
    document = json.dumps({"benchmark": name, "torch": torch.__version__, **data}, indent=1) + "\n"
    write_atomically(options.results / f"{name}.json", lambda path: path.write_text(document))
    write_atomically(options.results / f"{name}.md", lambda path: path.write_text(text))
    options.say(f"{name}: wrote {name}.json and {name}.md")


def main(
    run: Callable[[Options], None], about: str | None, parts: Mapping[str, Callable[[Options], None]] | None = None
) -> None:
    """The command line of one benchmark; `--only` runs one of its `parts`."""
    parser = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny shapes, one repeat")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    if parts:
        parser.add_argument("--only", choices=[*parts], help="one part of the benchmark")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    run = (parts or {}).get(getattr(arguments, "only", None) or "", run)
    run(Options(arguments.quick, arguments.results))
