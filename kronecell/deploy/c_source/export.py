"""kc.export_c: NAME.h and NAME.c, checked before they are handed over."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kronecell.deploy.atomic import write_atomically
from kronecell.deploy.c_source.budget import Budget
from kronecell.deploy.c_source.check import Check, check, find_compiler
from kronecell.deploy.c_source.parts import Network, take_apart
from kronecell.deploy.c_source.writing import Written, write_network
from kronecell.errors import CheckpointError, printable

PREFERENCES = ("balance", "size", "speed")
CODE_BYTES = 2**13  # of machine code, at most, that is counted for flash before anything is compiled
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,40}")
# Words of C and of C++, and headers of the standard library, which NAME.h would hide.
TAKEN = frozenset(
    re.findall(
        r"\w+",
        "auto break case char class const continue default delete do double else enum extern float for goto if inline "
        "int long main namespace new operator private public register restrict return short signed sizeof static "
        "struct switch template this try typedef union unsigned using virtual void volatile while "
        "assert complex ctype errno fenv inttypes iso646 limits locale math setjmp signal stdarg stdbool stddef stdint "
        "stdio stdlib string tgmath time wchar wctype",
    )
)


@dataclass(frozen=True)
class CRow:
    """One matrix: how it runs, its bytes of flash, its multiply-adds a step and its floats of scratch."""

    name: str
    how: str
    bytes: int
    macs: int
    scratch: int


@dataclass(frozen=True)
class CReport:
    """What a network takes as C, known before anything is compiled; prints a table."""

    name: str
    prefer: str
    rows: tuple[CRow, ...]
    array_bytes: int
    state_bytes: int
    work_bytes: int
    macs: int
    written: Written = field(repr=False)

    @property
    def flash(self) -> int:
        """Bytes of const arrays and of code; code is an upper bound."""
        return self.array_bytes + CODE_BYTES

    @property
    def ram(self) -> int:
        """Bytes of the state, beside x and y."""
        return self.state_bytes

    def record(self) -> dict[str, Any]:
        """In JSON's types."""
        numbers = {"array_bytes": self.array_bytes, "flash": self.flash, "ram": self.ram, "macs": self.macs}
        if self.work_bytes:
            numbers["ram_for_each_step_of_a_run"] = self.work_bytes
        return {"name": self.name, "prefer": self.prefer, **numbers, "matrices": [vars(row) for row in self.rows]}

    def __str__(self) -> str:
        lines = [("matrix", "flash", "multiply-adds", "scratch", "how")]
        lines += [(r.name, f"{r.bytes:,}", f"{r.macs:,}", f"{4 * r.scratch:,}", r.how) for r in self.rows]
        others = self.array_bytes - sum(row.bytes for row in self.rows)
        lines.append(("biases", f"{others:,}", "", "", ""))
        widths = [max(len(line[i]) for line in lines) for i in range(5)]
        table = [
            "  ".join(
                cell.ljust(width) if i in (0, 4) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        table.append(
            f"flash: {self.array_bytes:,} bytes of arrays and up to {CODE_BYTES:,} of code; RAM: {self.ram:,} bytes "
            f"beside x and y; {self.macs:,} multiply-adds a step"
        )
        if self.work_bytes:
            table.append(f"RAM of name_run: {self.work_bytes:,} bytes more for each step")
        return "\n".join(table)


@dataclass(frozen=True)
class CExport:
    """The files, what they take, and how they were checked (None: there was no compiler)."""

    header: Path
    source: Path
    report: CReport
    check: Check | None

    def __str__(self) -> str:
        checked = str(self.check) if self.check is not None else "NOT CHECKED: no C compiler was found (set CC)"
        return f"{self.report}\nwrote {self.source} and {self.header}\n{checked}"


@torch.no_grad()
def report_c(
    module: nn.Module,
    name: str = "network",
    *,
    prefer: str = "balance",
    flash: int | None = None,
    ram: int | None = None,
) -> CReport:
    """What a module takes as C: flash, RAM and multiply-adds a step. Nothing is compiled or written."""
    name = check_name(name)
    _check_preference(prefer)
    return within(take_apart(module), name, prefer, Budget.of(flash, ram))


@torch.no_grad()
def export_c(
    module: nn.Module,
    path: str | Path,
    name: str = "network",
    *,
    prefer: str = "balance",
    flash: int | None = None,
    ram: int | None = None,
) -> CExport:
    """Write NAME.h and NAME.c into the folder `path`: C99 without any library, for one sequence at a time.

    LSTM and GRU (every layer, direction, projection and format), their cells, Linear, TensorLinear and VideoClassifier,
    with weights of float32 or those of `kc.quantize`. `prefer` is what the orders of products are chosen for: "size"
    (flash and RAM), "speed" (time, by a model of the loops) or "balance" (the smallest product of flash and
    multiply-adds).

    A budget in bytes, of `flash` (arrays and code) or `ram` (the state, beside x and y), makes it take any order that
    keeps it; where none does, it is refused with what would fit.

    The file is compiled with the C compiler that is found, run and compared with the module before it gets its name.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_c(nn.Linear(8, 4), folder, "head").source.name
    'head.c'
    """
    name = check_name(name)
    _check_preference(prefer)
    network = take_apart(module)
    report = within(network, name, prefer, Budget.of(flash, ram))
    written = report.written
    compiler = find_compiler()
    checked = None if compiler is None else check(network, name, written.header, written.source, compiler)
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot make the folder {printable(folder)}: {error}") from None
    header, source = folder / f"{name}.h", folder / f"{name}.c"
    write_atomically(source, lambda temporary: temporary.write_text(written.source))
    write_atomically(header, lambda temporary: temporary.write_text(written.header))
    return CExport(header, source, report, checked)


def within(network: Network, name: str, prefer: str, budget: Budget) -> CReport:
    """The network in the preferred orders, or in others if only these keep the budget."""
    reports = []
    for preference in dict.fromkeys((prefer, *(PREFERENCES if budget.given else ()))):
        report = _report(write_network(network, name, preference), name, preference)
        if budget.holds(report.flash, report.ram):
            return report
        reports.append(report)

    def needs(module: nn.Module) -> tuple[int, int]:
        found = report_c(module, name, prefer="size")
        return found.flash, found.ram

    raise CheckpointError(budget.refusal(network, [(report.flash, report.ram) for report in reports], needs))


def _check_preference(prefer: str) -> None:
    if prefer not in PREFERENCES:
        raise CheckpointError(f"prefer must be one of {', '.join(PREFERENCES)}, got {prefer!r}")


def check_name(name: Any) -> str:
    """A name that functions of C, and a header, can have."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None or name.lower() in TAKEN:
        raise CheckpointError(
            "name must be an identifier of C that is no keyword or standard header, such as lstm_8bit: a letter, then "
            f"up to 40 letters, digits and underscores; got {name!r}"
        )
    return name


def _report(written: Written, name: str, prefer: str) -> CReport:
    rows = tuple(
        CRow(matrix.name, product.text, product.num_bytes, product.macs, product.scratch)
        for matrix, product in written.products
    )
    return CReport(
        name, prefer, rows, written.array_bytes, written.state_bytes, written.work_bytes, written.macs, written
    )
