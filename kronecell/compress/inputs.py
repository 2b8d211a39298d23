"""What a model's matrices really see: inputs added up while the model runs on calibration data.

Of up to WIDEST columns the sum of x x^T is kept, so that memory does not grow with the data and every row counts; of
wider inputs, such as videos of 57,600 numbers a frame, a sample of rows. U sees the state that the model was given and
then its own outputs, in the order of its direction; nothing sees the steps that only pad a packed batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from kronecell.compress.matrices import Matrix
from kronecell.errors import KronecellError
from kronecell.nn.cells import GRUCell, LSTMCell
from kronecell.nn.recurrent import Recurrent

WIDEST = 2048  # columns up to which the sum of x x^T is kept
MOST_ROWS = 4096  # rows kept of wider inputs
CHUNK = 1 << 22  # numbers added in float64 at a time


class Seen:
    """Inputs of one matrix, added up."""

    def __init__(self, width: int) -> None:
        self.width, self.count, self.step = width, 0, 1
        self.gram = torch.zeros(width, width, dtype=torch.float64) if width <= WIDEST else None
        self.kept: list[Tensor] = []  # every step-th row of wider inputs

    def add(self, rows: Tensor) -> None:
        """Rows (..., width)."""
        rows = rows.detach().reshape(-1, self.width)
        if self.gram is not None:
            for block in rows.split(max(1, CHUNK // self.width)):
                self.gram.addmm_(block.double().mT.cpu(), block.double().cpu())
        else:
            self.kept.append(rows[-self.count % self.step :: self.step].cpu())
            while sum(map(len, self.kept)) > MOST_ROWS:
                self.kept, self.step = [torch.cat(self.kept)[::2].contiguous()], 2 * self.step
        self.count += len(rows)

    def root(self) -> Tensor:
        """A matrix R (rows, width) with R^T R = X^T X, or the rows that were kept."""
        if self.gram is None:
            return torch.cat(self.kept)
        values, vectors = torch.linalg.eigh(self.gram)
        return values.clamp_min(0).sqrt()[:, None] * vectors.mT


@torch.no_grad()
def record(
    model: nn.Module, matrices: list[Matrix], calibration: Any, progress: Callable[[str], None] | None = None
) -> dict[str, Tensor]:
    """Matrix name -> its inputs (rows, M), or as many rows with the same X^T X; in eval mode, which is restored."""
    owners = {matrix.module: matrix.owner for matrix in matrices if not matrix.is_table}
    seen = {matrix.name: Seen(matrix.M) for matrix in matrices if not matrix.is_table}
    watch = {name: _Watcher(name, owner, seen) for name, owner in owners.items()}
    was_training = model.training
    model.eval()
    try:
        if isinstance(calibration, Mapping):
            unknown = sorted(set(calibration) - set(owners))
            if unknown:
                raise KronecellError(
                    f"calibration names {unknown}, which no rule matches; expected some of {[*owners]}"
                )
            for name, value in calibration.items():
                several = isinstance(value, tuple) and not isinstance(value, PackedSequence)
                watch[name](None, value if several else (value,), {})
        else:
            _run(model, owners, watch, calibration, progress)
    finally:
        model.train(was_training)
    silent = sorted({name.rpartition(".")[0] or name for name, inputs in seen.items() if not inputs.count})
    if silent and not isinstance(calibration, Mapping):
        raise KronecellError(f"the calibration data never reached {', '.join(silent)}; check the data or the rules")
    return {name: inputs.root() for name, inputs in seen.items() if inputs.count}


def batches_of(calibration: Any) -> Iterable[Any]:
    """One batch, or many."""
    return [calibration] if isinstance(calibration, (Tensor, PackedSequence)) else calibration


def call(model: nn.Module, batch: Any) -> Any:
    """model(batch), or model(*batch) where a batch is several inputs."""
    several = isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence)
    return model(*batch) if several else model(batch)


def _run(
    model: nn.Module,
    owners: Mapping[str, nn.Module],
    watch: Mapping[str, _Watcher],
    calibration: Any,
    progress: Callable[[str], None] | None,
) -> None:
    handles = [owner.register_forward_pre_hook(watch[name], with_kwargs=True) for name, owner in owners.items()]
    try:
        for number, batch in enumerate(batches_of(calibration), 1):
            call(model, batch)
            if progress is not None:
                progress(f"calibration: {number} batches")
    finally:
        for handle in handles:
            handle.remove()


class _Watcher:
    """A hook that adds up what the matrices of one module see in a call."""

    def __init__(self, name: str, owner: nn.Module, seen: Mapping[str, Seen]) -> None:
        self.owner: Any = owner
        self.seen = {key.removeprefix(f"{name}." if name else ""): value for key, value in seen.items()}
        self.steps: dict[int, nn.Module] = {}  # single layers of a deep network
        self.dense: Any = owner.to_dense() if isinstance(owner, Recurrent) else owner

    def __call__(self, _: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        x = given[0] if given else named["input"]
        state = given[1] if len(given) > 1 else named.get("hx")
        if isinstance(self.owner, (nn.RNNCellBase, LSTMCell, GRUCell)):
            self.cell(x, state)
        elif isinstance(self.owner, (nn.LSTM, nn.GRU, Recurrent)):
            self.layer(x, state, named.get("affine"))
        else:
            self.add("weight", x)

    def add(self, part: str, rows: Tensor) -> None:
        """Where a rule matches this matrix."""
        if part in self.seen:
            self.seen[part].add(rows)

    def cell(self, x: Tensor, state: Any) -> None:
        """One step: W sees x, U sees h."""
        self.add("weight_ih", x)
        h = state[0] if isinstance(state, (tuple, list)) else state
        self.add("weight_hh", x.new_zeros(*x.shape[:-1], self.owner.hidden_size) if h is None else h)

    def layer(self, x: Any, state: Any, affine: Any = None) -> None:
        """All layers of a network one after the other, each from the state that it was given."""
        dense, lengths = self.dense, None
        like = next(dense.parameters())
        x = _read(x, affine, like)
        if isinstance(x, PackedSequence):
            x, lengths = pad_packed_sequence(x)  # (time, batch, M), in the order that the caller had
        else:
            x = x.unsqueeze(1) if x.ndim == 2 else x.transpose(0, 1) if dense.batch_first else x
        steps, rows = x.shape[:2]
        lengths = torch.full((rows,), steps) if lengths is None else lengths
        real = torch.arange(steps)[:, None] < lengths  # (time, batch)
        states = self._states(state, rows, like)
        for layer in range(dense.num_layers):
            self.add(f"weight_ih_l{layer}", x[real])
            outputs = []
            for direction in range(2 if dense.bidirectional else 1):
                start = tuple(part[layer * (2 if dense.bidirectional else 1) + direction] for part in states)
                output, before = _one(self._single(layer, direction), x, start, lengths, bool(direction))
                self.add(f"weight_hh_l{layer}", before[real])
                outputs.append(output)
            x = torch.cat(outputs, -1)

    def _states(self, state: Any, rows: int, like: Tensor) -> tuple[Tensor, ...]:
        """h (and c) as (layers * directions, batch, width)."""
        dense = self.dense
        if state is None:
            count = dense.num_layers * (2 if dense.bidirectional else 1)
            widths = (dense.proj_size or dense.hidden_size, dense.hidden_size)[: 2 if isinstance(dense, nn.LSTM) else 1]
            return tuple(like.new_zeros(count, rows, width) for width in widths)
        parts = (state,) if isinstance(state, Tensor) else tuple(state)
        return tuple((part.unsqueeze(1) if part.ndim == 2 else part).to(like) for part in parts)

    def _single(self, layer: int, direction: int) -> nn.Module:
        """One layer and direction as a network of its own."""
        found = self.steps.get(2 * layer + direction)
        if found is None:
            found = self.steps[2 * layer + direction] = _single_layer(self.dense, layer, direction)
        return found


def _read(x: Any, affine: Any, like: Tensor) -> Any:
    """The numbers that a layer reads: bytes from 0 to 1, scaled and shifted where it is told to."""
    if isinstance(x, PackedSequence):
        return x._replace(data=_read(x.data, affine, like))
    x = x.to(like) if x.is_floating_point() else x.to(like) / 255
    return x if affine is None else x * affine[0] + affine[1]


def _single_layer(dense: Any, layer: int, direction: int) -> nn.Module:
    out = dense.proj_size or dense.hidden_size
    like = next(dense.parameters())
    width = dense.input_size if layer == 0 else (2 if dense.bidirectional else 1) * out
    options: dict[str, Any] = {"proj_size": dense.proj_size} if dense.proj_size else {}
    kind = nn.LSTM if isinstance(dense, nn.LSTM) else nn.GRU
    single = kind(width, dense.hidden_size, bias=dense.bias, device=like.device, dtype=like.dtype, **options)
    end = f"_l{layer}" + ("_reverse" if direction else "")
    single.load_state_dict({name: getattr(dense, name.removesuffix("_l0") + end) for name in single.state_dict()})
    return single.eval()


def _one(
    single: nn.Module, x: Tensor, start: tuple[Tensor, ...], lengths: Tensor, reverse: bool
) -> tuple[Tensor, Tensor]:
    """The outputs (time, batch, width) of one direction, and the state that U saw at each step."""
    steps = torch.arange(len(x))[:, None]
    order = (lengths - 1 - steps).where(steps < lengths, steps) if reverse else steps.expand(-1, len(lengths))
    turned = x.take_along_dim(order[:, :, None].to(x.device), 0)  # backwards from each sequence's own end
    state = tuple(part[None].contiguous() for part in start)
    output = single(turned, state if len(state) > 1 else state[0])[0]
    before = torch.cat([start[0][None], output[:-1]])
    back = order[:, :, None].to(x.device)  # the same exchange undoes itself
    return output.take_along_dim(back, 0), before.take_along_dim(back, 0)
