"""What kc.compress chooses: sharing by error, budgets and bytes that are kept, what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import kronecell as kc
from kronecell.compress.matrices import matrices_of
from kronecell.compress.sensitivity import left_of_rounding
from kronecell.nn.quantize import bytes_of


class Speller(nn.Module):
    """A small model with everything inside: a table, two recurrent layers of other sizes, a head."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.table = nn.Embedding(30, width)
        self.first = nn.GRU(width, width, batch_first=True)
        self.second = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 30)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.table(x))[0])[0])


def speller(width: int = 48) -> Speller:
    torch.manual_seed(0)
    return Speller(width).eval()


def words(count: int = 8) -> Tensor:
    return torch.randint(30, (count, 9), generator=torch.Generator().manual_seed(1))


def low_rank(rows: int, columns: int, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)


def test_gates_share_what_they_have_in_common_where_that_is_better() -> None:
    """Two layers: gates that read the same few directions, and gates that read few directions each of their own."""
    net = nn.LSTM(64, 64, num_layers=2)
    with torch.no_grad():
        net.weight_ih_l0.copy_(low_rank(256, 64, 8, 0))
        net.weight_ih_l1.copy_(torch.cat([low_rank(64, 64, 8, gate) for gate in range(1, 5)]))
    small, report = kc.compress(net, {"": "lowrank"}, error=1e-3)
    first, second = small.weight_ih_l0, small.weight_ih_l1
    assert (first.shared, second.shared) == (True, False)
    assert (first.format.r, second.format.r) == (8, 8)
    assert [layer.error < 1e-3 for layer in report.layers] == [True, True]


def test_a_rule_may_ask_for_shared_gates_and_files_keep_them_by_layer(tmp_path: Path) -> None:
    net = nn.LSTM(32, 32, num_layers=2, batch_first=True)
    rules = {"weight_ih_l0": "lowrank:r=6 shared", "weight_ih_l1": "lowrank:r=4", "weight_hh_l*": "lowrank:r=5 shared"}
    small, report = kc.compress(net, rules)
    assert isinstance(small, kc.LSTM)
    assert [getattr(small, name).shared for name in ("weight_ih_l0", "weight_ih_l1", "weight_hh_l1")] == [
        True,
        False,
        True,
    ]
    assert report.layers[0].params_after == 6 * (32 + 4 * 32)
    kc.save(small, tmp_path / "small")
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(kc.load(tmp_path / "small")(x)[0], small(x)[0], rtol=0, atol=0)
    with pytest.raises(kc.ShapeError, match="one entry per layer"):
        kc.LSTM(8, 8, num_layers=3, input_format="lowrank:r=2", shared=[True, False])


@pytest.mark.parametrize("size", [0.3, 0.12, 12_000])
def test_a_size_is_kept_in_bytes_of_the_whole_model(size: float) -> None:
    net, x = speller(), words()
    small, report = kc.compress(net, size=size, calibration=x)
    wanted = size if isinstance(size, int) else size * bytes_of(net)
    assert 0.6 * wanted < bytes_of(small) <= wanted
    assert report.model_bytes_after == bytes_of(small) and report.model_bytes_before == bytes_of(net)
    assert small(x).shape == (8, 9, 30)
    assert "bytes" in str(report)


@torch.no_grad()
def test_more_bytes_lose_less_and_calibrated_choices_lose_little() -> None:
    net, x = speller(), words(32)
    wanted = net(x)
    errors = []
    for size in (0.08, 0.15, 0.3):
        small, _ = kc.compress(net, size=size, calibration=x)
        errors.append(float((small(x) - wanted).norm() / wanted.norm()))
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.1


def test_bits_can_be_given() -> None:
    net = speller()
    small, report = kc.compress(net, {"first": "lowrank:r=8 shared"}, bits=4)
    assert {row.bits for row in small.quantization.matrices} == {4}
    assert report.layers[0].format.endswith("shared 4 bits")
    floats, _ = kc.compress(net, size=0.7, bits=())
    assert not hasattr(floats, "quantization") and bytes_of(floats) <= 0.7 * bytes_of(net)
    some, _ = kc.compress(net, {"second": "lowrank", "second.weight_hh_l0": "dense"}, size=0.8, bits=(8, 5))
    assert {row.bits for row in some.quantization.matrices} <= {5, 8}
    assert {row.name.split(".")[0] for row in some.quantization.matrices} <= {"second"}


@torch.no_grad()
def test_a_rule_may_name_bits_as_reports_do() -> None:
    net, x = speller(), words()
    rules = {"first": "lowrank:r=8 shared 8 bits", "second.weight_hh_l0": "dense 4 bits", "head": "lowrank:r=5"}
    small, report = kc.compress(net, rules)
    formats = {layer.name: layer.format for layer in report.layers}
    assert formats["first.weight_ih_l0"].endswith("r=8 shared 8 bits")
    assert formats["second.weight_hh_l0"] == "dense 4 bits" and "bits" not in formats["head.weight"]
    assert small(x).shape == net(x).shape
    _, sized = kc.compress(net, {"*": "lowrank", "*.weight_*": "lowrank 5 bits"}, size=0.2, calibration=x)
    ends = {layer.name: layer.format.split()[-2:] for layer in sized.layers if ".weight_" in layer.name}
    assert set(map(tuple, ends.values())) == {("5", "bits")}
    with pytest.raises(kc.KronecellError, match="from 3 to 8, got 2"):
        kc.compress(net, {"head": "lowrank:r=2 2 bits"})


def test_a_model_of_integers_can_be_saved_and_loaded(tmp_path: Path) -> None:
    net, x = speller(), words()
    small, _ = kc.compress(net, {"*": "lowrank", "head": "dense", "table": "dense"}, size=0.2)
    kc.save(small, tmp_path / "small")
    rules = {"*": "lowrank", "head": "dense", "table": "dense"}
    again, _ = kc.compress(net, rules, size=0.2)
    loaded = kc.load(tmp_path / "small", into=again)
    torch.testing.assert_close(loaded(x), small(x), rtol=0, atol=0)


def test_small_matrices_are_left_alone() -> None:
    """A narrow W0 beside large matrices saves nothing and costs much; a rule that names it is obeyed."""
    net = nn.LSTM(6, 128, num_layers=2)
    small, _ = kc.compress(net, budget=0.4)
    assert isinstance(small, kc.LSTM) and isinstance(small.weight_ih_l0, nn.Parameter)
    assert torch.equal(small.weight_ih_l0, net.weight_ih_l0)
    assert isinstance(small.weight_hh_l1, kc.TensorLinear)
    named, _ = kc.compress(net, {"weight_ih_l0": "lowrank:r=2 shared"})
    assert isinstance(named.weight_ih_l0, kc.TensorLinear)


def test_what_is_compressed_already_is_counted_and_left_as_it_is() -> None:
    net = nn.Sequential(kc.GRU(64, 64, input_format="kcp:K=1,CA=1,CB=1"), nn.Linear(64, 64))
    stored = sum(p.numel() for p in net[0].weight_ih_l0.parameters())
    dense = 3 * 64 * 64 + 64 * 64
    small, report = kc.compress(net, budget=0.5)
    kept = small[0].weight_ih_l0
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), net[0].weight_ih_l0.parameters(), strict=True))
    assert sum(layer.params_after for layer in report.layers) <= 0.5 * (stored + dense) - stored
    assert [layer.name for layer in report.layers] == ["0.weight_hh_l0", "1.weight"]
    sized, _ = kc.compress(net, size=0.2)
    assert bytes_of(sized) <= 0.2 * bytes_of(net)
    torch.testing.assert_close(sized[0].weight_ih_l0.dense_weight(), kept.dense_weight(), rtol=0.05, atol=0.05)
    again, refit = kc.compress(net, {"0.weight_ih_l0": "lowrank:r=2"})
    assert again[0].weight_ih_l0.format.kind == "lowrank" and refit.layers[0].params_before == 3 * 64 * 64
    with pytest.raises(kc.KronecellError, match="leaves alone what is compressed already"):
        kc.compress(net, {"*.weight_ih_l0": "lowrank:r=2"})


def test_tied_weights_are_left_out_of_a_search() -> None:
    net = nn.ModuleDict({"table": nn.Embedding(40, 40), "head": nn.Linear(40, 40), "rnn": nn.GRU(40, 40)})
    net["head"].weight = net["table"].weight
    small, report = kc.compress(net, size=0.5)
    assert small["head"].weight is small["table"].weight
    assert {layer.name.split(".")[0] for layer in report.layers} == {"rnn"}


def test_a_search_leaves_the_model_and_its_mode_as_they_were() -> None:
    net = speller().train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    kc.compress(net, size=0.3, calibration=words())
    assert net.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_lines_say_what_is_being_done() -> None:
    lines: list[str] = []
    kc.compress(speller(), size=0.2, calibration=[words(), words()], progress=lines.append)
    text = "\n".join(lines)
    assert "calibration: 2 batches" in text and "first.weight_ih_l0: trying lowrank" in text and "fitting" in text


def test_every_matrix_of_every_layer_and_cell_is_found() -> None:
    net = nn.ModuleDict(
        {"a": nn.LSTMCell(4, 5), "b": nn.GRUCell(4, 5), "c": nn.Embedding(7, 3), "d": kc.GRU(4, 5, bidirectional=True)}
    )
    found = {matrix.name: (matrix.gates, matrix.copies) for matrix in matrices_of(net)}
    assert found == {
        "a.weight_ih": (4, 1), "a.weight_hh": (4, 1), "b.weight_ih": (3, 1), "b.weight_hh": (3, 1),
        "c.weight": (1, 1), "d.weight_ih_l0": (3, 2), "d.weight_hh_l0": (3, 2),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0.001}, "too small"),
        ({"size": 100}, "too small|nothing tried"),
        ({"size": 1.5}, "part below 1"),
        ({"size": 0.5, "bits": 2}, "from 3 to 8"),
        ({"budget": 0.5, "bits": (4, 8)}, "need a size"),
        ({"size": 0.5, "budget": 0.5}, "not both"),
    ],
)
def test_what_cannot_be_met_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(kc.KronecellError, match=message):
        kc.compress(speller(16), **options)  # type: ignore[arg-type]
    with pytest.raises(kc.KronecellError, match="holds integers already"):
        kc.compress(kc.quantize(speller()), size=0.5)


def test_rounding_counts_less_where_training_follows_and_weights_can_answer_for_each_other() -> None:
    """Rounded one after the other, each weight takes back what it can of those before: the rule says what is left."""
    generator = torch.Generator().manual_seed(0)
    X, mix = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((400, 24), (24, 24)))
    X = X @ mix
    W = torch.randn(24, 500, generator=generator, dtype=torch.float64)
    R = torch.linalg.cholesky(X.mT @ X).mT  # |X E| = |R E|
    errors = {}
    for taken_back in (False, True):
        Q = W.clone()
        for i in reversed(range(24)):
            answer = R[i, i + 1 :] @ (W - Q)[i + 1 :] / R[i, i] if taken_back else 0
            Q[i] = (8 * (W[i] + answer)).round() / 8
        errors[taken_back] = float((X @ (W - Q)).square().sum())
    assert errors[True] < 0.6 * errors[False]
    assert left_of_rounding(X) == pytest.approx(errors[True] / errors[False], rel=0.2)
    assert left_of_rounding(torch.eye(24)) == pytest.approx(1)
    assert left_of_rounding(torch.zeros(5, 24)) == 1


def test_where_training_follows_no_fewer_numbers_are_kept() -> None:
    """Training makes good what rounding did, not what was cut off: bytes go to ranks before they go to bits."""
    net, x = speller(), words(32)
    training = {"steps": 1, "lr": 0.0}
    _, plain = kc.compress(net, size=0.12, calibration=x)
    _, trained = kc.compress(net, size=0.12, calibration=x, train=[x], training=training)
    assert trained.params_after >= plain.params_after
