"""What a recurrent layer accepts is what torch.nn's accepts, and what it refuses is a ShapeError that says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import kronecell as kc
from tests.nn.recurrent_cases import flat

Make = Callable[[Callable[[Tensor], Any]], tuple[Any, Any]]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def packed(width: int = 12, dtype: torch.dtype = torch.float32) -> PackedSequence:
    return pack_sequence([zeros(3, width, dtype=dtype), zeros(2, width, dtype=dtype)])


# (x, hx) for a layer of 12 inputs and 4 outputs; `s` makes a state of that cell from one part.
INPUTS: dict[str, Make] = {
    "float64": lambda s: (zeros(4, 3, 12, dtype=torch.float64), None),
    "bfloat16": lambda s: (zeros(4, 3, 12, dtype=torch.bfloat16), None),
    "integers": lambda s: (zeros(4, 3, 12, dtype=torch.int64), None),
    "booleans": lambda s: (zeros(4, 3, 12, dtype=torch.bool), None),
    "complex numbers": lambda s: (zeros(4, 3, 12, dtype=torch.complex64), None),
    "another width": lambda s: (zeros(4, 3, 11), None),
    "one axis": lambda s: (zeros(12), None),
    "four axes": lambda s: (zeros(1, 4, 3, 12), None),
    "a list": lambda s: ([1.0], None),
    "nothing": lambda s: (None, None),
    "no steps": lambda s: (zeros(0, 3, 12), None),
    "no rows": lambda s: (zeros(4, 0, 12), None),
    "unbatched without steps": lambda s: (zeros(0, 12), None),
    "packed": lambda s: (packed(), None),
    "packed float64": lambda s: (packed(dtype=torch.float64), None),
    "packed of another width": lambda s: (packed(11), None),
    "state": lambda s: (zeros(4, 3, 12), s(zeros(1, 3, 4))),
    "state of float64": lambda s: (zeros(4, 3, 12), s(zeros(1, 3, 4, dtype=torch.float64))),
    "state of bfloat16": lambda s: (zeros(4, 3, 12), s(zeros(1, 3, 4, dtype=torch.bfloat16))),
    "state of integers": lambda s: (zeros(4, 3, 12), s(zeros(1, 3, 4, dtype=torch.int64))),
    "state of other rows": lambda s: (zeros(4, 3, 12), s(zeros(1, 2, 4))),
    "state of other layers": lambda s: (zeros(4, 3, 12), s(zeros(2, 3, 4))),
    "state of another size": lambda s: (zeros(4, 3, 12), s(zeros(1, 3, 5))),
    "state without a batch": lambda s: (zeros(4, 3, 12), s(zeros(1, 4))),
    "unbatched, state with a batch": lambda s: (zeros(4, 12), s(zeros(1, 1, 4))),
    "unbatched": lambda s: (zeros(4, 12), s(zeros(1, 4))),
    "packed with a state of other rows": lambda s: (packed(), s(zeros(1, 3, 4))),
    "expanded state": lambda s: (zeros(4, 3, 12), s(zeros(1, 1, 4).expand(1, 3, 4))),
    "a list as state": lambda s: (zeros(4, 3, 12), [zeros(1, 3, 4)] * (2 if isinstance(s(zeros(1)), tuple) else 1)),
    "one tensor as state": lambda s: (zeros(4, 3, 12), zeros(1, 3, 4)),
    "one tensor of two as state": lambda s: (zeros(4, 3, 12), zeros(2, 1, 3, 4)),
    "a tuple of one as state": lambda s: (zeros(4, 3, 12), (zeros(1, 3, 4),)),
    "a pair as state": lambda s: (zeros(4, 3, 12), (zeros(1, 3, 4), zeros(1, 3, 4))),
    "three as state": lambda s: (zeros(4, 3, 12), (zeros(1, 3, 4),) * 3),
    "c of another dtype": lambda s: (zeros(4, 3, 12), (zeros(1, 3, 4), zeros(1, 3, 4, dtype=torch.float64))),
    "c missing": lambda s: (zeros(4, 3, 12), (zeros(1, 3, 4), None)),
    "numbers as state": lambda s: (zeros(4, 3, 12), (0, 0)),
    "text as state": lambda s: (zeros(4, 3, 12), "zero"),
}  # fmt: skip


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("recipe", [None, "tt:r=2", "kcp:K=2,CA=2,CB=2"])
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_what_torch_refuses_is_refused_and_what_it_takes_is_taken(cell: str, recipe: str | None, grad: bool) -> None:
    ours, theirs = getattr(kc, cell)(12, 4, input_format=recipe), getattr(nn, cell)(12, 4)

    def state(part: Tensor) -> Any:
        return (part, part) if cell == "LSTM" else part

    taken = 0
    for name, make in INPUTS.items():
        x, hx = make(state)
        with torch.set_grad_enabled(grad):
            try:
                expected = flat(theirs(x, hx))
            except Exception:  # torch has many classes for this
                with pytest.raises(kc.ShapeError):
                    ours(x, hx)
                continue
            got = flat(ours(x, hx))
        taken += 1
        assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in expected], name
    assert taken >= 5


@pytest.mark.parametrize("cell", [kc.LSTM, kc.GRU])
@pytest.mark.parametrize("recipe", [None, "kcp:K=2,CA=2,CB=2", "tt:r=2", "lowrank:r=2"])
@pytest.mark.parametrize("entry", ["batch first", "time first", "packed", "unbatched"])
def test_bytes_are_numbers_from_0_to_1(cell: type, recipe: str | None, entry: str) -> None:
    torch.manual_seed(0)
    rnn = cell(12, 4, 2, batch_first=entry == "batch first", input_format=recipe, dtype=torch.float64)
    whole = torch.randint(0, 256, (3, 5, 12), dtype=torch.uint8)
    numbers = whole.double() / 255
    x, same = (
        (pack_sequence([*whole]), pack_sequence([*numbers])) if entry == "packed"
        else (whole[0], numbers[0]) if entry == "unbatched" else (whole, numbers)
    )  # fmt: skip
    got, want = flat(rnn(x)), flat(rnn(same))
    parameters = [*rnn.parameters()]
    got += torch.autograd.grad(got[0].square().sum(), parameters)
    want += torch.autograd.grad(want[0].square().sum(), parameters)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_a_linear_layer_refuses_what_does_not_fit() -> None:
    layer = kc.TensorLinear("tt:m=2x3,n=2x2,r=2")
    for x in (zeros(3, 7), zeros(), zeros(3, 6, dtype=torch.float64), zeros(3, 6, dtype=torch.int32), [1.0] * 6):
        with pytest.raises(kc.ShapeError):
            layer(x)
    with pytest.raises(kc.ShapeError, match="bias"):
        layer(zeros(3, 6), zeros(5))
    for shape in ((0, 6), (6,), (1, 6), (2, 0, 6), (2, 3, 4, 6)):
        assert layer(zeros(*shape)).shape == (*shape[:-1], 4)
