"""Mutations of good files and good requests, the same ones for the same seed."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 2**31, 2**53, 2**63, 10**30, 10**400, -(10**9), 0.5, 1e308, -1e308, 1e-320, "", "x",
    "\0", "../../x", "x" * 3000, "\udcff", "é\u202e", [], {}, [[]], [None], {"": 0}, "nan", "auto", "tt:m=2,n=2,r=9",
    ["x"], [[[[[[1]]]]]], {"class": "LSTM"}, "9" * 400, "float64", [0] * 300, [-1], [2**40, 2**40], "1e999",
)  # fmt: skip
SPLICES: tuple[bytes, ...] = (
    b"[" * 50_000, b"{" * 100, b'{"a":' * 5000, b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 6000, b"\xff\xfe",
    b"\0", b'"', b"\\", b"\\ud800", b",", b"]]]]", b"}}", b"\n", b"\r\n", b"#", b"=", b"a.b.c", b"'''", b'"""',
    b"[]," * 3000, b"%00", b"%", b"&", b"../", b"\xc3\x28", b"1979-05-27T07:32:00Z", b"inf", b"[[a]]", b"a." * 3000,
)  # fmt: skip


def strange(chance: random.Random) -> Any:
    """One of STRANGE, its own copy: the next change may be inside it."""
    return copy.deepcopy(chance.choice(STRANGE))


def json_values(chance: random.Random, value: Any) -> Any:
    """The document with one to three of its values changed, dropped, doubled or swapped with another."""
    value = json.loads(json.dumps(value))
    for _ in range(chance.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return strange(chance)
        holder, key = chance.choice(places)
        kind = chance.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[str(chance.choice(STRANGE))[:50]] = holder.pop(key)
        elif kind == 2:
            other, there = chance.choice(places)
            one, two = copy.deepcopy(holder[key]), copy.deepcopy(other[there])  # one may be inside the other
            holder[key], other[there] = two, one
        elif kind == 3 and isinstance(holder[key], int | float):
            holder[key] = holder[key] * chance.choice((-1, 0, 2, 10, 10**6, 0.5)) + chance.choice((0, 1, -1))
        elif kind == 4 and isinstance(holder[key], str) and holder[key]:
            text = holder[key]
            at = chance.randrange(len(text))
            holder[key] = (
                text[:at] + chance.choice(("", "0", "9", "x", "=", ",", ":", "\0")) + text[at + chance.randrange(2) :]
            )
        else:
            holder[key] = strange(chance)
    return value


def _places(value: Any) -> Any:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield value, key
        yield from _places(entry)


def document(chance: random.Random, content: bytes) -> bytes:
    """A JSON document mutated as values, or as bytes."""
    if chance.random() < 0.7:
        return json.dumps(json_values(chance, json.loads(content))).encode()
    return octets(chance, content)


def octets(chance: random.Random, content: bytes, times: int = 3) -> bytes:
    """Bytes flipped, cut, repeated, spliced."""
    data = bytearray(content)
    for _ in range(chance.randint(1, times)):
        at = chance.randrange(len(data) + 1)
        kind = chance.randrange(6)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[at : at + chance.choice((1, 4, 100, 10**6))]
        elif kind == 2:
            data[at:at] = chance.choice(SPLICES)
        elif kind == 3:
            data[at : at + 8] = chance.choice((b"\xff" * 8, b"\0" * 8, (2**40).to_bytes(8, "little"), b"\x7f" * 8))
        elif kind == 4:
            data[at:at] = data[at : at + 200]
        else:
            data[at:at] = chance.randbytes(chance.randint(1, 20))
    return bytes(data)
