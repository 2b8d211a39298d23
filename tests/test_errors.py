"""Wrong modes, ranks, names, orders, dtypes and widths: each error says what, expected, got, and a way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import kronecell as kc
from kronecell.formats import parse_recipe
from kronecell.ops.execute import contract_network
from kronecell.paper.tables import paper_format, tables
from kronecell.paper.theory import kt_rank_bounds
from kronecell.plans.network import Factor, Network
from kronecell.plans.plan import Plan

TT = kc.TT((4, 3), (2, 2), 2)
FACTORS = TT.init(torch.Generator().manual_seed(0))
X = torch.zeros(2, 12)

CASES: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    ("no modes", lambda: kc.TT((), (2,), 1), kc.ShapeError, r"m must be a tuple of positive integers.*got \(\)"),
    ("zero mode", lambda: kc.TT((0, 3), (2, 2), 1), kc.ShapeError, r"m must be a tuple of positive"),
    ("float mode", lambda: kc.TT((2.0, 3), (2, 2), 1), kc.ShapeError, r"m must be a tuple of positive"),
    ("text as modes", lambda: kc.TT("8x20", (2, 2), 1), kc.ShapeError, r"m must be a tuple of positive.*'8x20'"),
    ("None as modes", lambda: kc.Dense(None, (2, 2)), kc.ShapeError, r"m must be a tuple of positive"),
    ("unequal d", lambda: kc.TT((4, 3), (2,), 1), kc.ShapeError, r"same number of modes, got 2 .* and 1 .*pad"),
    ("unequal d in KCP", lambda: kc.KCP((4, 3), (2, 2, 2), 1, 1, 1), kc.ShapeError, r"same number of modes.*pad"),
    ("rank zero", lambda: kc.TT((4, 3), (2, 2), 0), kc.RankError, r"positive integer.*got 0"),
    ("rank float", lambda: kc.LowRank((4,), (4,), 1.5), kc.RankError, r"r must be a positive integer, got 1.5"),
    ("rank True", lambda: kc.KT((4,), (4,), True), kc.RankError, r"K must be a positive integer, got True"),
    ("rank text", lambda: kc.TT((4, 3), (2, 2), "4"), kc.RankError, r"positive integer.*got '4'"),
    ("too few ranks", lambda: kc.TT((4, 3, 2), (2, 2, 2), (2,)), kc.RankError, r"needs 2 ranks \(r1, r2\), got 1"),
    ("rank too large", lambda: kc.TT((4, 3), (2, 2), 50), kc.RankError, r"r = 50.*largest feasible value is 6.*clip"),
    ("HT rank too large", lambda: kc.HT((2, 2), (2, 2), 9), kc.RankError, r"r\[0\] \(r1\) = 9.*value is 4"),
    ("low rank too large", lambda: kc.LowRank((4,), (3,), 9), kc.RankError, r"r = 9.*value is 3"),
    ("K too large", lambda: kc.KCP((2, 2), (2, 2), 9, 1, 1), kc.RankError, r"K = 9.*value is 4"),
    ("CA per branch", lambda: kc.KCP((4, 3), (2, 2), 3, (1, 2), 1), kc.RankError, r"CA needs one rank.*K = 3.*got 2"),
    ("CB zero", lambda: kc.KCP((4, 3), (2, 2), 2, 1, 0), kc.RankError, r"CB must be a positive integer"),
    ("wrong tie", lambda: kc.KCP((4, 3), (2, 2), 2, 1, 1, tie="some"), kc.ShapeError, r'"pair".*"all".*got \'some\''),
    ("unknown format", lambda: kc.parse("xyz:m=2,n=2"), kc.ShapeError, r"unknown format 'xyz'.*expected one of"),
    ("no modes in text", lambda: kc.parse("tt:r=4"), kc.ShapeError, r"has no modes m and n; expected e.g. tt:m="),
    ("no rank in text", lambda: kc.parse("tt:m=4x3,n=2x2"), kc.RankError, r"lacks r; expected e.g."),
    (
        "unknown option",
        lambda: kc.parse("tt:m=4x3,n=2x2,r=2,q=1"),
        kc.RankError,
        r"tt has no option q.*expected m, n, r",
    ),
    ("unreadable number", lambda: kc.parse("tt:m=4xa,n=2x2,r=2"), kc.RankError, r"cannot read m='4xa'.*8x20"),
    ("option twice", lambda: kc.parse("tt:m=4x3,n=2x2,r=2,r=3"), kc.ShapeError, r"'r' is given twice"),
    ("no value", lambda: kc.parse("tt:m=4x3,n"), kc.ShapeError, r"cannot read 'n'.*key=value"),
    ("not text", lambda: kc.parse(42), kc.ShapeError, r"format string is expected.*got int"),
    ("recipe with modes", lambda: parse_recipe("tt:m=4x3,r=2"), kc.ShapeError, r"names modes; leave m and n out"),
    ("unknown order", lambda: TT.plan("sideways"), kc.PlanError, r"no order 'sideways'.*forward, backward, optimal"),
    ("naive for pairs", lambda: kc.KCP((4, 3), (2, 2), 1, 1, 1).plan("naive"), kc.PlanError, r'naive.*tie="all"'),
    ("incomplete order", lambda: TT.plan(("x", "G1")), kc.PlanError, r"every tensor exactly once.*G2"),
    ("no rows", lambda: TT.plan(rows=0), kc.PlanError, r"rows must be at least 1, got 0"),
    ("no gates", lambda: TT.network(0), kc.ShapeError, r"gates must be at least 1, got 0"),
    ("unknown shared", lambda: TT.network(4, ("Q1",)), kc.PlanError, r"unshared factors \['Q1'\].*'G1', 'G2'"),
    ("nothing unshared", lambda: TT.network(4, ()), kc.PlanError, r"choose at least one of"),
    (
        "input too wide",
        lambda: TT.matmul(torch.zeros(2, 13), FACTORS),
        kc.ShapeError,
        r"expected \(..., 12\).*4x3.*\(2, 13\)",
    ),
    ("scalar input", lambda: TT.matmul(torch.zeros(()), FACTORS), kc.ShapeError, r"expected \(..., 12\)"),
    ("input not a tensor", lambda: TT.matmul([1.0] * 12, FACTORS), kc.ShapeError, r"must be a torch tensor, got list"),
    ("input dtype", lambda: TT.matmul(X.double(), FACTORS), kc.ShapeError, r"float64.*float32; convert"),
    ("integer input", lambda: TT.matmul(X.long(), FACTORS), kc.ShapeError, r"int64.*float32; convert"),
    (
        "integer factors",
        lambda: TT.matmul(X, {k: v.long() for k, v in FACTORS.items()}),
        kc.ShapeError,
        r"one floating point dtype.*int64.*convert",
    ),
    (
        "missing factor",
        lambda: TT.matmul(X, {"G1": FACTORS["G1"]}),
        kc.ShapeError,
        r"'G2' is missing; expected \['G1', 'G2'\]",
    ),
    (
        "factor shape",
        lambda: TT.matmul(X, FACTORS | {"G2": torch.zeros(2, 2, 3)}),
        kc.ShapeError,
        r"'G2' has the wrong shape: expected \(2, 3, 2\).*got \(2, 2, 3\)",
    ),
    (
        "leg without size",
        lambda: Network.of([Factor("A", ("p",))], (), ("p",), {}),
        kc.ShapeError,
        r"\['p'\] have no size",
    ),
    (
        "lone leg",
        lambda: Network.of([Factor("A", ("p",))], (), (), {"p": 2}),
        kc.ShapeError,
        r"held by one tensor only",
    ),
    (
        "names twice",
        lambda: Network.of([Factor("A", ("p",)), Factor("A", ("p",))], (), (), {"p": 2}),
        kc.ShapeError,
        r"must be distinct",
    ),
    (
        "contract with input",
        lambda: contract_network(Plan(TT.network(), TT.orders()["forward"]), FACTORS),
        kc.PlanError,
        r"execute",
    ),
    (
        "unknown data set",
        lambda: tables("imagenet"),
        kc.ShapeError,
        r"unknown data set 'imagenet'; the paper has UCF11",
    ),
    ("unknown column", lambda: paper_format("UCF11", "XX"), kc.ShapeError, r"unknown column 'XX'"),
    (
        "bounds of a wrong shape",
        lambda: kt_rank_bounds(X, (2, 2), (2, 2)),
        kc.ShapeError,
        r"W must be \(4, 4\).*got \(2, 12\)",
    ),
]


@pytest.mark.parametrize(("name", "action", "error", "message"), CASES, ids=[case[0] for case in CASES])
def test_bad_input_says_what_expected_got_and_a_way_out(
    name: str, action: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        action()
    assert isinstance(caught.value, kc.KronecellError)
    assert "\n" not in str(caught.value)


def test_clipping_is_done_only_when_asked_and_reaches_the_largest_feasible_rank() -> None:
    assert kc.TT((4, 3), (2, 2), 50, clip=True) == kc.TT((4, 3), (2, 2), 6)
    assert kc.LowRank((4,), (3,), 9, clip=True).r == 3
    assert kc.KCP((2, 2), (2, 2), 9, 1, 1, clip=True).K == 4
