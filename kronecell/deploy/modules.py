"""A module on disk: model.safetensors beside a config.json that says everything needed to build it again. No pickle.

Both files are written under temporary names, synced and renamed. The tensors carry the digest of their config, so a
save that was interrupted between the two files is noticed when it is read.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kronecell.deploy.atomic import exclusive, remove_temporaries, write_atomically
from kronecell.deploy.described import CONFIG as SCHEMA
from kronecell.deploy.described import borne_out, tensors_of
from kronecell.deploy.records import anything, checked, is_there, parse_json, read_bytes
from kronecell.deploy.tensorfile import (
    Kinds,
    dtype_name,
    is_finite,
    kinds_of,
    read_tensors,
    what_differs,
    write_tensors,
)
from kronecell.errors import CheckpointError, ShapeError, printable
from kronecell.formats import Format, parse
from kronecell.nn.cells import GRUCell, LSTMCell, RecurrentCell
from kronecell.nn.convert import arguments_of
from kronecell.nn.embedding import TensorEmbedding
from kronecell.nn.linear import TensorLinear
from kronecell.nn.quantize import is_quantized, layout, with_layout, with_report
from kronecell.nn.recurrent import Recurrent
from kronecell.nn.rnn import GRU, LSTM

FILE_VERSION = 1  # raised when a reader of the old version could not read the new one
INTEGERS_VERSION = 2  # of files with integers as weights; the others stay readable for older releases
INIT_VERSION = 1  # raised when the same seed no longer gives the same first weights
TENSORS, CONFIG = "model.safetensors", "config.json"
LAYERS: dict[str, type[nn.Module]] = {
    "TensorLinear": TensorLinear,
    "TensorEmbedding": TensorEmbedding,
    "LSTM": LSTM,
    "GRU": GRU,
    "LSTMCell": LSTMCell,
    "GRUCell": GRUCell,
}
OURS = dict(LAYERS)  # and the models that `register` adds: packages above this one define them

Kind = TypeVar("Kind", bound=nn.Module)

LAYER_ARGUMENTS = (
    "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size",
    "shared", "hidden_shared", "order", "forget_bias", "pad_input", "recurrence",
)  # fmt: skip
CELL_ARGUMENTS = ("input_size", "hidden_size", "bias", "shared", "hidden_shared", "order", "forget_bias", "pad_input")


def register(kind: type[Kind]) -> type[Kind]:
    """A class decorator: files name this class. It has `saved_arguments()` and `from_saved(arguments, **factory)`."""
    OURS[kind.__name__] = kind
    return kind


def save(module: nn.Module, path: str | Path) -> Path:
    """Write the module into the folder `path`; an existing folder is overwritten, file by file, atomically.

    A kronecell module can be rebuilt by `load(path)`; any other module is saved too, with the description of the
    kronecell modules inside it, and read back by `load(path, into=module)`.
    """
    tensors = {name: tensor.detach().contiguous() for name, tensor in module.state_dict().items()}
    bad = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    if bad:
        raise CheckpointError(f"not saved: {', '.join(bad)} has values that are not finite")
    unsettled = [name for name, part in module.named_modules() if isinstance(part, TensorLinear) and not part.settled]
    if unsettled:
        raise CheckpointError(
            f"not saved: the sparse part of {unsettled[0] or 'the layer'} is larger than its format says, because "
            "kc.train_sparsity has not come to the end of its schedule; save the state dicts of both to go on later"
        )
    integers = layout(module)
    config = {
        "kronecell_file": INTEGERS_VERSION if integers else FILE_VERSION,
        "init": INIT_VERSION,
        "modules": {name: describe(part) for name, part in _ours_inside(module)},
        **({"integers": integers} if integers else {}),
        "tensors": {
            name: {"shape": [*tensor.shape], "dtype": dtype_name(tensor.dtype)} for name, tensor in tensors.items()
        },
    }
    text = json.dumps(config, indent=1) + "\n"
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot save into {printable(folder)}: {error.strerror or error}") from None
    with exclusive(folder):  # two writers would leave the tensors of one beside the config of the other
        remove_temporaries(folder)
        write_tensors(folder / TENSORS, _without_sharing(tensors), {"config_sha256": _digest(text.encode())})
        write_atomically(folder / CONFIG, lambda temporary: temporary.write_text(text))
    return folder


def load(path: str | Path, into: nn.Module | None = None, device: torch.device | str | None = None) -> Any:
    """The module saved in the folder `path`, rebuilt, or `into` filled with what was saved from a module like it.

    `into` may also be the model that was compressed: then a copy is returned in which torch.nn's layers are those of
    the file. If integers were saved (see kc.quantize) and `into` has floats, a quantized copy of it is returned.
    """
    folder = Path(path)
    config, tensors = read_saved(folder, device)
    integers = config.get("integers", {})
    if into is None:
        module = _build(config, folder).to_empty(device=device or "cpu")
    else:
        into = _with_layers(into, config)
        module = into if layout(into) == integers else _with_room(into, integers, folder)
        # A file of release 0.1 describes only the layers inside a model that now describes itself.
        known = OURS if "" in config["modules"] else LAYERS
        described = {name: describe(part) for name, part in _ours_inside(module, known)}
        for name in sorted({*described, *config["modules"]}):
            if described.get(name) != config["modules"].get(name):
                raise CheckpointError(
                    f"{folder}: module {name!r} differs: saved {config['modules'].get(name)}, got {described.get(name)}"
                )
        expected, saved = kinds_of(module.state_dict()), kinds_of(tensors)
        # the dtype of a module that is filled is its own
        expected = {name: (shape, saved.get(name, (shape, dtype))[1]) for name, (shape, dtype) in expected.items()}
        if expected != saved:
            raise CheckpointError(f"{printable(folder)}: {what_differs(expected, saved)}")
    try:
        module.load_state_dict(tensors, strict=True)
    except ShapeError as error:  # of indices that lead out of their matrix
        raise CheckpointError(f"{printable(folder)}: {error}") from None
    return with_report(module) if integers else module


def _with_layers(into: nn.Module, config: Mapping[str, Any]) -> nn.Module:
    """`into` itself, or a copy in which layers of torch.nn have made way for ours that the file has in their places."""
    made, kinds = into, tensors_of(config)
    for name, description in config["modules"].items():
        try:
            old = made.get_submodule(name)
        except AttributeError:  # what differs is said below
            continue
        if not _takes_the_place(description, old):
            continue
        borne_out(description, kinds)
        like = next(old.parameters())
        new = rebuild(description, dtype=like.dtype, device="meta").to_empty(device=like.device).train(old.training)
        if not name:
            return new
        made = copy.deepcopy(into) if made is into else made
        parent, _, leaf = name.rpartition(".")
        setattr(made.get_submodule(parent), leaf, new)
    return made


def _takes_the_place(description: Mapping[str, Any], old: nn.Module) -> bool:
    """Whether one of our layers was made of a layer like this of torch.nn."""
    arguments, kind = description["arguments"], LAYERS.get(description["class"])
    if kind is TensorLinear and type(old) is nn.Linear:
        fmt = parse(arguments["format"])
        outputs = fmt.N * arguments["gates"]
        return (fmt.M, outputs, arguments["bias"]) == (old.in_features, old.out_features, old.bias is not None)
    if kind is TensorEmbedding and type(old) is nn.Embedding:
        width = parse(arguments["format"]).N
        fits = (arguments["num_embeddings"], width) == (old.num_embeddings, old.embedding_dim)
        return fits and arguments["padding_idx"] in (None, old.padding_idx)  # which a file of weights alone has not
    if kind is None or type(old) is not getattr(kind, "DENSE", None):
        return False
    theirs = arguments_of(old)
    return all(arguments[name] == theirs[name] for name in theirs if name in arguments)


def _with_room(into: nn.Module, integers: Mapping[str, Any], folder: Path) -> Any:
    """A copy for the integers of a file."""
    if is_quantized(into):
        raise CheckpointError(
            f"{printable(folder)}: the module has other integers than the file, or the file has none; fill the module "
            "that kc.quantize was called with"
        )
    try:
        return with_layout(copy.deepcopy(into), integers)
    except ShapeError as error:
        raise CheckpointError(f"{printable(folder)}: {error}") from None


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
    elif isinstance(module, TensorEmbedding):
        arguments = {name: getattr(module, name) for name in ("num_embeddings", "padding_idx")}
        arguments["format"] = str(module.format)
    elif isinstance(module, Recurrent):
        names = CELL_ARGUMENTS if isinstance(module, RecurrentCell) else LAYER_ARGUMENTS
        arguments = {name: getattr(module, name) for name in names}
        if isinstance(module, GRU):
            del arguments["proj_size"]
        arguments["input_format"] = [_format_text(fmt) for fmt in module.input_formats]
        arguments["hidden_format"] = [_format_text(fmt) for fmt in module.hidden_formats]
    elif type(module) in OURS.values():
        arguments = module.saved_arguments()  # type: ignore[operator]
    else:
        raise CheckpointError(f"only {', '.join(OURS)} describe themselves, got {type(module).__name__}")
    return description | json.loads(json.dumps({"arguments": arguments}))


def rebuild(description: Mapping[str, Any], **factory: Any) -> nn.Module:
    """The module a description names, with new parameters."""
    kind = OURS.get(description.get("class", ""))
    if kind is None:
        raise CheckpointError(f"unknown class {description.get('class')!r}; expected one of {', '.join(OURS)}")
    arguments = dict(description["arguments"])
    if description["class"] not in LAYERS:
        model: nn.Module = kind.from_saved(arguments, **factory)  # type: ignore[attr-defined]
        return model
    for name in ("order", "shared", "hidden_shared"):
        if name in arguments:
            arguments[name] = _tuples(arguments[name])
    for name in ("input_format", "hidden_format"):
        if name in arguments:
            arguments[name] = [None if entry is None else parse(entry) for entry in arguments[name]]
    return kind(**arguments, **factory)


def _ours_inside(module: nn.Module, known: Mapping[str, type[nn.Module]] = OURS) -> list[tuple[str, nn.Module]]:
    """Our modules by name, those inside one of ours excepted; the name of the module itself is ''."""
    found: list[tuple[str, nn.Module]] = []
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{outer}." if outer else "") for outer, _ in found)
        if type(part) in known.values() and not inside:
            found.append((name, part))
    return found


def read_saved(folder: Path, device: torch.device | str | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The checked config of a folder written by `save`, and its tensors, which are those that the config names."""
    config, digest = _read_config(folder)
    expected = tensors_of(config)

    def check(found: Kinds, metadata: dict[str, str]) -> None:
        if metadata.get("config_sha256") != digest:
            raise CheckpointError(
                f"{printable(folder / TENSORS)} was saved with another {CONFIG} than the one beside it: the file was "
                "edited, or a save was interrupted; save the module again"
            )
        if expected != found:
            raise CheckpointError(f"{printable(folder / TENSORS)}: {what_differs(expected, found)}")

    if not is_there(folder / TENSORS):
        raise CheckpointError(_missing(folder, TENSORS))
    return config, read_tensors(folder / TENSORS, check, device, "save the module again", finite=True)


def build(
    description: Mapping[str, Any], tensors: Kinds, source: str, integers: Mapping[str, Any] | None = None
) -> nn.Module:
    """The module that a checked description names, without memory, if it has exactly these tensors."""
    whole = (".integers", ".gaps") if integers else (".gaps",)
    dtypes = sorted({dtype for name, (_, dtype) in tensors.items() if not name.endswith(whole)})
    if len(dtypes) != 1:
        raise CheckpointError(f"{source}: expected tensors of one dtype, got {dtypes}")
    try:
        borne_out(description, tensors)
        module = rebuild(description, dtype=getattr(torch, dtypes[0]), device="meta")
        module = with_layout(module, integers) if integers else module
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None
    except Exception as error:  # a constructor may fail in any way on arguments that nobody wrote
        raise CheckpointError(f"{source}: does not describe a module: {error}") from None
    expected = kinds_of(module.state_dict())
    if expected != tensors:
        raise CheckpointError(f"{source}: {what_differs(expected, tensors)}")
    return module


def _build(config: Mapping[str, Any], folder: Path) -> nn.Module:
    description = config["modules"].get("")
    if description is None:
        raise CheckpointError(
            f"{printable(folder)} holds a module that is not one of {', '.join(OURS)}; build it, then call "
            "load(path, into=module)"
        )
    return build(description, tensors_of(config), printable(folder / CONFIG), config.get("integers"))


def _read_config(folder: Path) -> tuple[dict[str, Any], str]:
    """The checked config and the digest of its text."""
    file = folder / CONFIG
    if not is_there(file):
        raise CheckpointError(_missing(folder, CONFIG))
    content, name = read_bytes(file, CheckpointError), printable(file)
    config = parse_json(content, anything, CheckpointError, name)
    version = config.get("kronecell_file") if isinstance(config, dict) else None
    if isinstance(version, bool) or not isinstance(version, int):
        raise CheckpointError(f"{name} was not written by kronecell: it has no 'kronecell_file' version")
    if version > INTEGERS_VERSION:
        raise CheckpointError(
            f"{name} has file version {version}, this kronecell reads up to {INTEGERS_VERSION}; install a newer one"
        )
    return checked(config, SCHEMA, CheckpointError, name), _digest(content)


def _missing(folder: Path, name: str) -> str:
    path = printable(str(folder / name).replace("\0", "\\0"))
    return f"{path} is missing; a saved module is a folder with {CONFIG} and {TENSORS}"


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


def _digest(content: bytes) -> str:
    return hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest()  # Windows writes its own ends of lines
