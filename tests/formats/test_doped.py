"""Doped formats: a structure and a sparse matrix, its places, its counts and its fit."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kronecell as kc
from kronecell.formats import parse_recipe
from kronecell.formats.places import gaps_of, largest_places, places_of, random_places
from kronecell.plans.sparse import Sparse
from tests.cases import drawn
from tests.formats.fitting_cases import COMPRESSED

KT = kc.KT((4, 3), (2, 4), K=2)


def weights(fmt: kc.Format, gates: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (fmt.M, fmt.N) if gates == 1 else (gates, fmt.M, fmt.N)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("block", [1, 2, 4])
@pytest.mark.parametrize("gates", [1, 3])
def test_the_matrix_is_the_structure_s_plus_every_entry_at_its_place(block: int, gates: int) -> None:
    fmt = kc.Doped(KT, 0.2, block)
    factors = drawn(fmt, torch.Generator().manual_seed(0), dtype=torch.float64, gates=gates)
    expected = KT.to_dense(factors, gates=gates).reshape(gates, fmt.M, fmt.N).clone()
    place, values = -1, factors["S"].tolist()
    for gap, entries in zip(factors["S_gaps"].tolist(), values, strict=True):
        place += gap
        for i, entry in enumerate(entries):
            output, x = place // fmt.M * block + i, place % fmt.M
            expected[output // fmt.N, x, output % fmt.N] += entry
    torch.testing.assert_close(fmt.to_dense(factors, gates=gates).reshape(expected.shape), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("structure", COMPRESSED, ids=str)
def test_density_0_is_the_structure_and_density_1_any_matrix(structure: kc.Format) -> None:
    W = weights(structure)
    plain, error = structure.from_dense(W, sweeps=3, starts=0)
    none = kc.Doped(structure, 0)
    factors, same = none.from_dense(W, sweeps=3, starts=0)
    assert same == error and none.num_params == structure.num_params and none.macs() == structure.macs()
    torch.testing.assert_close(none.to_dense(factors), structure.to_dense(plain), rtol=0, atol=0)
    every = kc.Doped(structure, 1)
    factors, error = every.from_dense(W, sweeps=3, starts=0)
    assert error < 1e-12
    torch.testing.assert_close(every.to_dense(factors), W, rtol=0, atol=1e-12)


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("structure", COMPRESSED, ids=str)
def test_more_entries_fit_better_and_the_error_is_the_true_one(structure: kc.Format, block: int) -> None:
    W = weights(structure, seed=1)
    errors = []
    for density in (0, 0.02, 0.1, 0.4):
        fmt = kc.Doped(structure, density, block)
        factors, error = fmt.from_dense(W, sweeps=5, starts=0)
        true = (fmt.to_dense(factors) - W).norm() / W.norm()
        assert error == pytest.approx(float(true), rel=1e-9) == fmt.error(W, factors)
        errors.append(error)
    assert all(after < before for before, after in itertools.pairwise(errors)), errors


def test_a_matrix_that_is_doped_is_found_again() -> None:
    fmt = kc.Doped(kc.LowRank((24,), (16,), r=2), 0.03)
    truth = drawn(fmt, torch.Generator().manual_seed(2), dtype=torch.float64, std=0.1)
    truth["S"] = 5 * truth["S"].sign()
    W = fmt.to_dense(truth)
    factors, error = fmt.from_dense(W)
    assert torch.equal(factors["S_gaps"], truth["S_gaps"]) and error < 0.02
    assert fmt.structure.from_dense(W)[1] > 0.5


def test_gates_share_the_entries_and_the_structure_as_it_says() -> None:
    W = weights(KT, 4)
    for shared in (False, True):
        fmt = kc.Doped(KT, 0.1)
        factors, error = fmt.from_dense(W, gates=4, shared=shared)
        assert factors["S"].shape == (int(0.1 * W.numel()), 1)
        assert error < KT.from_dense(W, gates=4, shared=shared)[1]
        assert error == pytest.approx(fmt.error(W, factors, gates=4, shared=shared))


def test_calibration_inputs_put_the_entries_where_they_matter() -> None:
    W = weights(KT)
    scale = torch.logspace(-1, 1, 12, dtype=torch.float64)
    X = torch.randn(50, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale
    fmt = kc.Doped(KT, 8 / 96)
    factors, plain = fmt.from_dense(W, inputs=X)
    assert plain == pytest.approx(fmt.error(W, factors))
    blind, _ = fmt.from_dense(W)
    assert fmt.error(W, factors, inputs=X) < 0.8 * fmt.error(W, blind, inputs=X)
    assert fmt.error(W, factors, inputs=X) < 0.9 * KT.error(W, KT.from_dense(W, inputs=X)[0], inputs=X)


# Counts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize(("density", "count", "width"), [(0, 0, 4), (0.02, 400, 1), (0.005, 100, 2), (1, 20_000, 1)])
def test_values_indices_and_multiply_adds_are_counted_exactly(
    density: float, count: int, width: int, block: int
) -> None:
    fmt = kc.Doped(kc.LowRank((200,), (100,), r=3), density, block)
    cost, plain = kc.count(fmt), kc.count(fmt.structure)
    factors = fmt.init(torch.Generator().manual_seed(0))
    assert (
        cost.params
        == plain.params + count
        == fmt.num_params
        == sum(t.numel() for n, t in factors.items() if n != "S_gaps")
    )
    assert cost.macs == plain.macs + count == fmt.macs() and cost.dense_params == plain.dense_params
    assert cost.index_bytes == count // block * width == factors["S_gaps"].numel() * factors["S_gaps"].element_size()
    assert fmt.compression_ratio == pytest.approx(20_000 / fmt.num_params)
    layer = kc.TensorLinear(fmt, bias=False)
    assert kc.count(layer).params == cost.params and kc.count(layer).index_bytes == cost.index_bytes
    assert sum(p.numel() for p in layer.parameters()) == cost.params


# Places --------------------------------------------------------------------------------------------------------------

SIZES = st.builds(
    lambda outputs, inputs, share: Sparse.of(outputs, inputs, share),
    st.integers(1, 60),
    st.integers(1, 400),
    st.sampled_from([0.0, 0.0004, 0.002, 0.011, 0.02, 0.3, 1.0]),
)


@settings(max_examples=200)
@given(SIZES, st.integers(0, 1000), st.booleans())
def test_places_are_as_many_as_there_are_entries_and_their_gaps_can_be_said(
    sparse: Sparse, seed: int, clustered: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(sparse.places, generator=generator)
    if clustered:  # nearly all large ones at both ends
        sizes[: sparse.places // 50] += 10
        sizes[-(sparse.places // 50 + 1) :] += 5
    for places in (random_places(sparse, generator), largest_places(sizes, sparse)):
        assert len(places) == sparse.count and torch.equal(places, places.unique())
        gaps = gaps_of(places, sparse)
        assert gaps.element_size() == sparse.gap_bytes
        assert torch.equal(places_of(gaps, sparse), places)


@settings(max_examples=100)
@given(SIZES, st.integers(0, 1000))
def test_the_largest_are_kept_where_indices_reach(sparse: Sparse, seed: int) -> None:
    sizes = torch.rand(sparse.places, generator=torch.Generator().manual_seed(seed))
    best = sizes.topk(sparse.count).indices.sort().values
    gaps = best.diff(prepend=torch.tensor([-1]))
    if not sparse.count or int(gaps.max()) <= sparse.longest_gap:
        assert torch.equal(largest_places(sizes, sparse), best)


def test_indices_that_lead_out_of_the_matrix_are_refused() -> None:
    sparse = Sparse.of(4, 6, 0.2)
    for gaps in ([1, 1, 1, 40], [3, 0, 1, 1]):
        with pytest.raises(kc.ShapeError, match=r"lead out of it: expected gaps of 1 or more .* at most 24"):
            places_of(torch.tensor(gaps, dtype=torch.uint8), sparse)


# Text ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["doped:0.02+kcp:K=4,CA=4,CB=2", "doped:0.5,block=16+tt:r=3", "doped:0.0+dense"])
def test_recipes_round_trip_and_take_modes(text: str) -> None:
    recipe = parse_recipe(text)
    assert str(recipe) == text and parse_recipe(str(recipe)) == recipe
    rnn = kc.LSTM(64, 64, input_format=text, hidden_format=text)
    (fmt,) = rnn.input_formats
    assert isinstance(fmt, kc.Doped) and kc.parse(str(fmt)) == fmt and str(fmt).startswith(text.partition("+")[0])


WRONG = [
    (lambda: kc.Doped("tt:r=4"), kc.ShapeError, "the structure must be one of the other formats.*got str"),
    (lambda: kc.Doped(kc.Doped(KT)), kc.ShapeError, "one of the other formats.*got Doped"),
    (lambda: kc.Doped(KT, 1.5), kc.RankError, "a share of the entries from 0 to 1, got 1.5"),
    (lambda: kc.Doped(KT, True), kc.RankError, "from 0 to 1, got True"),
    (lambda: kc.Doped(KT, 0.1, 0), kc.RankError, "positive number of outputs, got 0"),
    (lambda: kc.Doped(KT, 0.1, 3), kc.RankError, "block = 3 must divide the outputs, N = 8"),
    (lambda: kc.parse("doped:0.1"), kc.ShapeError, r"expected a density and one structure, e.g. doped:0.02\+tt:m="),
    (lambda: kc.parse("doped:x+kt:m=4,n=4,K=1"), kc.RankError, "expected doped:DENSITY or.*such as doped:0.02"),
    (lambda: kc.parse("doped:0.1,size=2+kt:m=4,n=4,K=1"), kc.RankError, "expected doped:DENSITY or"),
    (lambda: kc.parse("doped:0.1+doped:0.1+kt:m=4,n=4,K=1"), kc.ShapeError, "one structure"),
    (lambda: kc.parse("doped:0.1+xyz:m=4,n=4"), kc.ShapeError, "unknown format 'xyz'"),
    (lambda: kc.Doped(KT).matmul(torch.zeros(2, 12), KT.init()), kc.ShapeError, "factor 'S' of doped.*shape.*None"),
    (lambda: kc.Doped(KT).plan("sideways"), kc.PlanError, "no order 'sideways'"),
]


@pytest.mark.parametrize(("call", "error", "words"), WRONG)
def test_mistakes_are_named(call: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()  # type: ignore[operator]
