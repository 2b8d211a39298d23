"""From what a user writes for a layer (None, a format, a recipe, a list) to one format per layer."""

from __future__ import annotations

from collections.abc import Sequence

from kronecell.errors import KronecellError, ShapeError
from kronecell.formats import Format, Recipe, parse, parse_recipe, split_doping
from kronecell.formats.modes import factorize, padded_size

FormatSpec = Format | Recipe | str | None
FormatSpecs = FormatSpec | Sequence[FormatSpec]

ONE_MODE = ("dense", "lowrank", "kt")  # formats in which a side with several modes is the same as one with one


def layer_formats(spec: FormatSpecs, sizes: Sequence[tuple[int, int]], name: str, pad: bool) -> list[Format | None]:
    """One format per layer; `sizes` are the layers' (M, N), `name` the argument that error texts name.

    A recipe is applied to every layer, its ranks clipped where a layer is too small for them. `pad` allows a format
    with more inputs than the layer has.
    """
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        if len(spec) != len(sizes):
            raise ShapeError(f"{name} needs one entry per layer: expected {len(sizes)}, got {len(spec)}")
        entries = [*spec]
    else:
        entries = [spec] * len(sizes)
    return [
        _layer_format(entry, M, N, f"{name} of layer {layer}", pad)
        for layer, (entry, (M, N)) in enumerate(zip(entries, sizes, strict=True))
    ]


def _layer_format(spec: FormatSpec, M: int, N: int, name: str, pad: bool) -> Format | None:
    if spec is None:
        return None
    if isinstance(spec, str):
        spec = parse(spec) if _names_modes(spec) else parse_recipe(spec)
    if isinstance(spec, Recipe):
        try:
            return spec.with_modes(*recipe_modes(spec.kind, M, N, pad), clip=True)
        except KronecellError as error:
            hint = "" if pad or "hidden" in name else "; pad_input=True pads the input with zeros"
            raise type(error)(f"{name}, {str(spec)!r} for {M} x {N}: {error}{hint}") from None
    if not isinstance(spec, Format):
        raise ShapeError(
            f"{name} must be None, a format such as kc.TT(...), a recipe such as 'tt:r=4' or a list of these, "
            f"got {type(spec).__name__}"
        )
    if spec.N != N or spec.M < M or (spec.M > M and not pad):
        more = " (pad_input=True allows more inputs, filled with zeros)" if spec.N == N and spec.M > M else ""
        raise ShapeError(
            f"{name} does not fit: expected M = {M}, N = {N}, got M = {spec.M}, N = {spec.N} of {spec}{more}; "
            f"for several layers give a list with one entry per layer (None is dense) or a recipe without modes"
        )
    return spec


def recipe_modes(kind: str, M: int, N: int, pad: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Modes of a layer that is given by a recipe: d = 4 from 256 x 256 on, as in the paper, 3 from 64 x 64, else 2.

    When a size does not factorise well into d modes, fewer are tried before it is refused (or its input padded). The
    input's modes descend and the output's ascend, so that no joint mode m_i n_i is much larger than the others.

    >>> recipe_modes("tt", 57600, 256)
    ((16, 16, 15, 15), (4, 4, 4, 4))
    """
    if kind in ONE_MODE:
        return (M,), (N,)
    most = next((d for d in (4, 3) if min(M, N) >= 4**d), 2)
    refused: KronecellError | None = None
    for d in range(most, 1, -1):
        try:
            return factorize(M, d)[::-1], factorize(N, d)
        except ShapeError as error:
            refused = refused or error
    if pad:
        return factorize(padded_size(M, most), most)[::-1], factorize(N, most)
    assert refused is not None
    raise refused


def _names_modes(text: str) -> bool:
    structure = split_doping(text)[1]
    return any(part.strip()[:2] in ("m=", "n=") for part in structure.partition(":")[2].split(","))
