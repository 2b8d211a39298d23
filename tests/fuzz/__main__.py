"""`python -m tests.fuzz --minutes 10`: fresh mutations of everything that is read; what breaks goes to the corpus."""

from __future__ import annotations

import argparse
import itertools
import secrets
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.fuzz.driver import fuzz
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", default="", help="names of targets, as a,b")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [t for t in TARGETS if not arguments.only or t.name in arguments.only.split(",")]
    broken = False
    for kind in chosen:
        with tempfile.TemporaryDirectory() as folder:
            target = kind()
            target.make(Path(folder))
            until = time.monotonic() + 60 * arguments.minutes / len(chosen)
            tried, faults = fuzz(target, itertools.count(secrets.randbits(48)), until)
            target.close()
        broken |= bool(faults)
        print(f"{kind.name}: {tried} inputs, {len(faults)} faults", flush=True)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
