"""Calibration: what every matrix is said to see is what it sees, and it never makes a model worse on that data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import kronecell as kc
from kronecell.compress.inputs import MOST_ROWS, WIDEST, Seen, record
from kronecell.compress.matrices import matrices_of

KINDS = (nn.LSTM, nn.GRU)


def steps_by_hand(rnn: Any, x: Tensor, lengths: list[int], state: tuple[Tensor, ...]) -> dict[str, list[Tensor]]:
    """Rows that W and U of every layer see, by cells that are stepped one sequence at a time."""
    kind = nn.LSTMCell if isinstance(rnn, nn.LSTM) else nn.GRUCell
    directions = 2 if rnn.bidirectional else 1
    seen: dict[str, list[Tensor]] = {}
    for row, length in enumerate(lengths):
        inputs = x[row, :length]
        for layer in range(rnn.num_layers):
            outputs = []
            for direction in range(directions):
                end = f"_l{layer}" + ("_reverse" if direction else "")
                cell = kind(inputs.shape[1], rnn.hidden_size).double()
                cell.load_state_dict({name: getattr(rnn, name + end) for name in cell.state_dict()})
                now = [part[layer * directions + direction, row][None] for part in state]
                found: list[Tensor] = [torch.empty(0)] * length
                for step in range(length)[:: -1 if direction else 1]:
                    seen.setdefault(f"weight_ih_l{layer}", []).append(inputs[step])
                    seen.setdefault(f"weight_hh_l{layer}", []).append(now[0][0])
                    result = cell(inputs[step][None], tuple(now) if len(now) > 1 else now[0])
                    now = list(result) if isinstance(result, tuple) else [result]
                    found[step] = now[0][0]
                outputs.append(torch.stack(found))
            inputs = torch.cat(outputs, 1)
    return seen


def squares(rows: Tensor) -> Tensor:
    return rows.mT @ rows


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_every_matrix_sees_what_cells_stepped_by_hand_see(kind: Any, bidirectional: bool, packed: bool) -> None:
    torch.manual_seed(0)
    rnn = kind(5, 4, num_layers=2, bidirectional=bidirectional, batch_first=True).double()
    lengths = [3, 6, 2] if packed else [6, 6, 6]
    x = torch.randn(3, 6, 5, dtype=torch.float64)
    count = 4 if bidirectional else 2
    state = tuple(torch.randn(count, 3, 4, dtype=torch.float64) for _ in range(2 if kind is nn.LSTM else 1))
    given = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False) if packed else x
    hx = state if len(state) > 1 else state[0]
    got = record(rnn, matrices_of(rnn), [(given, hx), (given, hx)])  # two calls
    wanted = steps_by_hand(rnn, x, lengths, state)
    for name, rows in wanted.items():
        # W of a layer is one matrix for each direction, and both see the same rows.
        times = 2 if "hh" in name or not bidirectional else 1
        torch.testing.assert_close(squares(got[name]), times * squares(torch.stack(rows)))


class ByHand(nn.Module):
    """A decoder that steps a cell, as models that feed back their own output do."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.cell = kind(5, 4)

    def forward(self, x: Tensor, state: Any) -> Tensor:
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


@torch.no_grad()
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, kc.LSTMCell, kc.GRUCell])
def test_cells_see_the_states_that_they_are_given(kind: Any) -> None:
    torch.manual_seed(0)
    net = ByHand(kind).double()
    x = torch.randn(3, 6, 5, dtype=torch.float64)
    h = torch.randn(3, 4, dtype=torch.float64)
    state = (h, h.clone()) if "LSTM" in kind.__name__ else h
    got = record(net, matrices_of(net), [(x, state)])
    rows, now = [], state
    for step in x.unbind(1):
        rows.append(now[0] if isinstance(now, tuple) else now)
        now = net.cell(step, now)
    torch.testing.assert_close(squares(got["cell.weight_hh"]), squares(torch.cat(rows)))
    torch.testing.assert_close(squares(got["cell.weight_ih"]), squares(x.reshape(-1, 5)))
    small, report = kc.compress(net, {"cell.weight_hh": "lowrank:r=1"}, calibration=[(x, state)])
    assert report.layers[0].calibration_error is not None
    assert small(x, state).shape == (3, 4)


@torch.no_grad()
def test_our_layers_see_what_torchs_see() -> None:
    torch.manual_seed(0)
    ours = kc.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True, input_format="lowrank:r=2").double()
    dense, x = ours.to_dense(), torch.randn(4, 7, 6, dtype=torch.float64)
    mine, theirs = record(ours, matrices_of(ours), x), record(dense, matrices_of(dense), x)
    for name, rows in theirs.items():
        torch.testing.assert_close(squares(mine[name]), squares(rows))


def test_what_is_kept_does_not_grow_with_the_data() -> None:
    few, many = Seen(8), Seen(8)
    rows = torch.randn(100, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    few.add(rows)
    for _ in range(50):
        many.add(rows)
    assert many.root().shape == few.root().shape == (8, 8)
    torch.testing.assert_close(squares(many.root()), 50 * squares(rows))
    wide = Seen(WIDEST + 1)
    numbers = torch.arange(300.0).reshape(-1, 1).expand(-1, WIDEST + 1)
    for start in range(0, 60 * 300, 300):
        wide.add(numbers + start)
    kept = wide.root()[:, 0]
    assert MOST_ROWS // 2 <= len(kept) <= MOST_ROWS
    assert set(kept.diff().tolist()) == {float(kept[1] - kept[0])}  # evenly from all calls


FORMATS: list[tuple[str, Callable[[], kc.Format], bool]] = [
    ("lowrank", lambda: kc.LowRank((12,), (8,), r=2), False),
    ("lowrank", lambda: kc.LowRank((12,), (8,), r=3), True),
    ("kt", lambda: kc.KT((4, 3), (4, 2), K=2), False),
    ("tt", lambda: kc.TT((4, 3), (4, 2), r=2), True),
    ("kcp", lambda: kc.KCP((4, 3), (4, 2), K=1, CA=2, CB=1), False),
    ("cp", lambda: kc.CP((4, 3), (4, 2), r=3), True),
]


@pytest.mark.parametrize(("name", "make", "shared"), FORMATS, ids=[f"{f[0]}-{f[2]}" for f in FORMATS])
@pytest.mark.parametrize("seed", range(3))
def test_a_calibrated_fit_is_never_worse_than_a_plain_one_on_the_data(
    name: str, make: Callable[[], kc.Format], shared: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    fmt = make()
    W = torch.randn(3, 12, 8, generator=generator, dtype=torch.float64)
    # Few rows, and some columns that nearly never differ from zero: what a ridge could mislead.
    X = torch.randn(9, 12, generator=generator, dtype=torch.float64) * torch.logspace(0, -4, 12, dtype=torch.float64)
    options: dict[str, Any] = {"gates": 3, "shared": shared}
    plain, _ = fmt.from_dense(W, **options, seed=seed, sweeps=20)
    seen, _ = fmt.from_dense(W, **options, inputs=X, seed=seed, sweeps=20)
    before = fmt.error(W, plain, **options, inputs=X)
    assert fmt.error(W, seen, **options, inputs=X) <= before * (1 + 1e-9) + 1e-12


def test_a_matrix_that_sees_few_directions_loses_nothing_at_that_rank() -> None:
    """Behind a table of ten rows, W is of rank ten to its inputs, however flat its own spectrum is."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 24), nn.GRU(24, 24, batch_first=True)).double()
    words = torch.arange(40).reshape(4, 10) % 10
    rules = {"1": "lowrank:r=10 shared"}
    plain, _ = kc.compress(net, rules)
    small, report = kc.compress(net, rules, calibration=words)
    wanted = net(words)[0].detach()
    with torch.no_grad():
        torch.testing.assert_close(small(words)[0], wanted, rtol=1e-3, atol=1e-3)
        assert (plain(words)[0] - wanted).abs().max().item() > 0.05
    assert report.layers[0].calibration_error is not None and report.layers[0].calibration_error < 1e-3


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ({"nowhere": torch.zeros(2, 3, 5)}, "which no rule matches"),
        ([], "never reached"),
    ],
)
def test_calibration_that_reaches_nothing_is_refused(calibration: Any, message: str) -> None:
    with pytest.raises(kc.KronecellError, match=message):
        kc.compress(nn.GRU(5, 16), {"": "lowrank:r=2"}, calibration=calibration)


@torch.no_grad()
@pytest.mark.parametrize("normalise", ["pixel", "frame", "clip"])
@pytest.mark.parametrize("lengths", [None, [3, 6]])
def test_a_classifier_of_videos_is_calibrated_on_what_its_layer_reads(normalise: str, lengths: Any) -> None:
    """Frames are normalised inside the first product: that is what W sees, and U what follows from it."""
    torch.manual_seed(0)
    net = kc.VideoClassifier(12, 5, 3, normalise=normalise, pixel_mean=0.4, input_gain=0.7).double()
    frames = torch.randint(256, (2, 6, 12), dtype=torch.uint8)
    counts = None if lengths is None else torch.tensor(lengths)
    got = record(net, matrices_of(net), [frames if counts is None else (frames, counts)])
    scale, shift = net.normalisation(frames, counts)
    x: Any = scale * (frames.double() / 255) + shift
    x = x if counts is None else pack_padded_sequence(x, counts, batch_first=True, enforce_sorted=False)
    wanted = record(net.rnn, matrices_of(net.rnn), [x] if counts is None else {"": x})
    for name, rows in wanted.items():
        torch.testing.assert_close(squares(got[f"rnn.{name}"]), squares(rows))
