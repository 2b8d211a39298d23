"""kc.train_sparsity: a schedule from dense to the density of the format, resumable bit for bit, in any loop."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronecell as kc
from kronecell.nn.sparse import SparseMatrix
from kronecell.training.sparsity import Sparsity

FORMAT = "doped:0.05+kt:m=32,n=32,K=2"
SCHEDULE = kc.SparsitySchedule(end=40, begin=4, every=6)
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
}


def made(schedule: kc.SparsitySchedule = SCHEDULE) -> tuple[nn.Module, Sparsity]:
    torch.manual_seed(0)
    rnn = kc.GRU(32, 32, input_format="doped:0.05,block=4+kt:K=2", hidden_format="doped:0.05+tt:r=2")
    model = nn.ModuleDict({"rnn": rnn, "head": kc.TensorLinear(FORMAT)})
    return model, kc.train_sparsity(model, schedule)


def parts(model: nn.Module) -> list[SparseMatrix]:
    return [part for part in model.modules() if isinstance(part, SparseMatrix)]


def trained(model: Any, sparsity: Sparsity, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """A loop of a user; what is random follows from the step."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(5, 8, 32)
        optimizer.zero_grad()
        loss = (model["head"](model["rnn"](x)[0]) - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        sparsity.step(optimizer)
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("regrow", [0.0, 0.2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_density_falls_from_one_to_that_of_the_format_and_then_places_stay(name: str, regrow: float) -> None:
    schedule = kc.SparsitySchedule(end=40, begin=4, every=6, regrow=regrow)
    model, sparsity = made(schedule)
    optimizer = OPTIMIZERS[name](model.parameters())
    assert sparsity.density == 1.0 and not sparsity.finished
    seen, places = [], []
    for step in range(60):
        trained(model, sparsity, optimizer, range(step, step + 1))
        seen.append(sparsity.density)
        places.append([part.places for part in parts(model)])
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in model.parameters()}
        for part in parts(model):
            state = optimizer.state[part.entries]
            assert all(t.shape in ((), part.entries.shape) for t in state.values() if isinstance(t, Tensor))
    assert seen[:9] == [1.0] * 9 and all(after <= before for before, after in itertools.pairwise(seen))
    assert len({*seen}) == 7 and sparsity.finished
    for part, layer in zip(parts(model), [m for m in model.modules() if isinstance(m, kc.TensorLinear)], strict=True):
        assert part.size == layer.format.sparse(layer.gates) and layer.settled and part.drop == 0
    assert all(torch.equal(a, b) for a, b in zip(places[39], places[-1], strict=True))
    assert kc.count(model).params == sum(p.numel() for p in model.parameters())


def test_the_largest_entries_stay_with_their_values_and_their_state() -> None:
    model, sparsity = made(kc.SparsitySchedule(end=1))
    optimizer = OPTIMIZERS["adam"](model.parameters())
    trained(model, Sparsity.__new__(Still), optimizer, range(3))
    before = [
        (part.entries.detach().clone(), optimizer.state[part.entries]["exp_avg"].clone()) for part in parts(model)
    ]
    sparsity.step(optimizer)
    for part, (entries, average) in zip(parts(model), before, strict=True):
        assert torch.equal(part.entries, entries[part.places])
        assert torch.equal(optimizer.state[part.entries]["exp_avg"], average[part.places])
        sizes = entries.square().sum(1)
        gone = torch.ones(len(sizes), dtype=torch.bool)
        gone[part.places] = False
        kept = sizes[part.places].sort().values
        between = int(0.1 * len(kept))  # a few small ones stay where indices could not reach over the gap
        assert sizes[gone].max() <= kept[between]


class Still(Sparsity):
    """One that does nothing: the loop above without a schedule."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing."""


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stop", [2, 10, 27, 40, 45])
def test_a_resumed_run_has_the_same_bits(stop: int, name: str) -> None:
    schedule = kc.SparsitySchedule(end=40, begin=4, every=6, regrow=0.1)
    model, sparsity = made(schedule)
    optimizer = OPTIMIZERS[name](model.parameters())
    trained(model, sparsity, optimizer, range(stop))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "steps": sparsity.state_dict(), "optimizer": optimizer.state_dict()}, file)
    want = trained(model, sparsity, optimizer, range(stop, 50))
    file.seek(0)
    saved = torch.load(file)
    again, sparsity = made(schedule)
    sparsity.load_state_dict(saved["steps"])
    again.load_state_dict(saved["model"])
    optimizer = OPTIMIZERS[name](again.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    assert trained(again, sparsity, optimizer, range(stop, 50)) == want
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))


def test_once_the_places_stand_gradients_are_of_the_entries_alone() -> None:
    model, sparsity = made(kc.SparsitySchedule(end=3, every=1))
    trained(model, sparsity, OPTIMIZERS["sgd"](model.parameters()), range(5))
    for part in parts(model):
        assert part.entries.grad is not None
        assert part.entries.grad.shape == part.entries.shape and part.entries.numel() <= 0.05 * 32 * 3 * 32


def test_dropout_falls_to_zero_and_a_fitted_model_starts_from_its_entries() -> None:
    torch.manual_seed(0)
    layer = kc.TensorLinear.from_dense(nn.Linear(32, 32), FORMAT)
    before = layer.dense_weight()
    sparsity = kc.train_sparsity(layer, kc.SparsitySchedule(end=10, every=2, dropout=0.4))
    torch.testing.assert_close(layer.dense_weight(), before, rtol=0, atol=0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    rates = []
    for _ in range(12):
        rates.append(layer.sparse.drop)
        sparsity.step(optimizer)
    assert rates == pytest.approx([0.4 * max(0.0, 1 - step / 10) for step in range(12)])
    torch.testing.assert_close(layer.dense_weight(), before, rtol=0, atol=0)


def test_with_a_trained_model_as_start_nothing_is_lost_at_first() -> None:
    torch.manual_seed(0)
    trained = nn.ModuleDict({"rnn": nn.GRU(32, 32), "head": nn.Linear(32, 32)})
    formats = {"input_format": "doped:0.05,block=4+kt:K=2", "hidden_format": "doped:0.05+tt:r=2"}
    rnn = kc.GRU.from_dense(trained["rnn"], **formats)
    model = nn.ModuleDict({"rnn": rnn, "head": kc.TensorLinear.from_dense(trained["head"], FORMAT)})
    sparsity = kc.train_sparsity(model, kc.SparsitySchedule(end=2, every=1), start=trained)
    x = torch.randn(5, 3, 32)
    torch.testing.assert_close(model.eval()["rnn"](x)[0], trained["rnn"](x)[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model["head"](x), trained["head"](x), rtol=1e-5, atol=1e-5)
    for _ in range(2):
        sparsity.step(OPTIMIZERS["sgd"](model.parameters()))
    assert all(layer.settled for layer in model.modules() if isinstance(layer, kc.TensorLinear))
    alone = kc.TensorLinear.from_dense(trained["head"], FORMAT)
    kc.train_sparsity(alone, SCHEDULE, start=trained["head"])
    torch.testing.assert_close(alone.eval()(x), trained["head"](x), rtol=1e-5, atol=1e-5)


def test_a_model_in_the_middle_is_not_saved_as_a_finished_one(tmp_path: Any) -> None:
    model, sparsity = made()
    with pytest.raises(kc.CheckpointError, match=r"larger than its format says.*has not come to the end"):
        kc.save(model, tmp_path)
    trained(model, sparsity, OPTIMIZERS["sgd"](model.parameters()), range(40))
    kc.save(model, tmp_path)
    again = copy.deepcopy(model)
    kc.load(tmp_path, into=again)


WRONG: list[tuple[Any, str]] = [
    (lambda: kc.train_sparsity(nn.Linear(2, 2), SCHEDULE), "no doped layer in Linear; give one a format such as"),
    (lambda: kc.train_sparsity(kc.freeze(kc.TensorLinear(FORMAT)), SCHEDULE), "a frozen layer does not train"),
    (
        lambda: kc.train_sparsity(kc.TensorLinear(FORMAT), SCHEDULE, start=nn.Linear(4, 4)),
        r"start needs a dense weight \(32, 32\) named 'weight', as the doped layer is, got \(4, 4\)",
    ),
    (
        lambda: kc.train_sparsity(nn.ModuleDict({"a": kc.TensorLinear(FORMAT)}), SCHEDULE, start=nn.Linear(4, 4)),
        r"start needs a dense weight \(32, 32\) named 'a', as the doped layer is, got none",
    ),
    (lambda: kc.SparsitySchedule(end=0), "end must be a whole number of at least 1, got 0"),
    (lambda: kc.SparsitySchedule(end=5, begin=5), "end must be a whole number of at least 6, got 5"),
    (lambda: kc.SparsitySchedule(end=5, every=0), "every must be a whole number of at least 1, got 0"),
    (lambda: kc.SparsitySchedule(end=5, dropout=1.0), "dropout must be from 0 to below 1, got 1.0"),
    (lambda: kc.SparsitySchedule(end=5, regrow=-0.1), "regrow must be from 0 to below 1, got -0.1"),
]


@pytest.mark.parametrize(("call", "words"), WRONG)
def test_mistakes_are_named(call: Any, words: str) -> None:
    with pytest.raises(kc.KronecellError, match=words):
        call()
