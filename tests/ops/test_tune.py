"""Which way a product is run: predicted, measured, saved, and measured when first met."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import kronecell as kc
from kronecell.ops.candidates import candidates, predict, splits
from kronecell.ops.plan import Plan
from kronecell.ops.tune import (
    SAME,
    Choice,
    Product,
    _by_model,
    _chosen,
    choose,
    explain,
    forget,
    load_choices,
    measure,
    measure_on_first_use,
    pick,
    predicted,
    save_choices,
)

WIDE = kc.KCP((8, 6, 6, 8), (2, 2, 2, 2), 3, 2, 2)


@pytest.fixture(autouse=True)
def no_choices_left_behind() -> object:
    yield
    forget()
    measure_on_first_use(False)


PRODUCT = Product(WIDE, 16, 4, False, grad=False)


def test_the_model_chooses_the_cheapest_prediction_every_time() -> None:
    runners = candidates(WIDE, 16, 4, False)
    best = min(predict(runner, 16, training=False) for runner in runners.values())
    assert predict(choose(PRODUCT), 16, training=False) == best
    assert choose(PRODUCT) is choose(PRODUCT)


def test_chunks_of_many_rows_may_take_the_order_that_is_best_for_few() -> None:
    fmt = kc.BT((8, 20, 20, 18), (4, 4, 4, 4), 4, P=2)
    few, many = (candidates(fmt, rows, 4, False) for rows in (128, 512))
    names = [name for name in many if "for 128 rows" in name]
    assert names and all(name.endswith("in chunks") for name in names)
    trees = [runner.tree for runner in few.values() if isinstance(runner, Plan)]
    assert all(many[name].plan.tree in trees for name in names)  # type: ignore[union-attr]


def test_tuning_measures_every_candidate_and_its_choice_is_used_and_can_be_saved(tmp_path: Path) -> None:
    layer = kc.TensorLinear(WIDE, gates=4).eval()
    x = torch.zeros(16, WIDE.M)
    (choices,) = kc.tune(layer, x, repeats=1).values()
    assert {choice.name for choice in choices} == {*candidates(WIDE, 16, 4, False)}
    cheapest = min(choice.predicted for choice in choices)
    for choice in choices:
        assert (choice.measured is None) == (choice.predicted > 16 * cheapest)
        assert choice.measured is None or choice.measured > 0
    with torch.no_grad():
        product = layer.product(16)
        seconds = {choice.name: choice.measured for choice in choices}
        runners = candidates(WIDE, 16, 4, False)
        model = min(runners, key=lambda name: product.predict(runners[name]))
        taken = pick({name: seconds[name] for name in runners}, model)
        assert choose(product) is candidates(WIDE, 16, 4, False)[taken]
        assert "chosen by measurement" in layer.explain(16) and "measured (ms)" in layer.explain(16)
        path = tmp_path / "choices.json"
        save_choices(path)
        forget()
        assert "chosen by the cost model" in layer.explain(16)
        assert load_choices(path) == 1
        assert choose(product) is candidates(WIDE, 16, 4, False)[taken]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_with_the_setting_on_a_product_is_measured_when_it_is_first_met(
    monkeypatch: pytest.MonkeyPatch, mode: Callable[[], Any]
) -> None:
    met: list[str] = []

    def spy(product: Product, repeats: int) -> list[Choice]:
        met.append(product.key)
        return measure(product, repeats=1)

    monkeypatch.setattr(sys.modules["kronecell.ops.tune"], "measure", spy)  # kronecell.ops.tune is also a function
    layer, x = kc.TensorLinear(WIDE, gates=4), torch.randn(16, WIDE.M)
    expected = x @ layer.dense_weight().detach().T + layer.bias.detach()  # type: ignore[union-attr]
    before = torch.get_rng_state()
    with mode():
        layer(x)
        assert not met
        measure_on_first_use()
        for _ in range(2):
            torch.testing.assert_close(layer(x).detach(), expected, rtol=1e-4, atol=1e-5)
        assert met == [layer.product(16).key] and "chosen by measurement" in layer.explain(16)
        layer(x[:3])
        assert len(met) == 2
        measure_on_first_use(False)
        layer(x[:1])
    assert len(met) == 2 and torch.equal(before, torch.get_rng_state())


def _checkpointed(layer: kc.TensorLinear, x: torch.Tensor) -> object:
    return checkpoint(layer, x.requires_grad_(), use_reentrant=False).sum().backward()


def _counted(layer: kc.TensorLinear, x: torch.Tensor) -> object:
    counts = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            layer(x)
        counts.append(counter.get_total_flops())
    measuring, measured = counts  # whichever way the clock chose, the second call takes the same
    assert measuring == measured > 0
    return None


def _in_meta(layer: kc.TensorLinear, x: torch.Tensor) -> object:
    with torch.device("meta"):
        return layer(x)


MEASURED_IN: dict[str, Callable[[kc.TensorLinear, torch.Tensor], object]] = {
    "a checkpoint": _checkpointed,
    "vmap": lambda layer, x: torch.vmap(layer)(x.unsqueeze(0)),
    "torch.func.grad": lambda layer, x: torch.func.grad(lambda x: layer(x).sum())(x),
    "a counter of flops": _counted,
    "another default device": _in_meta,
    "autocast": lambda layer, x: torch.autocast("cpu", dtype=torch.bfloat16)(layer)(x),
}


@pytest.mark.parametrize("context", MEASURED_IN)
def test_measuring_on_first_use_does_not_take_part_in_what_surrounds_it(context: str) -> None:
    layer = kc.TensorLinear(WIDE)
    measure_on_first_use()
    MEASURED_IN[context](layer, torch.randn(4, WIDE.M))
    assert _chosen


@pytest.mark.parametrize(("recurrence", "what"), [("native", "columns"), ("loop", "product")])
def test_a_recurrent_layer_is_tuned_through_its_split_or_its_gates(recurrence: str, what: str) -> None:
    rnn = kc.LSTM(WIDE.M, WIDE.N, batch_first=True, input_format=WIDE, recurrence=recurrence)
    results = kc.tune(rnn, torch.zeros(2, 3, WIDE.M), repeats=1)
    (key,) = results
    assert key.startswith(f"{what} kcp") and "training" in key
    known = splits if what == "columns" else candidates
    assert {choice.name for choice in results[key]} == {*known(WIDE, 8, 4, False)}


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "not a file of choices"), ("no json", "not a file of choices"), (None, "cannot read")],
)
def test_a_bad_file_of_choices_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "choices.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(kc.PlanError, match=message):
        load_choices(path)


def test_a_saved_choice_that_does_not_exist_is_refused_when_used() -> None:
    _chosen[PRODUCT.key] = "sideways"
    for use in (choose, explain):
        with pytest.raises(kc.PlanError, match="names 'sideways'"):
            use(PRODUCT)


def test_tuning_a_module_without_compressed_layers_is_refused() -> None:
    with pytest.raises(kc.PlanError, match="made no compressed product"):
        kc.tune(torch.nn.Linear(3, 3), torch.zeros(1, 3))


def test_of_equal_times_the_first_is_picked_and_what_was_not_run_never() -> None:
    assert pick({"own": 1.02, "optimal": 1.0, "split": 0.995}) == "own"
    assert pick({"own": 1.1, "optimal": 1.0, "split": 0.995}) == "optimal"
    assert pick({"own": None, "optimal": 2.0, "split": 1.0}) == "split"


def test_a_measurement_must_be_clear_to_overrule_the_model() -> None:
    assert pick({"own": 1.0, "optimal": 1.09}, "optimal") == "optimal"
    assert pick({"own": 1.0, "optimal": 1.2}, "optimal") == "own"
    assert pick({"own": 1.0, "optimal": None}, "optimal") == "own"


def test_measure_sorts_by_time() -> None:
    times = [choice.measured for choice in measure(PRODUCT, repeats=1) if choice.measured is not None]
    assert times == sorted(times) and times


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("fmt", [kc.LowRank((57_600,), (256,), 8), kc.KT((57_600,), (256,), 4)], ids=str)
def test_a_split_into_the_products_of_a_plan_is_no_candidate_of_its_own(fmt: kc.Format, shared: bool) -> None:
    assert [*splits(fmt, 512, 4, shared)] == ["split"]
    assert [*Product(fmt, 512, 4, shared, False).runners()] == ["input_first"]


def test_of_candidates_that_cost_the_same_the_formats_own_order_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    product = Product(WIDE, 64, 4, False, False)
    names = [*product.runners()]
    for share, expected in ((1.0005, names[0]), (SAME * 1.001, names[1])):
        price = dict(zip(product.runners().values(), [share, 1.0, *[2.0] * len(names)], strict=False))
        monkeypatch.setattr(Product, "predict", lambda self, runner, price=price: price[runner])
        _by_model.clear()
        assert predicted(product) == expected
    _by_model.clear()
