"""Every file that is read back passes here first: what it may cost, then whether it says what it should.

A reader names a schema, which is a check made of the functions below, and the error it raises:

    CONFIG = table({"version": whole(1, 9), "layers": many(text(100), most=1000)})
    config = read_json(path, CONFIG, CheckpointError)

Before anything is parsed: the path is a regular file (opening a pipe would wait for ever), of a limited size, depth
and number of values (an empty list takes twenty times its two characters). Then types and ranges. Whatever is wrong is
the given error, on one line that names the file and the place in it. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping
from typing import Any

from kronecell.errors import KronecellError, printable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MEBIBYTE = 1 << 20
DEEPEST = 32  # brackets inside brackets
MOST_VALUES = 1_000_000  # of a file, unless its reader says otherwise
MOST_DIGITS = 40
LARGEST = 2**53  # whole numbers up to here are exact as floats, too
MOST_TOML = 64 << 10
MOST_DOTS = 64  # in a line of TOML: a dotted key of n parts costs n * n

STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.S)

Error = type[KronecellError]
Check = Callable[[Any, str], None]


class Wrong(ValueError):
    """What is wrong, and where in the document; the border adds the file."""


# Files ------------------------------------------------------------------------------------------------------------


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether something has this name, of whatever kind; a name that no file can have is not there."""
    return os.path.lexists(path)


def read_bytes(path: str | os.PathLike[str], error: Error, most: int = 8 * MEBIBYTE) -> bytes:
    """The content of a regular file of at most `most` bytes."""
    try:
        # A pipe that nobody writes to would block in open; the kind is asked of the descriptor that is read.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise error(f"{printable(path)}: is not a regular file")
            if status.st_size > most:
                raise error(f"{printable(path)}: has {status.st_size:,} bytes; at most {most:,} are read")
            content = file.read(most + 1)  # it may have grown
    except OSError as reason:
        raise error(f"{printable(path)}: cannot be read: {reason.strerror or reason}") from None
    except KronecellError:
        raise
    except ValueError as reason:  # a null character in the name
        raise error(f"{path!r}: cannot be read: {reason}") from None
    if len(content) > most:
        raise error(f"{printable(path)}: has more than {most:,} bytes")
    return content


def check_regular(path: str | os.PathLike[str], error: Error) -> int:
    """The size of a regular file; for readers that open it themselves."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as reason:
        name = repr(path) if "\0" in os.fspath(path) else printable(path)
        raise error(f"{name}: cannot be read: {getattr(reason, 'strerror', None) or reason}") from None
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{printable(path)}: is not a regular file")
    return status.st_size


def read_json(
    path: str | os.PathLike[str],
    check: Check,
    error: Error,
    advice: str = "",
    most: int = 8 * MEBIBYTE,
    most_values: int = MOST_VALUES,
    finite: bool = True,
) -> Any:
    """The value in a JSON file, checked; `advice` ends the error's message. NaN is refused unless `finite=False`."""
    return parse_json(read_bytes(path, error, most), check, error, printable(path), advice, most_values, finite)


def parse_json(
    content: bytes,
    check: Check,
    error: Error,
    source: str,
    advice: str = "",
    most_values: int = MOST_VALUES,
    finite: bool = True,
) -> Any:
    """The value of a JSON text, checked; `source` names it in errors."""
    try:
        _affordable(content, most_values)
        value = _decode(content, _constant if finite else float)
    except Wrong as reason:
        raise error(f"{source}: is damaged: {reason}{advice and f'; {advice}'}") from None
    return checked(value, check, error, source, advice)


def checked(value: Any, check: Check, error: Error, source: str, advice: str = "") -> Any:
    """The value, or the error with what the check found."""
    try:
        check(value, "")
    except Wrong as reason:
        raise error(f"{source}: is damaged: {reason}{advice and f'; {advice}'}") from None
    return value


def read_toml(path: str | os.PathLike[str], error: Error) -> dict[str, Any]:
    """The table in a TOML file of settings."""
    content = read_bytes(path, error, MOST_TOML)
    try:
        return parse_toml(content.decode())
    except (Wrong, UnicodeDecodeError) as reason:
        raise error(f"{printable(path)}: is not TOML: {reason}") from None


def parse_toml(content: str) -> dict[str, Any]:
    """The table of a TOML text; raises Wrong."""
    if len(content) > MOST_TOML:
        raise Wrong(f"{len(content):,} characters; at most {MOST_TOML:,} are read")
    if any(line.count(".") > MOST_DOTS for line in content.splitlines()):
        raise Wrong(f"a line with more than {MOST_DOTS} dots")
    try:
        return tomllib.loads(content)
    except RecursionError:
        raise Wrong("too many brackets inside brackets") from None
    except ValueError as reason:
        raise Wrong(str(reason)) from None


def _affordable(content: bytes, most_values: int) -> None:
    """Refuse what would take much more memory or stack than its size, by looking at brackets and commas alone."""
    opening = content.count(b"[") + content.count(b"{")
    if opening <= DEEPEST and content.count(b",") + opening < most_values:
        return
    bare = STRING.sub(b"", content)
    if bare.count(b",") + bare.count(b"[") + bare.count(b"{") >= most_values:
        raise Wrong(f"more than {most_values:,} values")
    depth = 0
    for byte in re.sub(rb"[^][{}]+", b"", bare):
        depth += 1 if byte in b"[{" else -1
        if depth > DEEPEST:
            raise Wrong(f"more than {DEEPEST} brackets inside brackets")


def _decode(content: bytes, constant: Callable[[str], float]) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"), parse_int=_integer, parse_constant=constant)
    except Wrong:
        raise
    except UnicodeDecodeError as reason:
        raise Wrong(f"not UTF-8 at byte {reason.start}") from None
    except RecursionError:
        raise Wrong("too many brackets inside brackets") from None
    except ValueError as reason:
        raise Wrong(f"not JSON ({reason})") from None


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:  # int() takes time that grows with the square
        raise Wrong(f"a number of {len(digits)} digits")
    return int(digits)


def _constant(name: str) -> float:
    raise Wrong(f"{name} where a finite number is expected")


# Checks -----------------------------------------------------------------------------------------------------------


def whole(least: int = 0, most: int = LARGEST) -> Check:
    """A whole number in a range."""

    def check(value: Any, place: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong(place, "a whole number", value)
        if not least <= value <= most:
            raise _wrong(place, f"{least:,} to {most:,}", value)

    return check


def number(least: float = -math.inf, most: float = math.inf) -> Check:
    """A finite number in a range."""

    def check(value: Any, place: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(place, "a number", value)
        if abs(value) > sys.float_info.max or not math.isfinite(value) or not least <= value <= most:
            raise _wrong(place, f"a finite number from {least:g} to {most:g}", value)

    return check


def text(most: int = 4096, pattern: str | None = None) -> Check:
    """A text of limited length; all of it matches the pattern."""
    compiled = None if pattern is None else re.compile(pattern)

    def check(value: Any, place: str) -> None:
        if not isinstance(value, str):
            raise _wrong(place, "a text", value)
        if len(value) > most:
            raise Wrong(f"{place or 'the text'} has {len(value):,} characters, at most {most:,} are read")
        if compiled is not None and compiled.fullmatch(value) is None:
            raise _wrong(place, f"a text like {pattern}", value)

    return check


def truth(value: Any, place: str) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise _wrong(place, "true or false", value)


def one_of(*allowed: str) -> Check:
    """One of a few texts."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, str) or value not in allowed:
            raise _wrong(place, f"one of {', '.join(allowed)}", value)

    return check


def optional(inner: Check) -> Check:
    """Null, or what `inner` takes."""

    def check(value: Any, place: str) -> None:
        if value is not None:
            inner(value, place)

    return check


def either(*choices: Check) -> Check:
    """What one of the checks takes."""

    def check(value: Any, place: str) -> None:
        reasons = []
        for choice in choices:
            try:
                choice(value, place)
            except Wrong as reason:
                reasons.append(str(reason))
            else:
                return
        raise Wrong(reasons[-1])

    return check


def many(item: Check, most: int = MOST_VALUES, least: int = 0) -> Check:
    """A list of things of one kind."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, list):
            raise _wrong(place, "a list", value)
        if not least <= len(value) <= most:
            raise Wrong(f"{place or 'the list'} has {len(value):,} entries, expected {least:,} to {most:,}")
        for position, entry in enumerate(value):
            item(entry, f"{place}[{position}]")

    return check


def row(*cells: Check) -> Check:
    """A list of a fixed length, each place of its own kind."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, list) or len(value) != len(cells):
            raise _wrong(place, f"a list of {len(cells)}", value)
        for position, (cell, entry) in enumerate(zip(cells, value, strict=True)):
            cell(entry, f"{place}[{position}]")

    return check


def named(item: Check, most: int = MOST_VALUES, longest: int = 1000) -> Check:
    """An object whose names are free and whose values are of one kind."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(place, "an object", value)
        if len(value) > most:
            raise Wrong(f"{place or 'the object'} has {len(value):,} entries, at most {most:,} are read")
        for name, entry in value.items():
            if len(name) > longest:
                raise Wrong(f"{place or 'the object'} has a name of {len(name):,} characters")
            item(entry, _inside(place, name))

    return check


def anything(value: Any, place: str) -> None:
    """Any value; how large and how deep was checked before it was parsed, so that only numbers are left."""
    if isinstance(value, dict | list):
        for name, entry in value.items() if isinstance(value, dict) else enumerate(value):
            anything(entry, _inside(place, str(name)))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number()(value, place)


def unchecked(value: Any, place: str) -> None:
    """Any value, NaN too, for readers that ask every figure what it is."""


def table(
    required: Mapping[str, Check], more: Mapping[str, Check] | None = None, rest: Check | None = anything
) -> Check:
    """An object with these names and perhaps those of `more`; `rest` checks other names, None refuses them."""
    known = {**required, **(more or {})}

    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(place, "an object", value)
        for name in required:
            if name not in value:
                raise Wrong(f"{_inside(place, name)!r} is missing")
        for name, entry in value.items():
            inner = known.get(name, rest)
            if inner is None:
                raise Wrong(f"{_inside(place, name[:40])!r} is not known; expected {', '.join(known)}")
            inner(entry, _inside(place, name))

    return check


def _inside(place: str, name: str) -> str:
    return f"{place}.{name[:60]}" if place else name[:60]


def _wrong(place: str, expected: str, value: Any) -> Wrong:
    kinds = {dict: "an object", list: "a list", type(None): "null", bool: str(value).lower()}
    got = kinds.get(type(value))
    if got is None:  # a number too long for str() raises, a text may be of any length
        got = repr(value[:60]) if isinstance(value, str) else f"{value:.6g}" if abs(value) < 1e300 else "a huge number"
    return Wrong(f"{place or 'it'} must be {expected}, got {got}")
