"""A module on disk: model.safetensors beside a config.json that says everything needed to build it again. No pickle.

Both files are written under temporary names, synced and renamed. The tensors carry the digest of their config, so a
save that was interrupted between the two files is noticed when it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kronecell.deploy.atomic import write_atomically
from kronecell.errors import CheckpointError, KronecellError
from kronecell.formats import Format, parse
from kronecell.nn.linear import TensorLinear
from kronecell.nn.recurrent import Recurrent
from kronecell.nn.rnn import GRU, LSTM

FILE_VERSION = 1  # raised when a reader of the old version could not read the new one
INIT_VERSION = 1  # raised when the same seed no longer gives the same first weights
TENSORS, CONFIG = "model.safetensors", "config.json"
OURS: dict[str, type[nn.Module]] = {"TensorLinear": TensorLinear, "LSTM": LSTM, "GRU": GRU}

LAYER_ARGUMENTS = (
    "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size",
    "shared", "hidden_shared", "order", "forget_bias", "pad_input", "recurrence",
)  # fmt: skip


def save(module: nn.Module, path: str | Path) -> Path:
    """Write the module into the folder `path`; an existing folder is overwritten, file by file, atomically.

    A kronecell module can be rebuilt by `load(path)`; any other module is saved too, with the description of the
    kronecell modules inside it, and read back by `load(path, into=module)`.
    """
    tensors = {name: tensor.detach().contiguous() for name, tensor in module.state_dict().items()}
    bad = [name for name, tensor in tensors.items() if not _finite(tensor)]
    if bad:
        raise CheckpointError(f"not saved: {', '.join(bad)} has values that are not finite")
    config = {
        "kronecell_file": FILE_VERSION,
        "init": INIT_VERSION,
        "modules": {name: describe(part) for name, part in _ours_inside(module)},
        "tensors": {
            name: {"shape": [*tensor.shape], "dtype": _dtype_name(tensor.dtype)} for name, tensor in tensors.items()
        },
    }
    text = json.dumps(config, indent=1) + "\n"
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot save into {folder}: {error.strerror or error}") from None
    distinct = _without_sharing(tensors)
    metadata = {"config_sha256": _digest(text), "format": "pt"}
    write_atomically(folder / TENSORS, lambda temporary: save_file(distinct, temporary, metadata))
    write_atomically(folder / CONFIG, lambda temporary: temporary.write_text(text))
    return folder


def load(path: str | Path, into: nn.Module | None = None, device: torch.device | str | None = None) -> Any:
    """The module saved in the folder `path`, rebuilt, or `into` filled with what was saved from a module like it."""
    folder = Path(path)
    text, config = _read_config(folder)
    tensors = _read_tensors(folder, _digest(text), device)
    _check_tensors(config["tensors"], tensors, folder)
    if into is None:
        module = _build(config, folder, device)
    else:
        module = into
        described = {name: describe(part) for name, part in _ours_inside(module)}
        for name in sorted({*described, *config["modules"]}):
            if described.get(name) != config["modules"].get(name):
                raise CheckpointError(
                    f"{folder}: module {name!r} differs: saved {config['modules'].get(name)}, got {described.get(name)}"
                )
    expected = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in module.state_dict().items()}
    saved = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if into is not None:  # the dtype of a module that is filled is its own
        expected = {name: (shape, saved.get(name, (shape, dtype))[1]) for name, (shape, dtype) in expected.items()}
    if expected != saved:
        raise CheckpointError(f"{folder}: {_what_differs(expected, saved)}")
    module.load_state_dict(tensors, strict=True)
    return module


def describe(module: nn.Module) -> dict[str, Any]:
    """The constructor arguments of a kronecell module, in JSON's types."""
    description: dict[str, Any] = {"class": type(module).__name__}
    if isinstance(module, TensorLinear):
        arguments = {
            "format": str(module.format),
            "bias": module.bias is not None,
            "order": module.order,
            "gates": module.gates,
            "shared": module.shared,
        }
    elif isinstance(module, Recurrent):
        arguments = {name: getattr(module, name) for name in LAYER_ARGUMENTS}
        if not isinstance(module, LSTM):
            del arguments["proj_size"]
        arguments["input_format"] = [_format_text(fmt) for fmt in module.input_formats]
        arguments["hidden_format"] = [_format_text(fmt) for fmt in module.hidden_formats]
    else:
        raise CheckpointError(f"only {', '.join(OURS)} describe themselves, got {type(module).__name__}")
    return description | json.loads(json.dumps({"arguments": arguments}))


def rebuild(description: Mapping[str, Any], **factory: Any) -> nn.Module:
    """The module a description names, with new parameters."""
    kind = OURS.get(description.get("class", ""))
    if kind is None:
        raise CheckpointError(f"unknown class {description.get('class')!r}; expected one of {', '.join(OURS)}")
    arguments = dict(description["arguments"])
    for name in ("order", "shared", "hidden_shared"):
        if name in arguments:
            arguments[name] = _tuples(arguments[name])
    for name in ("input_format", "hidden_format"):
        if name in arguments:
            arguments[name] = [None if entry is None else parse(entry) for entry in arguments[name]]
    return kind(**arguments, **factory)


def _ours_inside(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Our modules by name, those inside one of ours excepted; the name of the module itself is ''."""
    found: list[tuple[str, nn.Module]] = []
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{outer}." if outer else "") for outer, _ in found)
        if type(part) in OURS.values() and not inside:
            found.append((name, part))
    return found


def _build(config: Mapping[str, Any], folder: Path, device: torch.device | str | None) -> nn.Module:
    description = config["modules"].get("")
    if description is None:
        raise CheckpointError(
            f"{folder} holds a module that is not one of {', '.join(OURS)}; build it, then call load(path, into=module)"
        )
    dtypes = {entry["dtype"] for entry in config["tensors"].values()}
    if len(dtypes) != 1:
        raise CheckpointError(f"{folder}: expected tensors of one dtype, got {sorted(dtypes)}")
    try:
        module = rebuild(description, dtype=getattr(torch, dtypes.pop()), device="meta")
    except (KronecellError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder}: {CONFIG} does not describe a module: {error}") from None
    return module.to_empty(device=device or "cpu")


def _read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    file = folder / CONFIG
    try:
        text = file.read_text()
        config = json.loads(text)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; a saved module is a folder with {CONFIG} and {TENSORS}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} is damaged: not JSON ({error})") from None
    version = config.get("kronecell_file") if isinstance(config, dict) else None
    if not isinstance(version, int):
        raise CheckpointError(f"{file} was not written by kronecell: it has no 'kronecell_file' version")
    if version > FILE_VERSION:
        raise CheckpointError(
            f"{file} has file version {version}, this kronecell reads up to {FILE_VERSION}; install a newer kronecell"
        )
    if not isinstance(config.get("modules"), dict) or not isinstance(config.get("tensors"), dict):
        raise CheckpointError(f"{file} is damaged: 'modules' or 'tensors' is missing")
    return text, config


def _read_tensors(folder: Path, digest: str, device: torch.device | str | None) -> dict[str, Tensor]:
    file = folder / TENSORS
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; a saved module is a folder with {CONFIG} and {TENSORS}")
    try:
        with safe_open(file, framework="pt", device=str(device or "cpu")) as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged or truncated: {error}") from None
    if metadata.get("config_sha256") != digest:
        raise CheckpointError(
            f"{file} was saved with another {CONFIG} than the one beside it: the file was edited, or a save was "
            "interrupted; save the module again"
        )
    return tensors


def _check_tensors(described: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> None:
    try:
        expected = {name: (tuple(e["shape"]), getattr(torch, e["dtype"])) for name, e in described.items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder / CONFIG} is damaged: bad tensor description ({error})") from None
    saved = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if expected != saved:
        raise CheckpointError(f"{folder / TENSORS}: {_what_differs(expected, saved)}")
    bad = [name for name, tensor in tensors.items() if not _finite(tensor)]
    if bad:
        raise CheckpointError(f"{folder / TENSORS}: {', '.join(bad)} has values that are not finite")


def _what_differs(expected: Mapping[str, Any], got: Mapping[str, Any]) -> str:
    missing, extra = sorted({*expected} - {*got}), sorted({*got} - {*expected})
    wrong = [
        f"{name}: expected {_show(expected[name])}, got {_show(got[name])}"
        for name in expected
        if name in got and expected[name] != got[name]
    ]
    parts = ([f"missing tensors {', '.join(missing)}"] if missing else []) + (
        [f"tensors that do not belong: {', '.join(extra)}"] if extra else []
    )
    return "; ".join(parts + wrong)


def _show(entry: tuple[tuple[int, ...], torch.dtype]) -> str:
    return f"{entry[0]} {_dtype_name(entry[1])}"


def _without_sharing(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tied parameters are written once per name: safetensors does not store tensors that share memory."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        result[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return result


def _tuples(value: Any) -> Any:
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list) else value


def _format_text(fmt: Format | None) -> str | None:
    return None if fmt is None else str(fmt)


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
