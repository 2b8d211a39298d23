"""The inputs of a model's matrices, recorded while the model runs on calibration data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from kronecell.compress.matrices import Matrix
from kronecell.errors import KronecellError

MOST_ROWS = 4096  # rows kept per matrix


@torch.no_grad()
def record(model: nn.Module, matrices: list[Matrix], calibration: Any) -> dict[str, Tensor]:
    """Matrix name -> inputs (rows, M); in eval mode, which is restored."""
    owners = {matrix.module: matrix.owner for matrix in matrices}
    seen: dict[str, list[Any]] = {name: [] for name in owners}
    if isinstance(calibration, Mapping):
        unknown = sorted(set(calibration) - set(owners))
        if unknown:
            raise KronecellError(f"calibration names {unknown}, which no rule matches; expected some of {[*owners]}")
        seen |= {name: [torch.as_tensor(value)] for name, value in calibration.items()}
    else:
        _run(model, owners, seen, calibration)
    was_training = model.training
    model.eval()
    try:
        rows: dict[str, list[Tensor]] = {}
        for name, owner in owners.items():
            for value in seen[name]:
                for part, tensor in _parts(owner, value):
                    rows.setdefault(".".join(filter(None, (name, part))), []).append(tensor)
    finally:
        model.train(was_training)
    names = {matrix.name for matrix in matrices}
    return {name: _thinned(torch.cat(parts)) for name, parts in rows.items() if name in names}


def _run(model: nn.Module, owners: Mapping[str, nn.Module], seen: dict[str, list[Any]], calibration: Any) -> None:
    handles = []
    for name, owner in owners.items():
        handles.append(owner.register_forward_pre_hook(lambda _, given, name=name: seen[name].append(given[0])))
    was_training = model.training
    model.eval()
    try:
        single = isinstance(calibration, (Tensor, PackedSequence))
        batches: Iterable[Any] = [calibration] if single else calibration
        for batch in batches:
            model(*batch) if isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence) else model(
                batch
            )
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    silent = [name for name, values in seen.items() if not values]
    if silent:
        raise KronecellError(f"the calibration data never reached {', '.join(silent)}; check the data or the rules")


def _parts(owner: nn.Module, value: Any) -> list[tuple[str, Tensor]]:
    """(matrix, inputs (rows, M)) of one recorded input of a module."""
    if isinstance(owner, nn.Linear):
        return [("weight", value.reshape(-1, owner.in_features).to(owner.weight))]
    assert isinstance(owner, (nn.LSTM, nn.GRU))
    if not isinstance(value, PackedSequence):
        value = value.to(next(owner.parameters()))
    parts = []
    for layer in range(owner.num_layers):
        parts.append((f"weight_ih_l{layer}", _flat(value)))
        value = _single_layer(owner, layer)(value)[0]
        hidden = _flat(value)  # h_t of all steps and directions: what U sees one step later
        directions = 2 if owner.bidirectional else 1
        parts.append((f"weight_hh_l{layer}", hidden.reshape(-1, hidden.shape[-1] // directions)))
    return parts


def _single_layer(owner: nn.LSTM | nn.GRU, layer: int) -> nn.Module:
    """One layer of a deep network as a network of its own."""
    directions = 2 if owner.bidirectional else 1
    out = owner.proj_size or owner.hidden_size
    like = next(owner.parameters())
    width = owner.input_size if layer == 0 else directions * out
    options: dict[str, Any] = {"proj_size": owner.proj_size} if owner.proj_size else {}
    single = type(owner)(
        width, owner.hidden_size, bias=owner.bias, batch_first=owner.batch_first, bidirectional=owner.bidirectional,
        device=like.device, dtype=like.dtype, **options,
    )  # fmt: skip
    state = {
        name.replace(f"_l{layer}", "_l0"): tensor
        for name, tensor in owner.state_dict().items()
        if name.removesuffix("_reverse").endswith(f"_l{layer}")
    }
    single.load_state_dict(state)
    return single.eval()


def _flat(value: Any) -> Tensor:
    tensor: Tensor = value.data if isinstance(value, PackedSequence) else value
    return tensor.reshape(-1, tensor.shape[-1])


def _thinned(rows: Tensor) -> Tensor:
    """At most MOST_ROWS rows, evenly taken."""
    step = -(-rows.shape[0] // MOST_ROWS)
    return rows[::step].contiguous()
