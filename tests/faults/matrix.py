"""The matrix: every fault in every work, at up to 30 places of each, and what came of it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.faults.inject import SITE, Fault, in_child
from tests.faults.works import WORKS, begin

FAULTS = {
    "kill": "kill -9 at the n-th change of a file",
    "torn": "kill -9, and the file under way has lost its second half",
    "EIO": "one change fails with an input/output error",
    "ENOSPC": "the disk is full from the n-th change on",
    "size": "no file may grow past n bytes, and the write stops in its middle",
    "EROFS": "the disk is read-only from the n-th change on",
    "clock": "the clock runs backwards",
    "two": "two processes at once",
}
MOST = 30
FEWER = {"train": 10, "sweep": 4, "export": 5}  # of the slow works; kills of a training are tried at all of MOST
SIZES = (10, 300, 2000, 6000, 12_000, 20_000)


@dataclass(frozen=True)
class Wanted:
    """The end of an undisturbed work, and how many places it has."""

    bits: dict[str, str]
    places: int


@dataclass(frozen=True)
class Outcome:
    """`how` it ended: killed, one line or done; `bad` says what is wrong with that."""

    work: str
    fault: str
    place: int
    how: str
    bad: str = ""


def undisturbed(work: str, inputs: Path, out: Path) -> Wanted:
    """Do the work once in peace."""
    begin(work, inputs, out)
    ending = in_child(partial(WORKS[work].do, inputs), out)
    assert ending.error == "", ending.error
    bits, inside = WORKS[work].bits(out), WORKS[work].inside
    if inside is not None:
        begin(work, inputs, out)
        ending = in_child(partial(inside, inputs), out)
    return Wanted(bits, ending.places)


def places_of(count: int, most: int) -> list[int]:
    """At most so many places, evenly, the first and the last among them."""
    if count <= most:
        return [*range(1, count + 1)]
    return sorted({1 + round(i * (count - 1) / (most - 1)) for i in range(most)})


@dataclass(frozen=True)
class Trial:
    """One work under faults."""

    work: str
    inputs: Path
    out: Path
    wanted: Wanted

    def places(self, fault: str) -> list[int]:
        """Where this fault is tried."""
        if fault in ("clock", "two"):
            return [1]
        if fault == "size":
            return [*SIZES]
        few = self.work in FEWER and (self.work, fault) != ("train", "kill")
        return places_of(self.wanted.places, FEWER[self.work] if few else MOST)

    def run(self, fault: str, place: int) -> Outcome:
        """Begin, disturb, read, do it again, compare."""
        work = WORKS[self.work]
        begin(self.work, self.inputs, self.out)
        if fault == "two":
            how, bad = self._two()
        else:
            # A killed decoder is another test's; sizes are inherited.
            elsewhere = fault != "size" and (
                work.inside is not None or (self.work == "prepare" and fault not in ("kill", "torn"))
            )
            with _children_too(self.out, Fault(fault, place), elsewhere):
                ending = in_child(partial(work.do, self.inputs), self.out, Fault(fault, place))
            how = "killed" if ending.killed else "one line" if ending.error else "done"
            bad = (
                ending.error if "Traceback" in ending.error or (ending.killed and fault not in ("kill", "torn")) else ""
            )
        if not bad:
            bad = self._after()
        return Outcome(self.work, fault, place, how, bad)

    def _after(self) -> str:
        work = WORKS[self.work]
        try:
            work.whole(self.out)
        except Exception as error:
            return f"cannot be read after the fault: {error!r}"
        again = in_child(partial(work.do, self.inputs), self.out)
        if again.error:
            return f"cannot be done again: {again.error}"
        bits = work.bits(self.out)
        wrong = sorted(name for name in {*bits, *self.wanted.bits} if bits.get(name) != self.wanted.bits.get(name))
        return f"differs from an undisturbed run in {wrong[:5]}" if wrong else ""

    def _two(self) -> tuple[str, str]:
        endings = []

        def one() -> None:
            endings.append(in_child(partial(WORKS[self.work].do, self.inputs), self.out))

        threads = [threading.Thread(target=one) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [ending.error for ending in endings if ending.error]
        bad = next((error for error in errors if "Traceback" in error), "")
        if len(errors) == 2 and WORKS[self.work].inside is not None:  # each may have begun what the other one wants
            return "each is refused a part", bad
        return ("one is refused" if errors else "both are done"), bad or ("both failed" if len(errors) == 2 else "")


@contextmanager
def _children_too(root: Path, fault: Fault, wanted: bool) -> Iterator[None]:
    """Decoding processes of `prepare` and runs of `sweep` have the same faults, by their start-up file."""
    if not wanted:
        yield
        return
    site = root.with_name("site")
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE)
    here = str(Path(__file__).resolve().parents[2])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), here, before)))
    os.environ["KRONECELL_TEST_FAULT"] = json.dumps([str(root), fault.kind, fault.place])
    try:
        yield
    finally:
        del os.environ["KRONECELL_TEST_FAULT"]
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


__all__ = ["FAULTS", "Outcome", "Trial", "Wanted", "places_of", "undisturbed"]
