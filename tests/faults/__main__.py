"""`python -m tests.faults`: the whole matrix; its table goes into docs/reliability.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from tests.faults.matrix import FAULTS, Outcome, Trial, undisturbed
from tests.faults.works import WORKS, make_inputs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
START, END = "<!-- table: written by make faults -->\n", "<!-- end of the table -->\n"


def row(work: str, fault: str, outcomes: list[Outcome]) -> str:
    """One line of the table."""
    hows = [outcome.how for outcome in outcomes]
    counts = ", ".join(f"{hows.count(how)} {how}" for how in dict.fromkeys(hows))
    bad = [outcome for outcome in outcomes if outcome.bad]
    result = (
        f"**{len(bad)} bad**: {bad[0].bad.splitlines()[-1][:80]}" if bad else "readable after it; then the same bits"
    )
    return f"| `{work}` | {FAULTS[fault]} | {len(outcomes)} | {counts} | {result} |\n"


def write(lines: list[str]) -> None:
    """Put these rows into the page; those of works that were not run stay."""
    before, _, rest = PAGE.read_text().partition(START)
    old, _, after = rest.partition(END)
    rows = {work: [line for line in old.splitlines(True) if line.startswith(f"| `{work}` ")] for work in WORKS}
    rows |= {work: own for work in WORKS if (own := [line for line in lines if line.startswith(f"| `{work}` ")])}
    head = "| work | fault | places | how it ended | afterwards |\n|---|---|---|---|---|\n"
    PAGE.write_text(before + START + head + "".join(line for own in rows.values() for line in own) + END + after)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--only", default="", help="works, as a,b")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reliability.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines, broken = [], False
    with tempfile.TemporaryDirectory() as folder:
        inputs = make_inputs(Path(folder) / "inputs")
        for work in WORKS:
            if arguments.only and work not in arguments.only.split(","):
                continue
            trial = Trial(work, inputs, Path(folder) / "out", undisturbed(work, inputs, Path(folder) / "whole"))
            for fault in FAULTS:
                outcomes = [trial.run(fault, place) for place in trial.places(fault)]
                for outcome in outcomes:
                    if outcome.bad:
                        broken = True
                        print(outcome, file=sys.stderr, flush=True)
                lines.append(row(work, fault, outcomes))
                print(lines[-1], end="", flush=True)
    if arguments.write:
        write(lines)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
