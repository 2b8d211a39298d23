"""Kills, full disks, broken disks, two writers: whole or resumable, and in the end the bits of an undisturbed run.

`make faults` runs the whole matrix and writes its table into docs/reliability.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.__main__ import END, PAGE, START
from tests.faults.matrix import FAULTS, Outcome, Trial, places_of, undisturbed
from tests.faults.works import WORKS, make_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield make_inputs(tmp_path_factory.mktemp("inputs"))


def check(outcome: Outcome) -> None:
    assert outcome.bad == "", outcome


@pytest.mark.parametrize(
    ("work", "fault"), [("train", "torn"), ("train", "ENOSPC"), ("save", "EIO"), ("prepare", "kill")]
)
def test_a_few_faults_leave_what_can_be_read_and_finished(work: str, fault: str, inputs: Path, tmp_path: Path) -> None:
    trial = Trial(work, inputs, tmp_path / "out", undisturbed(work, inputs, tmp_path / "whole"))
    for place in places_of(trial.wanted.places, 3):
        check(trial.run(fault, place))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("work", WORKS)
def test_every_fault_in_every_work(work: str, fault: str, inputs: Path, tmp_path: Path) -> None:
    trial = Trial(work, inputs, tmp_path / "out", undisturbed(work, inputs, tmp_path / "whole"))
    for place in trial.places(fault):
        check(trial.run(fault, place))


def test_the_table_of_the_documentation_has_every_fault_in_every_work_and_none_that_is_bad() -> None:
    text = PAGE.read_text().partition(START)[2].partition(END)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    assert [(row[0].strip("`"), row[1]) for row in rows] == [(work, name) for work in WORKS for name in FAULTS.values()]
    assert all(int(row[2]) >= 1 and "bad" not in row[4] for row in rows)
