"""Tensors in a safetensors file: names and shapes are checked before memory is asked for, values against a digest.

The digest is in the file's own metadata, over names, dtypes, shapes and bytes; files of release 0.1 have none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kronecell.deploy.atomic import write_atomically
from kronecell.deploy.records import MEBIBYTE, check_regular
from kronecell.errors import CheckpointError, printable

DIGEST = "data_sha256"
MOST_HEADER = 64 * MEBIBYTE
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
}  # fmt: skip

Kinds = dict[str, tuple[tuple[int, ...], str]]  # name -> shape and dtype


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write tensors that share no memory in one piece; returns their digest, which the file has too."""
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    digest = digest_of(plain)

    def write(target: Path) -> None:
        try:
            save_file(plain, target, {"format": "pt", **(metadata or {}), DIGEST: digest})
        except SafetensorError as error:
            raise CheckpointError(f"cannot write {printable(path)}: {error}") from None
        _in_order(target)

    write_atomically(path, write)
    return digest


def read_tensors(
    path: Path,
    check: Callable[[Kinds, dict[str, str]], object] = lambda kinds, metadata: None,
    device: torch.device | str | None = None,
    advice: str = "",
    finite: bool = False,
    digest: str | None = None,
) -> dict[str, Tensor]:
    """All tensors of a file; `check` sees names, shapes, dtypes and metadata before memory is asked for.

    The values must be those that were written: by the file's own digest, and by `digest` where the caller has one.
    """
    ending = f"; {advice}" if advice else ""
    size = check_regular(path, CheckpointError)
    try:
        with open(path, "rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if size < 8 or header > min(size, MOST_HEADER):
            raise ValueError(f"it has {size:,} bytes and a header of {header:,}")
        with safe_open(path, framework="pt", device=str(device or "cpu")) as opened:
            metadata = dict(opened.metadata() or {})
            names = [*opened.keys()]
            kinds: Kinds = {}
            for name in names:
                piece = opened.get_slice(name)
                kinds[name] = (*map(int, piece.get_shape()),), DTYPES.get(piece.get_dtype(), piece.get_dtype())
            check(kinds, metadata)
            tensors = {name: opened.get_tensor(name) for name in names}
    except CheckpointError:
        raise
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{printable(path)}: is damaged or truncated, cannot be read ({error}){ending}") from None
    if finite:
        check_finite(path, tensors)
    wanted = {text for text in (metadata.get(DIGEST), digest) if text is not None}
    if wanted and wanted != {digest_of(tensors)}:
        raise CheckpointError(f"{printable(path)}: is damaged: its values do not match their digest{ending}")
    return tensors


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode("utf-8", "surrogatepass"))
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _in_order(path: Path) -> None:
    """Sort the metadata in the header, which the library writes in a random order: equal tensors are equal files."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        if len(text) <= size:
            file.seek(8)
            file.write(text.ljust(size))


def check_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse NaN and infinity by the names of their tensors."""
    bad = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    if bad:
        raise CheckpointError(f"{printable(path)}: {', '.join(bad)} has values that are not finite")


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite; small floats are asked as larger ones, which every platform can."""
    if not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all())


def what_differs(expected: Kinds, got: Kinds) -> str:
    """Missing, superfluous and wrong tensors as text; empty when there are none."""
    missing, extra = sorted({*expected} - {*got}), sorted({*got} - {*expected})
    wrong = [
        f"{name}: expected {_show(expected[name])}, got {_show(got[name])}"
        for name in expected
        if name in got and expected[name] != got[name]
    ]
    parts = ([f"missing tensors {', '.join(missing[:5])}"] if missing else []) + (
        [f"tensors that do not belong: {', '.join(extra[:5])}"] if extra else []
    )
    return "; ".join(parts + wrong[:5])


def kinds_of(tensors: Mapping[str, Tensor]) -> Kinds:
    """Shapes and dtypes of tensors."""
    return {name: (tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _show(kind: tuple[tuple[int, ...], str]) -> str:
    return f"{kind[0]} {kind[1]}"
