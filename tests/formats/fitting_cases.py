"""Modes and compressed formats that the tests of fitting share."""

from __future__ import annotations

import kronecell as kc

M3, N3 = (4, 5, 4), (3, 2, 4)
M4, N4 = (4, 3, 4, 3), (2, 3, 2, 3)

COMPRESSED = [
    kc.LowRank(M3, N3, r=5),
    kc.KT(M3, N3, K=5),
    kc.TT(M3, N3, r=4),
    kc.TR(M3, N3, r=2),
    kc.Tucker(M3, N3, r=4),
    kc.CP(M3, N3, r=4),
    kc.BT(M3, N3, r=2, P=2),
    kc.HT(M3, N3, r=3),
    kc.KCP(M3, N3, K=3, CA=2, CB=2),
    kc.KCP(M3, N3, K=3, CA=2, CB=2, tie="all"),
    kc.KCP(M4, N4, K=2, CA=(1, 2), CB=(2, 1)),
]
