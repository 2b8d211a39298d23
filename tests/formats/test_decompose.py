"""from_dense: exact at full rank, optimal where a bound is known, monotone, deterministic, input checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import kronecell as kc
from tests.formats.fitting_cases import COMPRESSED, M3, M4, N3, N4


def drawn(rows: int, columns: int, seed: int = 0, decay: float = 0.0) -> Tensor:
    """A random matrix; with decay its singular values fall like those of trained weights."""
    generator = torch.Generator().manual_seed(1000 + seed)
    W = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    if decay:
        U, S, Vh = torch.linalg.svd(W, full_matrices=False)
        W = (U * S * torch.arange(1, len(S) + 1, dtype=torch.float64) ** -decay) @ Vh
    return W


FULL_RANK = [
    kc.Dense(M3, N3),
    kc.LowRank(M3, N3, r=24),
    kc.KT(M3, N3, K=24),
    kc.TT(M3, N3, r=(12, 16)),
    kc.TT(M4, N4, r=(8, 72, 9)),
    kc.TT((6,), (4,), r=()),
    kc.TR((4, 5), (3, 2), r=(1, 4, 6, 2)),
    kc.TR((4, 3), (3, 4), r=(2, 4, 12, 4)),
    kc.TR((8, 3), (3, 4), r=(2, 4, 12, 8)),
    kc.Tucker(M3, N3, r=(12, 10, 16)),
    kc.HT(M3, N3, r=(12, 10, 16, 16)),
    kc.HT(M4, N4, r=(8, 9, 8, 9, 72, 72)),
    kc.HT((2, 3, 2, 2, 3), (2, 2, 3, 2, 2), r=100, clip=True),
    kc.KCP((4, 5), (3, 2), K=6, CA=4, CB=2),
    kc.KCP((4, 5), (3, 2), K=6, CA=4, CB=2, tie="all"),
    kc.KCP((3, 2, 4), (2, 2, 2), K=8, CA=6, CB=4, tie="all"),
    kc.CP((4, 5), (3, 2), r=10),
]  # tie="pair" beyond two modes is a Kronecker product: no rank makes it represent every matrix


@pytest.mark.parametrize("fmt", FULL_RANK, ids=str)
def test_full_rank_reproduces_any_matrix(fmt: kc.Format) -> None:
    W = drawn(fmt.M, fmt.N)
    factors, error = fmt.from_dense(W)
    assert error < 1e-10
    assert torch.linalg.norm(fmt.to_dense(factors) - W) / torch.linalg.norm(W) < 1e-10


@pytest.mark.parametrize("fmt", COMPRESSED, ids=str)
def test_refinement_never_increases_the_error_and_the_error_is_the_true_one(fmt: kc.Format) -> None:
    W = drawn(fmt.M, fmt.N, decay=0.5)
    start, start_error = fmt.from_dense(W, refine=False)
    errors = [start_error]
    for sweeps in (1, 3, 20):
        factors, error = fmt.from_dense(W, sweeps=sweeps, starts=0)
        true = float(torch.linalg.norm(fmt.to_dense(factors) - W) / torch.linalg.norm(W))
        assert error == pytest.approx(true, rel=1e-9)
        errors.append(error)
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(errors)), errors
    assert start_error == pytest.approx(fmt.error(W, start), rel=1e-12)


@pytest.mark.parametrize("fmt", [*COMPRESSED, kc.TR((8, 5), (8, 16), r=8)], ids=str)
def test_factors_of_a_fit_do_not_cancel_each_other(fmt: kc.Format) -> None:
    """A small relative change of a factor is no large one of the matrix: what is fitted can be trained and rounded."""
    W = drawn(fmt.M, fmt.N, decay=0.5)
    factors = {name: tensor.requires_grad_() for name, tensor in fmt.from_dense(W)[0].items()}
    dense = fmt.to_dense(factors)
    upstream = drawn(fmt.M, fmt.N, seed=1)
    dense.backward(upstream)
    reach = [torch.linalg.norm(tensor.grad) * torch.linalg.norm(tensor) for tensor in factors.values()]  # type: ignore[arg-type]
    assert max(reach) < 3 * torch.linalg.norm(upstream) * torch.linalg.norm(dense)


@pytest.mark.parametrize("fmt", COMPRESSED, ids=str)
def test_every_sweep_lowers_the_error(fmt: kc.Format) -> None:
    seen: list[float] = []
    fmt.from_dense(
        drawn(fmt.M, fmt.N, decay=0.5), starts=0, sweeps=8, progress=lambda line: seen.append(float(line.split()[-1]))
    )
    assert fmt.optimal_start == (not seen)
    assert all(after <= before + 1e-6 for before, after in pairwise(seen)), seen  # six digits shown


RANKS: list[tuple[str, Callable[[int], kc.Format]]] = [
    ("lowrank", lambda r: kc.LowRank(M3, N3, r=r)),
    ("kt", lambda r: kc.KT(M3, N3, K=r)),
    ("tt", lambda r: kc.TT(M3, N3, r=r)),
    ("tt second rank", lambda r: kc.TT(M3, N3, r=(3, r))),
    ("tr", lambda r: kc.TR(M3, N3, r=r)),
    ("tr first rank", lambda r: kc.TR(M3, N3, r=(r, 2, 2, 2, 2, 2))),
    ("tucker", lambda r: kc.Tucker(M3, N3, r=r)),
    ("tucker last rank", lambda r: kc.Tucker(M3, N3, r=(3, 3, r))),
    ("cp", lambda r: kc.CP(M3, N3, r=r)),
    ("bt", lambda r: kc.BT(M3, N3, r=r, P=2)),
    ("bt blocks", lambda r: kc.BT(M3, N3, r=2, P=r)),
    ("ht", lambda r: kc.HT(M3, N3, r=r)),
    ("ht one leaf", lambda r: kc.HT(M3, N3, r=(3, 3, r, 4), clip=True)),
    ("kcp K", lambda r: kc.KCP(M3, N3, K=r, CA=2, CB=2)),
    ("kcp CA", lambda r: kc.KCP(M3, N3, K=2, CA=r, CB=2)),
    ("kcp CB", lambda r: kc.KCP(M3, N3, K=2, CA=2, CB=r)),
    ("kcp all K", lambda r: kc.KCP(M3, N3, K=r, CA=2, CB=2, tie="all")),
    ("kcp all CA", lambda r: kc.KCP(M3, N3, K=2, CA=r, CB=2, tie="all")),
]


@pytest.mark.parametrize(("name", "make"), RANKS, ids=[name for name, _ in RANKS])
def test_the_error_does_not_increase_with_a_rank(name: str, make: Callable[[int], kc.Format]) -> None:
    W = drawn(80, 24, decay=0.7)
    errors = [make(rank).from_dense(W)[1] for rank in (1, 2, 4)]
    assert all(larger <= smaller * (1 + 1e-4) for smaller, larger in pairwise(errors)), errors
    assert errors[-1] <= errors[0]


def test_lowrank_and_kt_reach_the_bound_of_eckart_and_young() -> None:
    W = drawn(80, 24, decay=0.5)
    S = torch.linalg.svdvals(W)
    for rank in (1, 5, 23):
        bound = float(S[rank:].norm() / S.norm())
        assert kc.LowRank(M3, N3, r=rank).from_dense(W)[1] == pytest.approx(bound, rel=1e-9)
        assert kc.KT(M3, N3, K=rank).from_dense(W)[1] == pytest.approx(bound, rel=1e-9)


def test_large_matrices_take_the_other_roads_to_the_same_svd() -> None:
    from kronecell.formats.fitting.svd import EXACT_NUMEL, GRAM_SIDE, truncated_svd

    for shape in ((40, 20_000), (20_000, 40), (GRAM_SIDE + 100, GRAM_SIDE + 50)):
        generator = torch.Generator().manual_seed(5)
        left, right = (torch.randn(side, 30, generator=generator, dtype=torch.float64) for side in shape)
        A = (left * 0.7 ** torch.arange(30)) @ right.T
        assert A.numel() > EXACT_NUMEL
        U, S, Vh = truncated_svd(A, 6)
        true = torch.linalg.svdvals(torch.linalg.qr(left * 0.7 ** torch.arange(30))[1] @ torch.linalg.qr(right)[1].T)
        torch.testing.assert_close(S, true[:6], rtol=1e-6, atol=0)
        best = float(true[6:].norm())
        assert float(torch.linalg.norm(A - (U * S) @ Vh)) <= best * (1 + 1e-6)


@pytest.mark.parametrize("fmt", COMPRESSED[2:], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_gates_are_fitted_and_shared_gates_are_fitted_jointly(fmt: kc.Format, shared: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    truth = fmt.init(generator, gates=3, shared=shared, dtype=torch.float64)
    W = fmt.to_dense(truth, gates=3, shared=shared) + 0.02 * drawn(3 * fmt.M, fmt.N).reshape(3, fmt.M, fmt.N).mul(
        fmt.N**-0.5
    )
    factors, error = fmt.from_dense(W, gates=3, shared=shared, sweeps=5, starts=0)
    network = fmt.network(3, shared)
    assert {name: tuple(t.shape) for name, t in factors.items()} == network.shapes
    dense = fmt.to_dense(factors, gates=3, shared=shared)
    assert error == pytest.approx(float((dense - W).norm() / W.norm()), rel=1e-9)
    assert error < 1.0
    if not shared:
        each = [fmt.from_dense(gate, sweeps=5, starts=0)[0] for gate in W]
        for name, tensor in factors.items():
            torch.testing.assert_close(tensor, torch.stack([one[name] for one in each]))


def test_sharing_one_factor_equals_the_fit_of_a_wider_mode() -> None:
    W = drawn(4 * 80, 24, decay=0.3).reshape(4, 80, 24)
    joint = kc.TT(M3, N3, r=3).from_dense(W, gates=4, shared=True)[1]
    wide = kc.TT((16, 5, 4), N3, r=3).from_dense(W.reshape(320, 24))[1]
    assert joint == pytest.approx(wide, rel=1e-6)


def test_unequal_sharing_of_kcp_is_refined_jointly() -> None:
    fmt = kc.KCP(M3, N3, K=2, CA=2, CB=2)
    W = drawn(4 * 80, 24, decay=0.3).reshape(4, 80, 24)
    for shared in (True, ("A1",)):
        start = fmt.from_dense(W, gates=4, shared=shared, refine=False)[1]
        assert fmt.from_dense(W, gates=4, shared=shared)[1] < start


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    W = drawn(80, 24).to(dtype)
    factors, error = kc.TT(M3, N3, r=3).from_dense(W)
    assert {tensor.dtype for tensor in factors.values()} == {dtype}
    assert error == pytest.approx(kc.TT(M3, N3, r=3).from_dense(W.double())[1], abs=0.02)


def test_the_same_seed_gives_the_same_factors() -> None:
    W, fmt = drawn(80, 24), kc.BT(M3, N3, r=2, P=2)
    first, again = fmt.from_dense(W, seed=4)[0], fmt.from_dense(W, seed=4)[0]
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_input_is_not_changed_and_zero_has_zero_error() -> None:
    ring = kc.TR(M3, N3, r=2)
    for fmt in (kc.Dense(M3, N3), kc.TT(M3, N3, r=2), ring, kc.KCP(M3, N3, K=2, CA=1, CB=1), kc.CP(M3, N3, r=2)):
        W = drawn(80, 24)
        kept = W.clone()
        factors, _ = fmt.from_dense(W)
        for tensor in factors.values():
            tensor += 1
        assert torch.equal(W, kept)
        factors, error = fmt.from_dense(torch.zeros(80, 24))
        assert error == 0 and all(bool(torch.isfinite(tensor).all()) for tensor in factors.values())


def test_wrong_input_is_refused() -> None:
    fmt = kc.TT(M3, N3, r=2)
    W = drawn(80, 24)
    with pytest.raises(kc.ShapeError, match=r"expected \(80, 24\), got \(24, 80\).*transposed"):
        fmt.from_dense(W.T)
    with pytest.raises(kc.ShapeError, match=r"expected \(2, 80, 24\)"):
        fmt.from_dense(W, gates=2)
    with pytest.raises(kc.ShapeError, match="NaN"):
        fmt.from_dense(W * float("nan"))
    with pytest.raises(kc.ShapeError, match="floating point"):
        fmt.from_dense(W.long())
    with pytest.raises(kc.ShapeError, match=r"inputs have the wrong shape: expected \(..., 80\)"):
        fmt.from_dense(W, inputs=torch.zeros(5, 24))
    with pytest.raises(kc.RankError, match="no option swepes"):
        fmt.from_dense(W, swepes=3)
    with pytest.raises(kc.RankError, match="must not be negative"):
        fmt.from_dense(W, sweeps=-1)


def test_a_fit_beyond_the_memory_limit_is_refused_with_the_figure_before_it_starts() -> None:
    lines: list[str] = []
    with pytest.raises(kc.ShapeError, match=r"about 0\.\d\d GB besides W, more than max_memory = 0\.00 GB"):
        kc.TT((20, 20), (20, 20), r=4).from_dense(drawn(400, 400), max_memory=1000, progress=lines.append)
    assert lines == []


def decaying_inputs(rows: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    mix = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]
    scale = torch.exp(-0.15 * torch.arange(width, dtype=torch.float64))
    return torch.randn(rows, width, generator=generator, dtype=torch.float64) * scale @ mix


@pytest.mark.parametrize("fmt", [replace(fmt) for fmt in COMPRESSED], ids=str)
def test_data_aware_fits_beat_the_plain_fit_on_fresh_inputs_of_the_same_kind(fmt: kc.Format) -> None:
    W, X = drawn(fmt.M, fmt.N), decaying_inputs(900, fmt.M)
    calibration, fresh = X[:600], X[600:]
    plain, plain_error = fmt.from_dense(W, starts=1)
    aware, aware_error = fmt.from_dense(W, starts=1, inputs=calibration)
    assert plain_error <= aware_error * (1 + 1e-3)  # each wins on its own measure
    for inputs in (calibration, fresh):
        assert fmt.error(W, aware, inputs=inputs) < 0.97 * fmt.error(W, plain, inputs=inputs)


def test_the_data_aware_lowrank_fit_is_the_best_there_is() -> None:
    fmt = kc.LowRank((80,), (24,), r=4)
    W, X = drawn(80, 24), decaying_inputs(600, 80)
    S = torch.linalg.svdvals(X @ W)
    factors, _ = fmt.from_dense(W, inputs=X)
    assert fmt.error(W, factors, inputs=X) == pytest.approx(float(S[4:].norm() / S.norm()), rel=1e-3)


def test_data_aware_fits_of_shared_gates() -> None:
    fmt, X = kc.TT(M3, N3, r=3), decaying_inputs(400, 80)
    W = drawn(3 * 80, 24).reshape(3, 80, 24)
    plain, _ = fmt.from_dense(W, gates=3, shared=True)
    aware, _ = fmt.from_dense(W, gates=3, shared=True, inputs=X)
    options = {"gates": 3, "shared": True, "inputs": X}
    assert fmt.error(W, aware, **options) < 0.97 * fmt.error(W, plain, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("fmt", COMPRESSED[2:], ids=str)
@pytest.mark.parametrize("gates", [1, 3])
def test_a_sweep_by_halves_is_the_plain_sweep(fmt: kc.Format, gates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kronecell.formats.fitting import als

    network = fmt.network(gates, gates > 1).as_dense()
    W = drawn(gates * fmt.M, fmt.N).reshape(network.shape(network.outputs))
    start = fmt.init(torch.Generator().manual_seed(0), gates=gates, shared=gates > 1, dtype=torch.float64)
    halved, plain = dict(start), dict(start)
    squared = als.sweep(network, W, halved)
    monkeypatch.setattr(als, "halves", lambda _: ())
    assert als.sweep(network, W, plain) == pytest.approx(squared, rel=1e-9)
    for name, tensor in plain.items():
        torch.testing.assert_close(halved[name], tensor, rtol=1e-6, atol=1e-9)
