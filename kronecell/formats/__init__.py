"""The formats by name, and their text form: kcp:m=8x20x20x18,n=4x4x4x4,K=4,CA=4,CB=2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from kronecell.errors import RankError, ShapeError
from kronecell.formats.base import Format, Shared
from kronecell.formats.bt import BT
from kronecell.formats.cp import CP
from kronecell.formats.dense import Dense
from kronecell.formats.doped import Doped, doping_text
from kronecell.formats.ht import HT
from kronecell.formats.kcp import KCP
from kronecell.formats.kt import KT
from kronecell.formats.lowrank import LowRank
from kronecell.formats.tr import TR
from kronecell.formats.tt import TT
from kronecell.formats.tucker import Tucker

FORMATS: dict[str, type[Format]] = {f.kind: f for f in (Dense, LowRank, CP, Tucker, TT, TR, BT, HT, KT, KCP)}

__all__ = [
    "BT", "CP", "FORMATS", "HT", "KCP", "KT", "TR", "TT",
    "Dense", "Doped", "Format", "LowRank", "Recipe", "Shared", "Tucker", "parse", "parse_recipe",
]  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """A format without modes, such as "kcp:K=4,CA=4,CB=2": applied to a layer once its modes are chosen."""

    kind: str
    options: tuple[tuple[str, Any], ...]
    doping: tuple[float, int] | None = None  # density and block of the entries that are added

    def with_modes(self, m: Sequence[int], n: Sequence[int], clip: bool = False) -> Format:
        """The format with these modes."""
        options = dict(self.options) | ({"clip": True} if clip and self.kind != "dense" else {})
        structure = FORMATS[self.kind](tuple(m), tuple(n), **options)
        return structure if self.doping is None else Doped(structure, *self.doping)

    def __str__(self) -> str:
        values = (f"{key}={'x'.join(map(str, v)) if isinstance(v, tuple) else v}" for key, v in self.options)
        doping = "" if self.doping is None else doping_text(*self.doping)
        return doping + ":".join(filter(None, (self.kind, ",".join(values))))


def parse(text: str) -> Format:
    """The format a string names; parse(str(fmt)) == fmt.

    >>> parse("tt:m=8x20,n=4x4,r=3").num_params
    336
    """
    doping, structure = split_doping(text)
    if doping is not None:
        return Doped(parse(structure), *doping)
    kind, options = _read(text)
    missing = [name for name in ("m", "n") if name not in options]
    if missing:
        raise ShapeError(f"format {text!r} has no modes {' and '.join(missing)}; expected e.g. {_example(kind)}")
    _check_options(kind, options, text)
    return FORMATS[kind](**options)


def parse_recipe(text: str) -> Recipe:
    """A format string without modes, for layers whose modes are chosen later."""
    doping, structure = split_doping(text)
    if doping is not None:
        recipe = parse_recipe(structure)
        return Recipe(recipe.kind, recipe.options, doping)
    kind, options = _read(text)
    if "m" in options or "n" in options:
        raise ShapeError(f"recipe {text!r} names modes; leave m and n out, or use kc.parse for a complete format")
    _check_options(kind, {"m": (), "n": (), **options}, text)
    return Recipe(kind, tuple(options.items()))


def split_doping(text: str) -> tuple[tuple[float, int] | None, str]:
    """Density and block of a doped format's text, and the text of its structure; None and the text of any other.

    >>> split_doping("doped:0.02,block=16+tt:r=4")
    ((0.02, 16), 'tt:r=4')
    """
    if not isinstance(text, str) or text.strip()[:5].lower() != Doped.kind:
        return None, text
    head, plus, structure = text.partition("+")
    if not plus or split_doping(structure)[0] is not None:
        raise ShapeError(
            f"cannot read {text!r}; expected a density and one structure, e.g. doped:0.02+{_example('tt')}"
        )
    density, _, block = (part.strip() for part in head.partition(":")[2].partition(","))
    key, _, size = (part.strip() for part in block.partition("="))
    try:
        if block and key != "block":
            raise ValueError
        return (float(density), int(size) if block else 1), structure
    except ValueError:
        raise RankError(
            f"cannot read {head!r} in format {text!r}; expected doped:DENSITY or doped:DENSITY,block=OUTPUTS, "
            "such as doped:0.02 or doped:0.02,block=16"
        ) from None


def _example(kind: str) -> str:
    ranks = {"kcp": ",K=4,CA=4,CB=2", "kt": ",K=4", "bt": ",r=4,P=2", "dense": ""}.get(kind, ",r=4")
    return f"{kind}:m=8x20x20x18,n=4x4x4x4{ranks}"


def _read(text: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(text, str):
        raise ShapeError(f"a format string is expected, such as {_example('kcp')!r}, got {type(text).__name__}")
    kind, _, rest = text.strip().partition(":")
    kind = kind.strip().lower()
    if kind not in FORMATS:
        raise ShapeError(f"unknown format {kind!r} in {text!r}; expected one of {', '.join(FORMATS)}")
    options: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, separator, value = (piece.strip() for piece in item.partition("="))
        if not separator or not value:
            raise ShapeError(f"cannot read {item!r} in format {text!r}; expected key=value, e.g. {_example(kind)}")
        if key in options:
            raise ShapeError(f"{key!r} is given twice in format {text!r}; give it once")
        options[key] = _value(key, value, text)
    return kind, options


def _value(key: str, value: str, text: str) -> Any:
    if key == "tie":
        return value
    try:
        numbers = tuple(int(piece) for piece in value.split("x"))
    except ValueError:
        raise RankError(
            f"cannot read {key}={value!r} in format {text!r}; expected an integer or several joined by x, such as 8x20"
        ) from None
    return numbers if len(numbers) > 1 or key in ("m", "n") else numbers[0]


def _check_options(kind: str, options: dict[str, Any], text: str) -> None:
    known = {f.name: f for f in fields(FORMATS[kind])}
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise RankError(f"{kind} has no option {', '.join(unknown)} in {text!r}; expected {', '.join(known)}")
    missing = sorted(name for name, f in known.items() if f.default is MISSING and name not in options)
    if missing:
        raise RankError(f"format {text!r} lacks {', '.join(missing)}; expected e.g. {_example(kind)}")
