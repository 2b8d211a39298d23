"""kc.quantize: every layer over its integers is the layer over the floats that they stand for; bad input is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronecell as kc
from kronecell.errors import KronecellError, PlanError, ShapeError
from kronecell.nn.quantize import dequantize, is_quantized

CP = "cp:m=6x8,n=8x4,r=9"
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(37, 29),
    "linear without bias": lambda: nn.Linear(64, 32, bias=False),
    "torch's lstm": lambda: nn.LSTM(33, 21, 2, bidirectional=True, batch_first=True),
    "torch's gru": lambda: nn.GRU(40, 35, 2),
    "torch's lstm with projections": lambda: nn.LSTM(24, 30, proj_size=18),
    "lstm": lambda: kc.LSTM(48, 32, input_format=CP, hidden_format="lowrank:r=12"),
    "gru": lambda: kc.GRU(48, 32, input_format="kcp:K=2,CA=8,CB=8", hidden_format="tt:r=6"),
    "shared": lambda: kc.LSTM(48, 32, input_format=CP, shared=True),
    "tensor linear": lambda: kc.TensorLinear("tt:m=16x20,n=8x16,r=6", gates=2),
    "lstm cell": lambda: nn.LSTMCell(40, 33),
    "gru cell": lambda: kc.GRUCell(40, 33, hidden_format="lowrank:r=20"),
    "inside": lambda: nn.Sequential(nn.Linear(33, 40), nn.ReLU(), nn.Linear(40, 8), nn.LayerNorm(8)),
}


def made(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name]().to(dtype)


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def example(module: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    width = next(
        (
            getattr(part, name)
            for part in module.modules()
            for name in ("input_size", "in_features")
            if hasattr(part, name)
        ),
        320,
    )
    shape = (5, width) if isinstance(module, (nn.RNNCellBase, kc.GRUCell, kc.LSTMCell)) else (4, 5, width)
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("name", [*LAYERS])
def test_integers_compute_what_their_floats_do(name: str, bits: int) -> None:
    for group in (None, "row", 5, 16):
        module = made(name)
        small = kc.quantize(module, bits=bits, group=group)
        x = example(module)
        want = first(dequantize(small).double()(x.double()))
        got = first(small(x))
        assert (got.double() - want).abs().max() <= 1e-5 * max(want.abs().max().item(), 1)
        assert is_quantized(small) and not is_quantized(module) and not small.training
        for matrix in small.quantization.matrices:
            # Half a step of the scale that cuts nothing off, for numbers of a normal distribution.
            assert 0 <= matrix.error <= 4 * 2.0**-bits
            assert matrix.bytes_after < matrix.bytes_before


@pytest.mark.parametrize("name", [*LAYERS])
def test_float64_is_computed_in_float64(name: str) -> None:
    small = kc.quantize(made(name, torch.float64), bits=6)
    x = example(small, torch.float64)
    torch.testing.assert_close(first(small(x)), first(dequantize(small)(x)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [*LAYERS])
def test_copies_files_and_state_dicts_have_the_same_bits(name: str, tmp_path: Path) -> None:
    small = kc.quantize(made(name), bits=5)
    x = example(small)
    want = first(small(x))
    assert torch.equal(first(copy.deepcopy(small)(x)), want)
    assert torch.equal(first(pickle.loads(pickle.dumps(small))(x)), want)
    other = kc.quantize(nn.Sequential(*[made(name)]).apply(_shifted)[0], bits=5, group=None)
    if {n: t.shape for n, t in other.state_dict().items()} == {n: t.shape for n, t in small.state_dict().items()}:
        other.load_state_dict(small.state_dict())
        assert torch.equal(first(other(x)), want)
    kc.save(small, tmp_path / "small")
    ours = type(small).__module__.startswith("kronecell") and hasattr(small, "integers") is False
    loaded = kc.load(tmp_path / "small") if ours else kc.load(tmp_path / "small", into=made(name))
    assert torch.equal(first(loaded(x)), want)


def _shifted(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.add_(0.01)


@pytest.mark.parametrize("name", [*LAYERS])
def test_integers_are_counted_as_the_weights_that_they_stand_for(name: str) -> None:
    module = made(name)
    plain, small = kc.count(module), kc.count(kc.quantize(module))
    assert (small.params, small.dense_params, small.dense_macs) == (plain.params, plain.dense_params, plain.dense_macs)
    assert small.macs <= plain.dense_macs


def test_weights_that_are_whole_multiples_are_exact() -> None:
    for bits in (3, 4, 5, 6, 7, 8):
        half = 2 ** (bits - 1)
        linear = nn.Linear(400, 20)
        with torch.no_grad():
            linear.weight.copy_(torch.randint(-half, half, (20, 400)) * torch.rand(20, 1))
        assert kc.quantize(linear, bits=bits, group="row").quantization.matrices[0].error < 1e-6


def test_rows_of_zeros_and_of_any_size_are_rounded_as_well() -> None:
    linear = nn.Linear(40, 6)
    sizes = torch.tensor([0.0, 1e-42, 1e-30, 1.0, 1e30, 3e38])
    with torch.no_grad():
        linear.weight.copy_(sizes[:, None] * torch.rand(6, 40).clamp(0.1, 1))
    weight = kc.quantize(linear).weight
    assert weight.isfinite().all() and not weight[0].any()
    for row in (2, 3, 4, 5):
        torch.testing.assert_close(weight[row] / sizes[row], linear.weight[row] / sizes[row], rtol=0, atol=0.01)


def test_a_group_of_more_columns_than_there_are_is_a_row() -> None:
    """It would be filled up to that many columns otherwise."""
    linear = made("linear")
    row = kc.quantize(linear, group="row")
    for group in (37, 38, 10**7, 2**40, 2**62):
        assert torch.equal(kc.quantize(linear, group=group).weight, row.weight)


BAD: dict[str, tuple[Callable[[], Any], type[KronecellError], str]] = {
    "not a module": (lambda: kc.quantize(torch.ones(3)), ShapeError, "torch module"),
    "bits 2": (lambda: kc.quantize(made("linear"), 2), ShapeError, "3 to 8"),
    "bits 9": (lambda: kc.quantize(made("linear"), 9), ShapeError, "3 to 8"),
    "bits 8.0": (lambda: kc.quantize(made("linear"), 8.0), ShapeError, "3 to 8"),  # type: ignore[arg-type]
    "bits nan": (lambda: kc.quantize(made("linear"), float("nan")), ShapeError, "3 to 8"),  # type: ignore[arg-type]
    "bits a text": (lambda: kc.quantize(made("linear"), "8"), ShapeError, "3 to 8"),  # type: ignore[arg-type]
    "bits a truth": (lambda: kc.quantize(made("linear"), True), ShapeError, "3 to 8"),
    "group 0": (lambda: kc.quantize(made("linear"), group=0), ShapeError, "group must be"),
    "group -1": (lambda: kc.quantize(made("linear"), group=-1), ShapeError, "group must be"),
    "group 1.5": (lambda: kc.quantize(made("linear"), group=1.5), ShapeError, "group must be"),  # type: ignore[arg-type]
    "group a word": (lambda: kc.quantize(made("linear"), group="all"), ShapeError, "group must be"),
    "half": (lambda: kc.quantize(made("linear", torch.float16)), ShapeError, "float16"),
    "twice": (lambda: kc.quantize(kc.quantize(made("linear"))), PlanError, "already"),
    "to train": (lambda: kc.quantize(made("linear")).train(), PlanError, "does not train"),
    "a narrow input": (lambda: kc.quantize(made("linear"))(torch.ones(3, 36)), ShapeError, "expected"),
    "no shapes": (lambda: kc.quantize(made("linear").to("meta")), ShapeError, "meta"),
    "nan": (lambda: kc.quantize(_with(float("nan"))), ShapeError, "not finite"),
    "inf": (lambda: kc.quantize(_with(float("inf"))), ShapeError, "not finite"),
}


def _with(number: float) -> nn.Module:
    rnn = made("lstm")
    factor = next(parameter for parameter in rnn.parameters() if parameter.numel() > 256)
    with torch.no_grad():
        factor.view(-1)[7] = number
    return rnn


@pytest.mark.parametrize("name", [*BAD])
def test_what_cannot_be_is_one_line(name: str) -> None:
    run, kind, words = BAD[name]
    with pytest.raises(kind, match=words) as caught:
        run()
    assert "\n" not in str(caught.value)
