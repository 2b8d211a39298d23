"""Layers of a model replaced by ours with the chosen formats: dense parameters copied, all other matrices fitted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kronecell.compress.candidates import Candidate
from kronecell.compress.matrices import RECURRENT, Matrix
from kronecell.nn.convert import arguments_of
from kronecell.nn.embedding import TensorEmbedding
from kronecell.nn.linear import TensorLinear
from kronecell.nn.recurrent import Recurrent

Choice = tuple[Matrix, Candidate]
KEPT = ("order", "forget_bias", "pad_input", "recurrence")  # arguments of ours that torch.nn's layers do not have


def replace(
    model: nn.Module, chosen: Iterable[Choice], inputs: Mapping[str, Tensor], options: dict[str, Any]
) -> nn.Module:
    """The model, changed in place, with every module that has a chosen matrix replaced; a new one if it is that."""
    by_module: dict[str, list[Choice]] = {}
    for matrix, candidate in chosen:
        by_module.setdefault(matrix.module, []).append((matrix, candidate))
    for name, choices in by_module.items():
        trained = model.get_submodule(name)
        new: nn.Module
        if isinstance(trained, (nn.Linear, TensorLinear)):
            new = _linear(trained, *choices[0], inputs, options)
        elif isinstance(trained, (nn.Embedding, TensorEmbedding)):
            table = trained.to_dense() if isinstance(trained, TensorEmbedding) else trained
            fmt = choices[0][1].format
            assert fmt is not None
            new = TensorEmbedding.from_dense(table, fmt, **options)
        else:
            new = _recurrent(trained, choices, inputs, options)
        if not name:
            return new
        for other, part in [*model.named_modules(remove_duplicate=False)]:
            if part is trained:  # a module used in two places is replaced in both
                parent, _, leaf = other.rpartition(".")
                setattr(model.get_submodule(parent), leaf, new)
    return model


def _linear(
    trained: nn.Linear | TensorLinear,
    matrix: Matrix,
    candidate: Candidate,
    inputs: Mapping[str, Tensor],
    options: dict[str, Any],
) -> TensorLinear:
    dense = trained.to_dense() if isinstance(trained, TensorLinear) else trained
    assert candidate.format is not None
    return TensorLinear.from_dense(dense, candidate.format, inputs=inputs.get(matrix.name), **options)


def _recurrent(trained: Any, choices: list[Choice], inputs: Mapping[str, Tensor], options: dict[str, Any]) -> Recurrent:
    """What is chosen is fitted, each matrix on its own inputs; what is compressed already stays as it is."""
    by_weight = {weight: (matrix, c) for matrix, c in choices for weight in matrix.weight_names}
    cell = not hasattr(trained, "num_layers") or not getattr(trained, "NUMBERED", True)
    formats: dict[str, list[Any]] = {}
    sharing: dict[str, list[Any]] = {}
    for part in ("weight_ih", "weight_hh"):
        for layer in range(1 if cell else trained.num_layers):
            name = part if cell else f"{part}_l{layer}"
            now = getattr(trained, name)
            kept = (now.format, now.shared) if isinstance(now, TensorLinear) else (None, False)
            fmt, shared = (by_weight[name][1].format, by_weight[name][1].shared) if name in by_weight else kept
            formats.setdefault(part, []).append(fmt)
            sharing.setdefault(part, []).append(shared)
    like = next(trained.parameters())
    kept_arguments = {name: getattr(trained, name) for name in KEPT if isinstance(trained, Recurrent)}
    if cell:
        kept_arguments.pop("recurrence", None)
    kind: Any = RECURRENT[type(trained)]
    new: Any = kind(
        **arguments_of(trained), **kept_arguments, device=like.device, dtype=like.dtype,
        input_format=formats["weight_ih"], hidden_format=formats["weight_hh"],
        shared=_one_if_equal(sharing["weight_ih"]), hidden_shared=_one_if_equal(sharing["weight_hh"]),
    )  # fmt: skip
    weights = {n: W for matrix, _ in choices for n, W in zip(matrix.weight_names, matrix.weights(), strict=True)}
    with torch.no_grad():
        for name, part in [*trained.named_children(), *trained.named_parameters(recurse=False)]:
            target = getattr(new, name)
            if name in weights:
                if options.get("progress") is not None:
                    options["progress"](f"fitting {by_weight[name][0].name}")
                gates, M, N = weights[name].shape
                weight = weights[name].transpose(1, 2).reshape(gates * N, M)
                target.fit(weight, inputs=inputs.get(by_weight[name][0].name), **options)
            elif isinstance(target, TensorLinear):
                target.load_state_dict(part.state_dict())
            else:
                target.copy_(part)
    result: Recurrent = new.train(trained.training)
    return result


def _one_if_equal(entries: list[Any]) -> Any:
    """A list with one entry per layer, or just the entry that all layers have."""
    return entries[0] if all(entry == entries[0] for entry in entries) else entries
