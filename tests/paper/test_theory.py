"""The paper's lemmas and theorems, on random factors in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kronecell as kc
from kronecell.paper.theory import kt_rank_bounds, kt_to_kcp
from tests.cases import formats

F64 = torch.float64


def factors_of(fmt: kc.Format, seed: int = 0) -> dict[str, torch.Tensor]:
    return fmt.init(torch.Generator().manual_seed(seed), dtype=F64)


def test_lemma_1_the_matricisation_of_a_kt_is_a_rank_k_factorisation() -> None:
    fmt = kc.KT((3, 4), (2, 3), K=3)
    f = factors_of(fmt)
    a, b = f["A"].reshape(3, -1), f["B"].reshape(3, -1)
    torch.testing.assert_close(fmt.to_dense(f), sum(torch.outer(a[k], b[k]) for k in range(3)), rtol=1e-13, atol=1e-14)
    # Eq. (lem_2): the Kronecker product of the tensors, rearranged, is the same matrix
    kron = sum(torch.kron(f["A"][k], f["B"][k]) for k in range(3))  # (m1 n1, m2 n2)
    rearranged = kron.reshape(3, 2, 4, 3).permute(0, 2, 1, 3).reshape(12, 6)
    torch.testing.assert_close(fmt.to_dense(f), rearranged, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("K", [1, 2, 4])
def test_lemma_3_bounds_hold_for_a_kt_of_known_rank(K: int) -> None:
    fmt = kc.KT((3, 4), (2, 3), K=K)
    low, high = kt_rank_bounds(fmt.to_dense(factors_of(fmt)), fmt.m, fmt.n)
    assert low == K <= high


def test_lemma_3_upper_bound_is_tight_for_a_rank_one_tensor() -> None:
    vectors = [
        torch.randn(s, dtype=F64, generator=torch.Generator().manual_seed(i)) for i, s in enumerate((2, 3, 2, 2))
    ]
    tensor = torch.einsum("a,b,c,d->abcd", *vectors)
    assert kt_rank_bounds(tensor.reshape(6, 4), (2, 3), (2, 2)) == (1, 1)


@settings(max_examples=60)
@given(formats("kcp-all"), st.integers(0, 1000))
def test_theorem_1_the_cp_of_the_factor_matrices_is_w(fmt: kc.KCP, seed: int) -> None:
    f = factors_of(fmt, seed)
    matrices = fmt.factor_matrices(f)
    columns = sum(a * b for a, b in zip(fmt.branch_ranks("CA"), fmt.branch_ranks("CB"), strict=True))
    assert [tuple(w.shape) for w in matrices] == [(m * n, columns) for m, n in zip(fmt.m, fmt.n, strict=True)]
    W = torch.zeros(fmt.M, fmt.N, dtype=F64)
    for c in range(columns):
        term = torch.ones(1, 1, dtype=F64)
        for w, m, n in zip(matrices, fmt.m, fmt.n, strict=True):
            term = torch.kron(term, w[:, c].reshape(m, n))
        W += term
    torch.testing.assert_close(fmt.to_dense(f), W, rtol=1e-12, atol=1e-13)


@settings(max_examples=60)
@given(formats("kcp-pair"), st.integers(0, 1000))
def test_theorem_2_relaxed_and_strict_multiplication_agree(fmt: kc.KCP, seed: int) -> None:
    f = factors_of(fmt, seed)
    x = torch.randn(2, fmt.M, dtype=F64, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(fmt.matmul(x, f, "algorithm2"), fmt.matmul(x, f, "algorithm1"), rtol=1e-12, atol=1e-13)


@settings(max_examples=100)
@given(st.integers(2, 30), st.integers(2, 30), st.sampled_from([2, 4]), *[st.integers(1, 6)] * 3)
def test_theorem_3_the_relaxed_bound_is_below_the_strict_bound(
    m: int, n: int, d: int, K: int, CA: int, CB: int
) -> None:
    """The theorem compares the two complexity expressions; for equal modes m = n the counts themselves obey it too."""
    size = max(m, n)
    relaxed = d * size**d * (CA / 2 + CB / 2 + CA * CB) * K
    strict = d * size ** (d + 1) * CA * CB * K
    assert relaxed <= strict
    fmt = kc.KCP((size,) * d, (size,) * d, min(K, size**2), CA, CB)
    assert fmt.macs("algorithm2") <= fmt.macs("algorithm1") <= strict
    assert fmt.macs("algorithm2") <= relaxed


def test_algorithms_1_and_2_are_not_theorem_1_beyond_two_modes() -> None:
    shape = ((3, 2, 2, 3), (2, 2, 2, 2), 2, 2, 2)
    pair, every = kc.KCP(*shape), kc.KCP(*shape, tie="all")
    f = factors_of(pair)
    W, V = pair.to_dense(f), every.to_dense(f)
    assert (W - V).norm() > 0.5 * V.norm()
    assert torch.linalg.matrix_rank(V) <= 2 < torch.linalg.matrix_rank(W) <= 4
    two = kc.KCP((3, 2), (2, 2), 2, 2, 2), kc.KCP((3, 2), (2, 2), 2, 2, 2, tie="all")
    g = factors_of(two[0])
    torch.testing.assert_close(two[0].to_dense(g), two[1].to_dense(g), rtol=1e-13, atol=1e-14)


@settings(max_examples=40)
@given(formats("kt"), st.integers(0, 100))
def test_every_kt_is_a_kcp_exactly(fmt: kc.KT, seed: int) -> None:
    if len(fmt.m) != len(fmt.n):
        with pytest.raises(kc.ShapeError, match="pad the shorter"):
            kt_to_kcp(fmt, factors_of(fmt))
        return
    f = factors_of(fmt, seed)
    kcp, factors = kt_to_kcp(fmt, f)
    torch.testing.assert_close(kcp.to_dense(factors), fmt.to_dense(f), rtol=1e-12, atol=1e-13)


def test_the_naive_strategy_computes_theorem_1_at_an_exponential_cost() -> None:
    fmt = kc.KCP((2, 2, 2), (2, 2, 2), 2, 2, 2, tie="all")
    f, x = factors_of(fmt), torch.randn(2, 8, dtype=F64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(fmt.matmul(x, f, "naive"), x @ fmt.to_dense(f), rtol=1e-12, atol=1e-13)
    assert fmt.macs("naive") >= fmt.N * (2 * 2 * 2) ** 3
