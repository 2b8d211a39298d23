"""Which plan a product runs by: what the cost model predicts, or what was measured in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import kronecell as kc
from kronecell.ops.choose import Product, candidates, predict, predicted, prices
from kronecell.ops.tune import bucket, choices, explain, measure, pick

WIDE = kc.KCP((8, 6, 6, 8), (2, 2, 2, 2), 3, 2, 2)
ROWS = 16


@pytest.fixture(autouse=True)
def nothing_measured() -> Iterator[None]:
    choices.forget()
    yield
    choices.forget()


def layer(**options: object) -> kc.TensorLinear:
    torch.manual_seed(0)
    return kc.TensorLinear(WIDE, gates=4, **options)  # type: ignore[arg-type]


def product(rows: int = ROWS, training: bool = False) -> Product:
    with torch.set_grad_enabled(training):
        return layer().product(rows)


# The cost model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 512])
def test_without_measurements_the_cheapest_prediction_is_run_every_time(rows: int, training: bool) -> None:
    with torch.set_grad_enabled(training):
        one, two = layer(), layer()
        price = prices(one.product(rows))
        assert price.keys() == candidates(one.product(rows)).keys()
        assert predict(one.plan(rows), rows, training) <= 1.01 * min(price.values())
        assert one.plan(rows) == two.plan(rows) == one.plan(rows)


@pytest.mark.parametrize("grad", [False, True])
def test_a_price_grows_with_rows_and_training_costs_more(grad: bool) -> None:
    for name, plan in candidates(product(ROWS, grad)).items():
        assert predict(plan, 32, grad) > predict(plan, 16, grad) > 0, name
        assert predict(plan, 16, True) > predict(plan, 16, False), name


def test_choices_are_made_for_powers_of_two() -> None:
    assert [bucket(rows) for rows in (0, 1, 2, 3, 4, 5, 96, 128, 129)] == [1, 1, 2, 4, 4, 8, 128, 128, 256]
    with torch.no_grad():
        assert layer().plan(70) == layer().plan(128)


def test_a_given_order_is_run_whatever_the_model_says() -> None:
    for order in ("separable", "algorithm2", "optimal"):
        assert layer(order=order).plan(5).order == order


# Measuring -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_tuning_measures_the_candidates_and_the_fastest_is_run_from_then_on(training: bool) -> None:
    tuned, x = layer().train(training), torch.randn(ROWS, WIDE.M)
    expected = tuned(x).detach()
    state = torch.get_rng_state()
    (key, found), *frozen = kc.tune(tuned, x, repeats=1).items()
    assert torch.equal(state, torch.get_rng_state())
    assert len(frozen) == (not training) and all("frozen" in key for key, _ in frozen)
    with torch.set_grad_enabled(training):
        this = tuned.product(ROWS)
        assert key == this.key and {choice.name for choice in found} == candidates(this).keys()
        times = [choice.measured for choice in found if choice.measured is not None]
        assert times and times == sorted(times) and times[0] > 0
        seconds = {choice.name: choice.measured for choice in found}
        model = predicted(this)
        fastest = pick({name: seconds[name] for name in candidates(this)}, model)
        assert tuned.plan(ROWS) == layer().plan(ROWS) == candidates(this)[fastest]
        assert "chosen by measurement" in tuned.explain(ROWS) and "measured (ms)" in tuned.explain(ROWS)
        torch.testing.assert_close(tuned(x).detach(), expected, rtol=1e-4, atol=1e-5)
        choices.forget()
        assert tuned.plan(ROWS) == candidates(this)[model]
        assert "chosen by the cost model" in tuned.explain(ROWS)


def test_what_is_predicted_to_be_hopeless_is_not_run() -> None:
    found = {choice.name: choice for choice in measure(product(), repeats=1)}
    cheapest = min(choice.predicted for choice in found.values())
    for choice in found.values():
        assert (choice.measured is None) == (choice.predicted > 16 * cheapest)


def test_a_choice_holds_for_its_rows_mode_and_dtype_alone() -> None:
    tuned = layer().eval()
    with torch.no_grad():
        before = [tuned.plan(1), tuned.plan(4 * ROWS), tuned.double().plan(ROWS)]
        other = next(name for name, plan in candidates(product()).items() if plan != layer().plan(ROWS))
        choices.update({product().key: other})
        assert tuned.float().plan(ROWS) == candidates(product())[other]
        assert [tuned.plan(1), tuned.plan(4 * ROWS), tuned.double().plan(ROWS)] == before


def test_every_candidate_can_be_chosen_and_gives_the_same_numbers() -> None:
    chosen, x = layer().double().eval(), torch.randn(ROWS, WIDE.M, dtype=torch.float64)
    expected = chosen.to_dense()(x)
    with torch.no_grad():
        this = chosen.product(ROWS)
        for name, plan in candidates(this).items():
            choices.update({this.key: name})
            assert chosen.plan(ROWS) == plan
            torch.testing.assert_close(chosen(x), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("cell", [kc.LSTM, kc.GRU])
def test_a_recurrent_layer_is_tuned_through_its_product_with_x(cell: type) -> None:
    rnn = cell(WIDE.M, WIDE.N, batch_first=True, input_format=WIDE)
    (key,) = kc.tune(rnn, torch.zeros(2, 3, WIDE.M), repeats=1)
    assert key == rnn.weight_ih_l0.product(6).key and "training" in key
    ordinary, frozen = kc.tune(rnn, torch.zeros(2, 3, WIDE.M), grad=False, repeats=1)
    assert "inference" in ordinary and "frozen" in frozen


def test_tuning_takes_no_part_in_what_surrounds_it() -> None:
    tuned, x = layer(), torch.randn(ROWS, WIDE.M)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        (found,) = kc.tune(tuned, x, repeats=1).values()
    assert any(choice.measured for choice in found)
    with torch.inference_mode():
        assert len(kc.tune(tuned, x, repeats=1)) == 1
    assert all(p.grad is None for p in tuned.parameters())
    tuned(x).sum().backward()


def test_modules_that_make_no_such_product_are_refused() -> None:
    for module in (torch.nn.Linear(WIDE.M, 3), layer(order="separable"), kc.freeze(layer())):
        with pytest.raises(kc.PlanError, match="made no compressed product"):
            kc.tune(module, torch.zeros(1, WIDE.M))
    assert not choices.names


def test_a_choice_that_does_not_exist_is_refused_when_it_is_used() -> None:
    choices.update({product().key: "sideways"})
    with torch.no_grad():
        for use in (lambda: layer()(torch.zeros(ROWS, WIDE.M)), lambda: layer().plan(ROWS), lambda: explain(product())):
            with pytest.raises(kc.PlanError, match="names 'sideways'"):
                use()


# Picking -------------------------------------------------------------------------------------------------------------


def test_of_equal_times_the_first_is_picked_and_what_was_not_run_never() -> None:
    assert pick({"own": 1.02, "optimal": 1.0, "split": 0.995}) == "own"
    assert pick({"own": 1.1, "optimal": 1.0, "split": 0.995}) == "optimal"
    assert pick({"own": None, "optimal": 2.0, "split": 1.0}) == "split"


def test_a_measurement_must_be_clear_to_overrule_the_model() -> None:
    assert pick({"own": 1.0, "optimal": 1.09}, "optimal") == "optimal"
    assert pick({"own": 1.0, "optimal": 1.2}, "optimal") == "own"
    assert pick({"own": 1.0, "optimal": None}, "optimal") == "own"
