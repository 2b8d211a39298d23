"""A file of weights as a model: a state dict (safetensors, or .pt if allowed), one of foreign.py, or our own folder.

Only names and shapes are known of a state dict, so layers are recognised by torch.nn's parameter names; everything else
is kept as it is, under its name.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kronecell.compress.foreign import ARCHIVES, GRAPHS, KERAS, read_archive, read_graph, read_keras
from kronecell.deploy.modules import build, read_saved
from kronecell.deploy.tensorfile import kinds_of
from kronecell.deploy.tensorfile import read_tensors as read_safetensors
from kronecell.errors import CheckpointError, KronecellError
from kronecell.training.saved import find_run, load

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
RECURRENT = re.compile(r"^(?:(.*)\.)?weight_hh_l0$")

# Runs in a separate process: unpickling, even of weights only, stays outside this one.
CONVERT = """
import sys, torch
from safetensors.torch import save_file
state = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
def count(part):
    return sum(v.numel() for v in part.values() if isinstance(v, torch.Tensor)) if isinstance(part, dict) else 0
names = ("state_dict", "model_state_dict", "model_state", "model")
while isinstance(state, dict) and not count(state):  # under a key: a usual one, or that with the most numbers
    inner = {k: v for k, v in state.items() if isinstance(v, dict)}
    usual = [k for k in names if k in inner]
    if not inner:
        break
    state = inner[usual[0]] if usual else max(inner.values(), key=count)
if not isinstance(state, dict):
    sys.exit("it holds no state dict")
tensors = {k: v.clone().contiguous() for k, v in state.items() if isinstance(v, torch.Tensor)}
if not tensors:
    sys.exit("it holds no tensors")
save_file(tensors, sys.argv[2])
"""


def read_model(path: Path, allow_pickle: bool = False, tables: Sequence[str] = ()) -> nn.Module:
    """The model in a file or folder, with torch.nn modules (or ours) under their names; `tables` are embeddings."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_dir():
        run = find_run(path)
        return _read_folder(path) if run is None else load(run).eval()
    try:
        return model_of(read_tensors(path, allow_pickle), tables)
    except KronecellError:
        raise
    except Exception as error:  # names that are no module's: "", "a..b", "train.weight", "a" beside "a.b"
        raise CheckpointError(f"{path}: its tensors cannot be put into modules: {error}") from None


def read_tensors(path: Path, allow_pickle: bool = False) -> dict[str, Tensor]:
    """The tensors of a safetensors file, an archive, a graph, or of a pickle if that is allowed."""
    if path.suffix in PICKLED:
        if not allow_pickle:
            raise CheckpointError(
                f"{path} is a pickle, which can run code when it is read; convert it to safetensors, or pass "
                f"--allow-pickle to read its weights only, in a separate process"
            )
        return _unpickle(path)
    for suffixes, read in ((ARCHIVES, read_archive), (GRAPHS, read_graph), (KERAS, read_keras)):
        if path.suffix.lower() in suffixes:
            return read(path)
    return read_safetensors(path)


def model_of(tensors: dict[str, Tensor], tables: Sequence[str] = ()) -> nn.Module:
    """A tree of modules with the names of the state dict; what is not an LSTM, GRU or Linear becomes a buffer.

    `tables` names the matrices, or modules, that are embeddings.
    """
    if not tensors:
        raise CheckpointError("the file holds no tensors")
    modules: dict[str, nn.Module] = {}
    taken: set[str] = set()
    for name in tensors:
        found = RECURRENT.match(name)
        if found:
            prefix = found.group(1) or ""
            module = _recurrent(prefix, tensors)
            if module is not None:
                modules[prefix] = module
                taken |= {".".join(filter(None, (prefix, key))) for key in module.state_dict()}
    for name, weight in tensors.items():
        prefix, _, leaf = name.rpartition(".")
        bias = tensors.get(".".join(filter(None, (prefix, "bias"))))
        if leaf == "weight" and weight.ndim == 2 and {name, prefix} & {*tables} and weight.is_floating_point():
            modules[prefix] = nn.utils.skip_init(nn.Embedding, *weight.shape, dtype=weight.dtype)
            taken.add(name)
        # Without a bias a matrix could as well be an embedding, which is indexed and not multiplied.
        linear = leaf == "weight" and weight.ndim == 2 and bias is not None and tuple(bias.shape) == weight.shape[:1]
        if linear and name not in taken and weight.is_floating_point():
            module = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], dtype=weight.dtype)
            modules[prefix] = module
            taken |= {name, ".".join(filter(None, (prefix, "bias")))}
    unknown = [name for name in tables if name not in modules and name.rpartition(".")[0] not in modules]
    if unknown:
        raise CheckpointError(f"no table of rows (a matrix NAME.weight) is named {', '.join(unknown)}")
    rest = {name: tensor for name, tensor in tensors.items() if name not in taken}
    model = _tree(modules, rest)
    model.load_state_dict(tensors, strict=True)
    return model.eval()


def _tree(modules: dict[str, nn.Module], rest: dict[str, Tensor]) -> nn.Module:
    """Modules and loose tensors under their dotted names."""
    if "" in modules and len(modules) == 1 and not rest:
        return modules[""]
    root = nn.Module()

    def parent_of(name: str) -> tuple[nn.Module, str]:
        *path, leaf = name.split(".")
        here = root
        for step in path:
            if not hasattr(here, step):
                here.add_module(step, nn.Module())
            here = getattr(here, step)
        return here, leaf

    for name, module in modules.items():
        if not name:
            raise CheckpointError("the file mixes a layer without a name with other tensors; give the layer a prefix")
        parent, leaf = parent_of(name)
        parent.add_module(leaf, module)
    for name, tensor in rest.items():
        parent, leaf = parent_of(name)
        if tensor.is_floating_point():  # counted as parameters: the report's totals are those of the whole file
            parent.register_parameter(leaf, nn.Parameter(torch.empty_like(tensor), requires_grad=False))
        else:
            parent.register_buffer(leaf, torch.empty_like(tensor))
    return root


def _recurrent(prefix: str, tensors: dict[str, Tensor]) -> nn.Module | None:
    """The LSTM or GRU whose parameters these are; None for an nn.RNN or an incomplete set."""

    def get(key: str) -> Tensor | None:
        return tensors.get(".".join(filter(None, (prefix, key))))

    hh, ih, hr = get("weight_hh_l0"), get("weight_ih_l0"), get("weight_hr_l0")
    if hh is None or ih is None or hh.ndim != 2 or ih.ndim != 2 or (hr is not None and hr.ndim != 2):
        return None
    if 0 in (*hh.shape, *ih.shape, *(() if hr is None else hr.shape)):
        return None
    hidden = hr.shape[1] if hr is not None else hh.shape[1]
    gates = hh.shape[0] / hidden
    if gates not in (3, 4):
        return None
    layers = 1
    while get(f"weight_hh_l{layers}") is not None:
        layers += 1
    options: dict[str, Any] = {"proj_size": hr.shape[0]} if hr is not None else {}
    module = (nn.LSTM if gates == 4 else nn.GRU)(
        ih.shape[1], hidden, layers, bias=get("bias_ih_l0") is not None, batch_first=True,
        bidirectional=get("weight_hh_l0_reverse") is not None, dtype=hh.dtype, device="meta", **options,
    )  # fmt: skip
    expected = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    got = {key: None if (tensor := get(key)) is None else tuple(tensor.shape) for key in expected}
    wrong = [f"{key}: expected {expected[key]}, got {got[key]}" for key in expected if expected[key] != got[key]]
    if wrong:
        raise CheckpointError(f"{prefix or 'the file'} looks like an LSTM or GRU but does not fit: {'; '.join(wrong)}")
    return module.to_empty(device="cpu")  # only now: sizes that the file does not have get no memory


def _read_folder(folder: Path) -> nn.Module:
    """One of our own: rebuilt whole, or, if it was part of a larger model, under the names it had there."""
    config, tensors = read_saved(folder)
    kinds = kinds_of(tensors)
    ours = {}
    for name, description in config["modules"].items():
        prefix = f"{name}." if name else ""
        own = {key.removeprefix(prefix): kind for key, kind in kinds.items() if key.startswith(prefix)}
        integers = {
            key.removeprefix(prefix): how for key, how in config.get("integers", {}).items() if key.startswith(prefix)
        }
        ours[name] = build(description, own, f"{folder}: module {name!r}", integers).to_empty(device="cpu")
    if "" in ours:
        ours[""].load_state_dict(tensors, strict=True)
        return ours[""].eval()
    inside = tuple(f"{name}." for name in ours)
    loose = {name: tensor for name, tensor in tensors.items() if not name.startswith(inside)}
    rest = model_of(loose) if loose else nn.Module()
    for name, module in ours.items():
        parent, _, leaf = name.rpartition(".")
        here = rest
        for step in filter(None, parent.split(".")):
            if not hasattr(here, step):
                here.add_module(step, nn.Module())
            here = getattr(here, step)
        here.add_module(leaf, module)
    rest.load_state_dict(tensors, strict=True)
    return rest.eval()


def _unpickle(path: Path) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "weights.safetensors"
        command = [sys.executable, "-c", CONVERT, str(path), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not target.exists():
            reason = (done.stderr.strip().splitlines() or ["it could not be read"])[-1]
            raise CheckpointError(f"{path} could not be read as weights: {reason}")
        return read_safetensors(target)
