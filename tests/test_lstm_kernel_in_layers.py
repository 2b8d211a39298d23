"""The compiled recurrence in layers: where it is used, what else must go on as before, and life without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import kronecell as kc
from kronecell.ops import compiled, lstm_kernel
from tests.lstm_cases import assert_rounded, combination, used
from tests.test_compiled import counted

LAYER = "kcp:m=4x3x3,n=4x4x3,K=2,CA=2,CB=2"  # 36 -> 48


RECURRENCE = ("lstm_pack", "lstm_forward", "lstm_backward")

MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "layers and directions": {"num_layers": 2, "bidirectional": True},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "dropout": {"num_layers": 2, "dropout": 0.4},
}


def ours_and_torchs(options: dict[str, Any], input_size: int = 11, hidden: int = 21) -> tuple[kc.LSTM, nn.LSTM]:
    torch.manual_seed(0)
    theirs = nn.LSTM(input_size, hidden, **options)
    return kc.LSTM.from_dense(theirs), theirs


@used
@pytest.mark.parametrize("given_state", [False, True])
@pytest.mark.parametrize("options", MODULES)
def test_a_layer_is_torchs_in_training_and_eval(
    monkeypatch: pytest.MonkeyPatch, options: str, given_state: bool
) -> None:
    ours, theirs = ours_and_torchs(MODULES[options])
    x = torch.randn(5, 3, 11, requires_grad=True)
    batch = 5 if ours.batch_first else 3
    count = ours.num_layers * ours.directions
    hx = tuple(torch.randn(count, batch, 21) for _ in range(2)) if given_state else None
    for training in (True, False):
        results, gradients = [], []
        with counted(monkeypatch, RECURRENCE) as calls:
            for module in (ours, theirs):
                torch.manual_seed(7)  # for dropout
                output, state = module.train(training)(x, hx)
                results.append((output, *state))
                gradients.append(torch.autograd.grad(combination(results[-1]), [x, *module.parameters()]))
        assert calls.count("lstm_forward") == calls.count("lstm_backward") == count
        for got, want in (results, gradients):
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), counted(monkeypatch, RECURRENCE) as calls:
            for a, b in zip(ours(x, hx)[1], theirs(x, hx)[1], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert calls.count("lstm_forward") == count


FORMATS: dict[str, tuple[dict[str, Any], int]] = {
    "a format that splits": ({"input_format": LAYER}, 48),
    "a format that does not": ({"input_format": "tt:r=2"}, 48),
    "a format that does not, beyond the identity": ({"input_format": "tt:r=2"}, 96),
    "compressed U": ({"input_format": LAYER, "hidden_format": "kcp:m=4x4x3,n=4x4x3,K=2,CA=2,CB=2"}, 48),
    "compressed, no bias, both directions": ({"input_format": LAYER, "bias": False, "bidirectional": True}, 48),
    "batch first": ({"input_format": LAYER, "batch_first": True}, 48),
}


@used
@pytest.mark.parametrize("case", FORMATS)
def test_a_compressed_layer_agrees_with_double_precision(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    options, hidden = FORMATS[case]
    torch.manual_seed(0)
    rnn = kc.LSTM(36, hidden, **options)
    exact = kc.LSTM(36, hidden, **options).double()
    exact.load_state_dict(rnn.state_dict())
    x = torch.randn(4, 5, 36)
    with counted(monkeypatch, RECURRENCE) as calls:
        output, state = rnn(x)
        gradients = torch.autograd.grad(combination((output, *state)), [*rnn.parameters()])
        assert calls == ["lstm_pack", "lstm_forward"] * rnn.directions + ["lstm_pack", "lstm_backward"] * rnn.directions
        want, want_state = exact(x.double())
        assert len(calls) == 4 * rnn.directions
    wanted = torch.autograd.grad(combination((want, *want_state)), [*exact.parameters()])
    assert_rounded((output, *state), (want, *want_state), 20)
    assert_rounded(gradients, wanted, 20)


@used
def test_bytes_are_read_as_numbers() -> None:
    rnn = kc.LSTM(36, 48, input_format=LAYER).eval()
    x = torch.randint(0, 256, (4, 5, 36), dtype=torch.uint8)
    with torch.no_grad():
        torch.testing.assert_close(rnn(x)[0], rnn(x.float() / 255)[0])


@used
def test_u_is_packed_once_in_eval_mode_and_again_after_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def bump() -> None:
        optimiser = torch.optim.SGD(rnn.parameters(), lr=0.01)
        with torch.enable_grad():
            rnn(x)[0].sum().backward()
        optimiser.step()

    rnn, x = kc.LSTM(36, 48, input_format=LAYER).eval(), torch.randn(6, 5, 36)
    changes: list[Callable[[], object]] = [
        lambda: rnn.weight_hh_l0.mul_(2),
        lambda: rnn.load_state_dict({name: 0.7 * value for name, value in rnn.state_dict().items()}),
        lambda: setattr(rnn, "weight_hh_l0", nn.Parameter(-rnn.weight_hh_l0)),
        lambda: (rnn.weight_hh_l0.data.mul_(0.5), rnn.flatten_parameters()),
        lambda: (rnn.weight_hh_l0.data.mul_(2), rnn.train(), rnn.eval()),
        bump,
    ]
    with torch.no_grad():
        before = rnn(x)[0]
        for change in changes:
            change()
            with counted(monkeypatch, RECURRENCE) as calls:
                after, again = rnn(x)[0], rnn(x)[0]
            assert calls == ["lstm_pack", "lstm_forward", "lstm_forward"]
            assert torch.equal(after, again) and not torch.equal(after, before)
            torch.testing.assert_close(after, rnn.to_dense()(x)[0])
            before = after


@used
def test_nothing_is_kept_of_a_shared_matrix_in_training_or_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    rnn, x = kc.LSTM(36, 48, input_format=LAYER).eval(), torch.randn(6, 5, 36)
    with torch.no_grad():
        rnn(x)
    assert rnn._kept["_l0"]._held
    rnn(x)
    assert not rnn._kept["_l0"]._held
    with torch.no_grad():
        rnn.train()(x)
        assert not rnn._kept["_l0"]._held
        rnn.eval().share_memory()(x)
    assert not rnn._kept["_l0"]._held


@used
def test_frozen_parameters_get_no_gradient_and_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = ours_and_torchs({})
    x = torch.randn(5, 3, 11)
    for module in (ours, theirs):
        module.weight_hh_l0.requires_grad_(False)
        module.bias_hh_l0.requires_grad_(False)
        module(x)[0].square().sum().backward()
        assert module.weight_hh_l0.grad is None and module.bias_hh_l0.grad is None
    torch.testing.assert_close(ours.weight_ih_l0.grad, theirs.weight_ih_l0.grad, rtol=1e-5, atol=1e-5)
    ours.requires_grad_(False)
    with counted(monkeypatch, RECURRENCE) as calls:
        assert not ours(x)[0].requires_grad
    assert calls == ["lstm_pack", "lstm_forward"]


@used
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_it(reentrant: bool) -> None:
    rnn, x = kc.LSTM(36, 48, input_format=LAYER), torch.randn(6, 5, 36, requires_grad=True)
    want = torch.autograd.grad(rnn(x)[0].square().sum(), [x, *rnn.parameters()])
    y = checkpoint(lambda x: rnn(x)[0], x, use_reentrant=reentrant)
    y.square().sum().backward()
    # A reentrant checkpoint runs the forward without gradients, for which x W may be made in another order.
    limit = 1e-5 if reentrant else 0.0
    for g, w in zip([x.grad, *(p.grad for p in rnn.parameters())], want, strict=True):
        assert g is not None and (g - w).norm() <= limit * w.norm()


def _twice(rnn: kc.LSTM, x: Tensor) -> Tensor:
    return torch.vmap(lambda part: rnn(part)[0])(torch.stack([x, x]))[0]


def _autocast(rnn: kc.LSTM, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return rnn(x)[0]


def _counting(rnn: kc.LSTM, x: Tensor) -> Tensor:
    with FlopCounterMode(display=False):
        return rnn(x)[0]


def _forward_mode(rnn: kc.LSTM, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(rnn(x)[0]).primal


class Marked(Tensor):
    """A subclass, of which torch follows every operation."""


ELSEWHERE: dict[str, tuple[Callable[[kc.LSTM, Tensor], Tensor], dict[str, Any]]] = {
    "vmap": (_twice, {}),
    "autocast": (_autocast, {}),
    "a counter of operations": (_counting, {}),
    "forward mode": (_forward_mode, {}),
    "a subclass": (lambda rnn, x: rnn(x.as_subclass(Marked))[0].as_subclass(Tensor), {}),
    "double precision": (lambda rnn, x: rnn.double()(x.double())[0].float(), {}),
    "sequences of several lengths": (lambda rnn, x: rnn(pack_sequence([*x.unbind(1)]))[0].data.view(4, 5, -1), {}),
    "native": (lambda rnn, x: rnn(x)[0], {"recurrence": "native"}),
    "loop": (lambda rnn, x: rnn(x)[0], {"recurrence": "loop"}),
    "projection": (lambda rnn, x: rnn(x)[0], {"proj_size": 7}),
}


@used
@pytest.mark.parametrize("case", ELSEWHERE)
def test_elsewhere_the_other_ways_are_taken(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    call, options = ELSEWHERE[case]
    torch.manual_seed(0)
    rnn, x = kc.LSTM(36, 48, input_format=LAYER, **options), torch.randn(4, 5, 36)
    want = kc.LSTM(36, 48, input_format=LAYER, **options | {"recurrence": "loop"})
    want.load_state_dict(rnn.state_dict())
    expected = want(x)[0]
    with counted(monkeypatch, RECURRENCE) as calls:
        got = call(rnn, x)
    assert calls == []
    tolerance = 0.02 if case == "autocast" else 1e-5
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)


@used
def test_a_matrix_that_is_a_subclass_is_multiplied_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    rnn, x = kc.LSTM(36, 48, input_format=LAYER), torch.randn(4, 5, 36)
    want = rnn(x)[0]
    marked = rnn.weight_hh_l0.detach().as_subclass(Marked)
    with counted(monkeypatch, RECURRENCE) as calls:
        got = torch.func.functional_call(rnn, {"weight_hh_l0": marked}, (x,))[0]
    assert calls == []
    torch.testing.assert_close(got.as_subclass(Tensor), want)


@used
@pytest.mark.parametrize(
    ("batch", "hidden", "threads", "expected"),
    [(1, 1024, 1, True), (1, 1024, 2, False), (7, 512, 2, False), (8, 512, 2, True), (1, 511, 2, True)],
)
def test_a_large_matrix_for_few_rows_is_left_to_a_kernel_that_divides_it_among_threads(
    monkeypatch: pytest.MonkeyPatch, batch: int, hidden: int, threads: int, expected: bool
) -> None:
    rnn, x = kc.LSTM(3, hidden).eval(), torch.randn(1, batch, 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(lstm_kernel, "_threads", lambda *sizes: 1)
    for mode, always in ((torch.no_grad, False), (torch.enable_grad, True)):
        with mode(), counted(monkeypatch, RECURRENCE) as calls:
            rnn(x)
        assert ("lstm_forward" in calls) is (expected or always)


@used
def test_an_empty_batch_is_an_empty_result() -> None:
    rnn = kc.LSTM(36, 48)
    output, (h, c) = rnn(torch.randn(4, 0, 36))
    assert (output.shape, h.shape, c.shape) == ((4, 0, 48), (1, 0, 48), (1, 0, 48))
    output.sum().backward()
    assert rnn.weight_hh_l0.grad is not None and rnn.weight_hh_l0.grad.eq(0).all()


@used
def test_the_choice_is_printed() -> None:
    assert "recurrence compiled, else native" in repr(kc.LSTM(36, 48, input_format=LAYER))
    assert "recurrence compiled, else loop" in repr(kc.LSTM(36, 96, input_format="tt:r=2"))
    assert "recurrence native" in repr(kc.LSTM(36, 48, input_format=LAYER, recurrence="native"))
    assert "recurrence loop, U kept factored" in repr(kc.LSTM(36, 400, hidden_format="lowrank:r=2"))
    assert "recurrence native" in repr(kc.GRU(36, 48, input_format=LAYER))


# Without it ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FORMATS)
def test_without_it_the_values_are_the_same(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    options, hidden = FORMATS[case]
    torch.manual_seed(0)
    rnn, x = kc.LSTM(36, hidden, **options), torch.randn(4, 5, 36)
    both: list[list[Tensor]] = []
    for _ in range(2):
        output, state = rnn.train()(x)
        gradients = torch.autograd.grad(output.square().sum(), [*rnn.parameters()])
        with torch.no_grad():
            both.append([output, *state, *gradients, rnn.eval()(x)[0]])
        monkeypatch.setattr(compiled, "library", None)
        assert "compiled" not in repr(rnn)
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
