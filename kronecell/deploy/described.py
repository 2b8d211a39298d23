"""What config.json may say: the schema of a saved module, and its sizes against those of the tensors beside it.

A description is believed only as far as the file of tensors bears it out: every mode and every rank is the size of some
tensor's side, every layer has tensors of its own. So building what is described costs no more than the file did.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from kronecell.deploy.records import (
    Wrong,
    anything,
    either,
    many,
    named,
    number,
    one_of,
    optional,
    table,
    text,
    truth,
    whole,
)
from kronecell.deploy.tensorfile import DTYPES, Kinds

MOST_SIZE = 2**40
MOST_TENSORS = 100_000
NAME, FORMAT = text(1000), text(2000)
SHARED = either(many(text(20), most=64), truth)
SHARED_LAYERS = either(many(text(20), most=64), truth, many(SHARED, most=1000))
ORDER = either(text(40), many(anything, most=64, least=1))

LINEAR = table({"format": FORMAT, "bias": truth, "order": ORDER, "gates": whole(1, 1024), "shared": SHARED}, rest=None)
EMBEDDING = table(
    {"format": FORMAT, "num_embeddings": whole(1, MOST_SIZE), "padding_idx": optional(whole(0, MOST_SIZE))}, rest=None
)
FORMATS = many(optional(FORMAT), most=1000)
LAYER = table(
    {"input_size": whole(1, MOST_SIZE), "hidden_size": whole(1, MOST_SIZE)},
    {
        "num_layers": whole(1, 1000),
        "bias": truth,
        "batch_first": truth,
        "dropout": number(0, 1),
        "bidirectional": truth,
        "proj_size": whole(0, MOST_SIZE),
        "shared": SHARED_LAYERS,
        "hidden_shared": SHARED_LAYERS,
        "order": ORDER,
        "forget_bias": optional(number(-1e30, 1e30)),
        "pad_input": truth,
        "recurrence": text(20),
        "input_format": FORMATS,
        "hidden_format": FORMATS,
    },
    rest=None,
)
CELL = table(
    {"input_size": whole(1, MOST_SIZE), "hidden_size": whole(1, MOST_SIZE)},
    {
        "bias": truth,
        "shared": SHARED,
        "hidden_shared": SHARED,
        "order": ORDER,
        "forget_bias": optional(number(-1e30, 1e30)),
        "pad_input": truth,
        "input_format": FORMATS,
        "hidden_format": FORMATS,
    },
    rest=None,
)
ARGUMENTS = {
    "TensorLinear": LINEAR,
    "TensorEmbedding": EMBEDDING,
    **dict.fromkeys(("LSTM", "GRU"), LAYER),
    **dict.fromkeys(("LSTMCell", "GRUCell"), CELL),
}
TENSOR = table({"shape": many(whole(0, MOST_SIZE), most=64), "dtype": one_of(*DTYPES.values())})


def description(value: Any, place: str) -> None:
    """A class and its arguments; a model made of layers has their descriptions among its arguments."""
    table({"class": text(100), "arguments": named(anything, most=1000)})(value, place)
    inner = ARGUMENTS.get(value["class"])
    if inner is not None:
        inner(value["arguments"], f"{place}.arguments")
        return
    for name, argument in value["arguments"].items():
        if isinstance(argument, dict) and "class" in argument:
            description(argument, f"{place}.arguments.{name}")


INTEGERS = table(
    {"bits": whole(3, 8), "group": whole(0, MOST_SIZE), "error": number(0, 1e30)}, {"leg": whole(-1, 64)}, rest=None
)
CONFIG = table(
    {"modules": named(description, most=10_000), "tensors": named(TENSOR, most=MOST_TENSORS)},
    {"kronecell_file": whole(1, 1000), "init": whole(0, 1000), "integers": named(INTEGERS, most=MOST_TENSORS)},
)


def tensors_of(config: Mapping[str, Any]) -> Kinds:
    """Shapes and dtypes of the tensors that a checked config names."""
    return {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in config["tensors"].items()}


def borne_out(value: Mapping[str, Any], tensors: Kinds) -> None:
    """Raise Wrong where a checked description needs more than these tensors have."""
    arguments = value["arguments"]
    for argument in arguments.values():
        if isinstance(argument, dict) and "class" in argument:
            borne_out(argument, tensors)
    # A byte of packed integers is up to eight thirds of a number.
    elements = sum(prod(shape) * (3 if dtype == "uint8" else 1) for shape, dtype in tensors.values())
    if value["class"] not in ARGUMENTS:  # a model: its whole numbers, such as that of classes, are sizes of tensors
        for name, argument in arguments.items():
            if isinstance(argument, int) and argument > max(elements, 1):
                raise Wrong(f"{name}: {argument:,} with {elements:,} numbers in all tensors")
        return
    layers = arguments.get("num_layers", 1) * (2 if arguments.get("bidirectional") else 1)
    if layers > len(tensors):
        raise Wrong(f"num_layers: {layers} layers and directions of {len(tensors)} tensors")
    formats = [arguments.get("format"), *arguments.get("input_format", ()), *arguments.get("hidden_format", ())]
    for fmt in filter(None, formats):
        largest = max((int(digits[:20]) for digits in re.findall(r"\d+", fmt)), default=0)
        if largest > max(elements, 1):
            raise Wrong(f"format {fmt[:60]!r} needs more than the {elements:,} numbers of the tensors")
