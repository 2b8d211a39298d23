"""One small format of each shape and the matrix it means, written out by hand: an explicit einsum or plain loops."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

import kronecell as kc

Arrays = dict[str, np.ndarray]


def matrix(tensor: np.ndarray, fmt: kc.Format) -> np.ndarray:
    """(m1 n1 m2 n2 ...) -> (M, N) in C order."""
    d = len(fmt.m)
    return tensor.transpose(*range(0, 2 * d, 2), *range(1, 2 * d, 2)).reshape(fmt.M, fmt.N)


def cp_vectors(factors: list[np.ndarray]) -> np.ndarray:
    """Vector of a CP tensor with factor matrices (mode, C), by loops."""
    modes = [f.shape[0] for f in factors]
    out = np.zeros(modes)
    for index in itertools.product(*map(range, modes)):
        for c in range(factors[0].shape[1]):
            out[index] += np.prod([f[i, c] for f, i in zip(factors, index, strict=True)])
    return out.ravel()


def kcp_branches(fmt: kc.KCP, f: Arrays, i: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    A, B = f[f"A{i}"], f[f"B{i}"]
    if A.ndim == 3:
        return [*A], [*B]
    return (
        np.split(A, np.cumsum(fmt.branch_ranks("CA"))[:-1], axis=1),
        np.split(B, np.cumsum(fmt.branch_ranks("CB"))[:-1], axis=1),
    )


def kcp_group(fmt: kc.KCP, f: Arrays, group: tuple[int, ...]) -> np.ndarray:
    """sum_k a_k b_k^T over a group of modes (Theorem 1, Lemma 1)."""
    branches = [kcp_branches(fmt, f, i) for i in group]
    return sum(
        np.outer(cp_vectors([b[0][k] for b in branches]), cp_vectors([b[1][k] for b in branches])) for k in range(fmt.K)
    )


def kcp_all(fmt: kc.KCP, f: Arrays) -> np.ndarray:
    return kcp_group(fmt, f, tuple(range(1, fmt.d + 1)))


def kcp_pair(fmt: kc.KCP, f: Arrays) -> np.ndarray:
    """Kronecker product of the pairs' operators."""
    W = np.ones((1, 1))
    for start in range(1, fmt.d + 1, 2):
        W = np.kron(W, kcp_group(fmt, f, tuple(range(start, min(start + 2, fmt.d + 1)))))
    return W


def ht5(fmt: kc.Format, f: Arrays) -> np.ndarray:
    """Tree ((1 2) 3) (4 5)."""
    tensor = np.einsum(
        "abp,cdq,efr,ghs,ijt,pqu,urv,stw,vw->abcdefghij",
        *(f[name] for name in ("U1", "U2", "U3", "U4", "U5", "B1_2", "B1_3", "B4_5", "B1_5")),
        optimize=True,
    )
    return matrix(tensor, fmt)


def ht4(fmt: kc.Format, f: Arrays) -> np.ndarray:
    names = ("U1", "U2", "U3", "U4", "B1_2", "B3_4", "B1_4")
    return matrix(np.einsum("abp,cdq,efr,ghs,pqu,rsv,uv->abcdefgh", *(f[n] for n in names), optimize=True), fmt)


CASES: list[tuple[kc.Format, Callable[..., np.ndarray]]] = [
    (kc.Dense((2, 3), (4,)), lambda fmt, f: f["W"].reshape(6, 4)),
    (kc.LowRank((2, 3), (4, 2), 3), lambda fmt, f: f["U"].reshape(6, 3) @ f["V"].reshape(3, 8)),
    (kc.CP((3,), (4,), 2), lambda fmt, f: f["F1"].sum(2)),
    (
        kc.CP((2, 3, 2), (3, 1, 2), 3),
        lambda fmt, f: matrix(np.einsum("abr,cdr,efr->abcdef", f["F1"], f["F2"], f["F3"]), fmt),
    ),
    (
        kc.Tucker((2, 3, 2), (3, 2, 2), (2, 3, 4)),
        lambda fmt, f: matrix(np.einsum("pab,qcd,ref,pqr->abcdef", f["F1"], f["F2"], f["F3"], f["K"]), fmt),
    ),
    (kc.TT((3,), (4,), 1), lambda fmt, f: f["G1"]),
    (
        kc.TT((2, 3, 2, 2), (3, 2, 1, 2), (2, 3, 2)),
        lambda fmt, f: matrix(np.einsum("abr,rcds,seft,tgh->abcdefgh", f["G1"], f["G2"], f["G3"], f["G4"]), fmt),
    ),
    (
        kc.TR((2, 3, 2), (3, 2), (2, 3, 2, 2, 3)),
        lambda fmt, f: np.einsum("zap,pbq,qcr,rds,sez->abcde", *(f[f"G{i}"] for i in range(1, 6))).reshape(12, 6),
    ),
    (
        kc.BT((2, 3), (3, 2), (3, 3), P=2),
        lambda fmt, f: matrix(np.einsum("zpab,zqcd,zpq->abcd", f["F1"], f["F2"], f["K"]), fmt),
    ),
    (kc.HT((3,), (4,), 1), lambda fmt, f: f["U1"]),
    (kc.HT((2, 3, 2, 2), (2, 1, 2, 3), (2, 3, 2, 3, 3, 3)), ht4),
    (kc.HT((2, 2, 2, 2, 2), (1, 2, 2, 1, 2), (2, 2, 3, 2, 2, 3, 3, 3)), ht5),
    (kc.KT((2, 3), (2, 2), 3), lambda fmt, f: sum(np.outer(f["A"][k].ravel(), f["B"][k].ravel()) for k in range(3))),
    (kc.KCP((4,), (3,), 2, 3, 2), kcp_all),
    (kc.KCP((4, 3), (3, 2), 2, 3, 2), kcp_all),
    (kc.KCP((4, 3), (3, 2), 2, 3, 2), kcp_pair),
    (kc.KCP((2, 3, 2, 2), (2, 1, 2, 3), 2, 2, 3), kcp_pair),
    (kc.KCP((2, 3, 2), (2, 2, 3), 2, 2, 3), kcp_pair),
    (kc.KCP((2, 3, 2), (2, 2, 3), 3, (1, 2, 3), (2, 1, 1)), kcp_pair),
    (kc.KCP((2, 3, 2), (2, 2, 3), 2, 2, 3, tie="all"), kcp_all),
    (kc.KCP((2, 3, 2), (2, 2, 3), 3, (1, 2, 3), 2, tie="all"), kcp_all),
]  # fmt: skip
