"""An LSTM in eval mode packs its weights once, for oneDNN's kernel ("native") or the compiled one (where that is built,
"auto"): same results, and no change of a parameter is missed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations, prune

import kronecell as kc
from kronecell.nn import recurrence

LAYER = "kcp:m=4x3x3,n=4x4x3,K=2,CA=2,CB=2"
PACKED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "plain": ({}, (6, 5, 36)),
    "one step, one row": ({}, (1, 1, 36)),
    "one row": ({}, (6, 1, 36)),
    "no batch": ({}, (6, 36)),
    "batch first": ({"batch_first": True}, (5, 6, 36)),
    "no bias": ({"bias": False}, (6, 5, 36)),
    "layers and directions": ({"num_layers": 2, "bidirectional": True, "input_format": [LAYER, None]}, (6, 5, 36)),
    "dense W": ({"input_format": None}, (6, 5, 36)),
    "identity": ({"input_format": "tt:m=4x3x3,n=4x4x3,r=2"}, (6, 5, 36)),
    "compressed U": ({"hidden_format": "kcp:m=4x4x3,n=4x4x3,K=2,CA=2,CB=2"}, (6, 5, 36)),
}

both_kernels = pytest.mark.parametrize("recurrence_", ["auto", "native"])


def held(rnn: kc.LSTM) -> bool:
    return all(kept._held for kept in rnn._kept.values())


@pytest.mark.parametrize("case", PACKED)
def test_packed_weights_give_the_results_of_the_native_kernel_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    options, shape = PACKED[case]
    torch.manual_seed(0)
    rnn = kc.LSTM(36, 48, **{"input_format": LAYER, "recurrence": "native", **options}).eval()
    x = torch.randn(shape)
    count = rnn.num_layers * rnn.directions
    batch = () if len(shape) == 2 else (shape[0] if rnn.batch_first else shape[1],)
    state = tuple(torch.randn(*batch, 48, count).movedim(-1, 0) for _ in range(2))  # does not lie in one piece
    for hx in (None, state):
        with torch.no_grad():
            y, last = rnn(x, hx)
            assert held(rnn)
            again, _ = rnn(x, hx)
            monkeypatch.setattr(recurrence, "_pack", None)
            expected, expected_last = rnn(x, hx)
            monkeypatch.undo()
        for got, want in ((y, expected), (again, expected), (last[0], expected_last[0]), (last[1], expected_last[1])):
            assert torch.equal(got, want)


def _prune(rnn: kc.LSTM) -> None:
    prune.l1_unstructured(rnn, "weight_hh_l0", 0.5)


CHANGES: dict[str, Callable[[kc.LSTM], object]] = {
    "U in place": lambda rnn: rnn.weight_hh_l0.mul_(2),
    "a factor of W in place": lambda rnn: rnn.weight_ih_l0.A1.mul_(2),
    "load_state_dict": lambda rnn: rnn.load_state_dict({k: 2 * v for k, v in rnn.state_dict().items()}),
    "another parameter": lambda rnn: setattr(rnn, "weight_hh_l0", torch.nn.Parameter(2 * rnn.weight_hh_l0)),
    "train and eval": lambda rnn: (rnn.weight_hh_l0.data.mul_(2), rnn.train(), rnn.eval()),
    "pruning": _prune,
    "double and float": lambda rnn: rnn.double().float().weight_hh_l0.mul_(2),
}


@both_kernels
@pytest.mark.parametrize("change", CHANGES)
def test_packed_weights_follow_every_change_of_the_parameters(change: str, recurrence_: str) -> None:
    torch.manual_seed(0)
    rnn = kc.LSTM(36, 48, input_format=LAYER, recurrence=recurrence_).eval()
    x = torch.randn(6, 5, 36)
    with torch.no_grad():
        before, _ = rnn(x)
        CHANGES[change](rnn)
        y, _ = rnn(x)
        expected, _ = copy.deepcopy(rnn)(x)  # which keeps nothing
    assert torch.equal(y, expected) and not torch.equal(y, before)


def _norm(rnn: kc.LSTM) -> None:
    parametrizations.weight_norm(rnn, "weight_ih_l0")


DENSE_CHANGES: dict[str, tuple[Callable[[kc.LSTM], object], Callable[[kc.LSTM], object]]] = {
    "in place": (lambda rnn: None, lambda rnn: rnn.weight_ih_l0.mul_(2)),
    "pruned": (lambda rnn: None, lambda rnn: prune.l1_unstructured(rnn, "weight_ih_l0", 0.5)),
    "pruned again": (
        lambda rnn: prune.l1_unstructured(rnn, "weight_ih_l0", 0.3),
        lambda rnn: prune.l1_unstructured(rnn, "weight_ih_l0", 0.6),
    ),
    "weight norm": (_norm, lambda rnn: rnn.parametrizations.weight_ih_l0.original0.mul_(3)),
    "data and flatten_parameters": (
        lambda rnn: None,
        lambda rnn: (rnn.weight_ih_l0.data.mul_(2), rnn.flatten_parameters()),
    ),
}


@both_kernels
@pytest.mark.parametrize("change", DENSE_CHANGES)
def test_packed_weights_follow_every_change_of_a_dense_input_matrix(change: str, recurrence_: str) -> None:
    torch.manual_seed(0)
    rnn = kc.LSTM(36, 48, recurrence=recurrence_)
    first, second = DENSE_CHANGES[change]
    x = torch.randn(6, 5, 36)
    with torch.no_grad():
        first(rnn)
        rnn.eval()
        before, _ = rnn(x)
        second(rnn)
        y, _ = rnn(x)
        expected, _ = copy.deepcopy(rnn)(x)  # which keeps nothing
    assert torch.equal(y, expected) and not torch.equal(y, before)


@both_kernels
@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0"])
def test_a_matrix_given_for_one_call_is_not_kept(name: str, recurrence_: str) -> None:
    rnn, x = kc.LSTM(36, 48, recurrence=recurrence_).eval(), torch.randn(6, 5, 36)
    with torch.no_grad():
        zeros, ones = (
            torch.func.functional_call(rnn, {name: weight}, (x,))[0]
            for weight in (torch.zeros_like(rnn.get_parameter(name)), torch.ones_like(rnn.get_parameter(name)))
        )
    assert not torch.equal(zeros, ones)


@both_kernels
@pytest.mark.parametrize("name", ["weight_hh_l0", "weight_ih_l0.A1"])
def test_other_memory_for_a_parameter_is_seen_even_at_an_old_address(name: str, recurrence_: str) -> None:
    torch.manual_seed(0)
    rnn, x = kc.LSTM(36, 48, input_format=LAYER, recurrence=recurrence_).eval(), torch.randn(6, 5, 36)
    parameter = rnn.get_parameter(name)
    theta = parameter.detach().clone()
    for _ in range(20):
        parameter.data = theta + torch.randn_like(theta)
        with torch.no_grad():
            y, _ = rnn(x)
            expected, _ = copy.deepcopy(rnn)(x)
        parameter.data = theta
        assert torch.equal(y, expected)


@both_kernels
def test_what_another_process_may_change_is_not_kept(recurrence_: str) -> None:
    rnn, x = kc.LSTM(36, 48, input_format=LAYER, recurrence=recurrence_).eval(), torch.randn(6, 5, 36)
    rnn.share_memory()
    with torch.no_grad():
        rnn(x)
    assert not held(rnn) and not rnn.weight_ih_l0._kept._held


@pytest.mark.parametrize("shape", [(1, 1, 36), (4, 3, 36)])
def test_transforms_and_tensors_without_data_do_not_meet_the_private_kernel(shape: tuple[int, ...]) -> None:
    rnn, x = kc.LSTM(36, 48, input_format=LAYER).eval(), torch.randn(2, *shape)
    with torch.no_grad():
        expected = torch.stack([rnn(part)[0] for part in x])
        torch.testing.assert_close(torch.vmap(lambda part: rnn(part)[0])(x), expected)
        with FakeTensorMode():
            assert kc.LSTM(36, 48, recurrence="native").eval()(torch.randn(shape))[0].shape == (*shape[:2], 48)


@both_kernels
def test_packed_weights_stay_out_of_copies_files_training_and_gradients(recurrence_: str) -> None:
    rnn = kc.LSTM(36, 48, input_format=LAYER, recurrence=recurrence_).eval()
    x = torch.randn(6, 5, 36)
    with torch.no_grad():
        rnn(x)
    assert held(rnn)
    assert not held(copy.deepcopy(rnn)) and not held(pickle.loads(pickle.dumps(rnn)))
    assert "packed" not in " ".join(rnn.state_dict())
    rnn.train()
    assert not held(rnn)
    rnn.eval()
    with torch.no_grad():
        rnn(x)
    rnn(x)[0].sum().backward()
    assert not held(rnn) and rnn.weight_hh_l0.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("cell", [kc.LSTM, kc.GRU])
def test_inference_gives_the_results_of_training(cell: type[kc.LSTM] | type[kc.GRU], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rnn = cell(36, 48, input_format=LAYER, dtype=dtype).eval()
    for steps, batch in ((1, 1), (6, 1), (6, 40), (1, 1)):
        x = torch.randn(steps, batch, 36, dtype=dtype)
        expected, last = rnn(x)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                y, state = rnn(x)
            torch.testing.assert_close(y, expected)
            torch.testing.assert_close(state, last)
