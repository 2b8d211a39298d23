"""The optimal order: exact against an independent search, never worse than a named order, hoisted work charged once."""

from __future__ import annotations

from itertools import combinations
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kronecell as kc
from kronecell.ops.execute import contract_network
from kronecell.plans.network import Factor, Network
from kronecell.plans.order import greedy, leaves, optimal
from kronecell.plans.plan import Plan
from tests.cases import KINDS, formats


def total(network: Network, tree: object, rows: int) -> int:
    return Plan(network, tree, rows).total_macs


def brute_force(network: Network, rows: int) -> int:
    """The cheapest sequence of pairwise contractions, by trying all; the row leg charges work without x once."""
    sizes = {**network.sizes, "row": rows}
    output = frozenset(network.outputs) | {"row"}

    def cheapest(terms: tuple[frozenset[str], ...]) -> int:
        if len(terms) == 1:
            return 0
        costs = []
        for a, b in combinations(terms, 2):
            rest = [*terms]
            rest.remove(a)
            rest.remove(b)
            merged = (a | b) & output.union(*rest)
            costs.append(prod(sizes[leg] for leg in a | b) + cheapest((*rest, merged)))
        return min(costs)

    return cheapest(tuple(frozenset(held) | ({"row"} if name == "x" else set()) for name, held in network.legs.items()))


@pytest.mark.parametrize("kind", ["tt", "cp", "tucker", "bt", "kt", "lowrank"])
@pytest.mark.parametrize("rows", [1, 50])
def test_optimal_is_as_cheap_as_an_independent_exhaustive_search(kind: str, rows: int) -> None:
    @settings(max_examples=12)
    @given(formats(kind), st.sampled_from([1, 3]))
    def law(fmt: kc.Format, gates: int) -> None:
        network = fmt.network(gates)
        if len(network.legs) <= 6:
            assert total(network, optimal(network, rows), rows) == brute_force(network, rows)

    law()


@pytest.mark.parametrize("kind", KINDS)
def test_optimal_is_never_dearer_than_a_named_order(kind: str) -> None:
    @settings(max_examples=25)
    @given(formats(kind), st.sampled_from([1, 7, 1000]), st.sampled_from([(1, False), (4, False), (4, True)]))
    def law(fmt: kc.Format, rows: int, gating: tuple[int, bool]) -> None:
        gates, shared = gating
        best = fmt.plan("optimal", rows, gates=gates, shared=shared).total_macs
        exact = len(fmt.network(gates, shared).legs) <= 10
        for order in fmt.orders():
            if order != "naive":
                cost = fmt.plan(order, rows, gates=gates, shared=shared).total_macs
                assert best <= cost or not exact, order

    law()


def test_optimal_discovers_the_separable_order_of_kcp() -> None:
    for shape in (((8, 20, 20, 18), (4, 4, 4, 4), 4, 4, 2), ((15, 16, 16, 15), (8, 6, 6, 8), 6, 4, 4)):
        fmt = kc.KCP(*shape)
        for rows in (1, 96):
            for gates in (1, 4):
                best = fmt.plan("optimal", rows, gates=gates)
                assert best.total_macs <= fmt.plan("separable", rows, gates=gates).total_macs
        assert any({"A1", "A2"} == {*leaves(t)} for t in subtrees(fmt.plan("optimal", 96).tree))


def subtrees(tree: object) -> list[object]:
    return [tree] if isinstance(tree, str) else [tree, *subtrees(tree[0]), *subtrees(tree[1])]


def test_many_rows_make_hoisting_worth_while() -> None:
    """x a b: with many rows the outer product a b is made once; with one row x meets a and b in turn."""
    fmt = kc.KCP((6, 6), (1, 1), 1, 1, 1)
    one, many = fmt.plan("optimal", 1), fmt.plan("optimal", 10_000)
    assert many.macs < one.macs and many.hoisted_macs > 0


def test_a_network_beyond_the_exact_search_is_ordered_greedily_and_right() -> None:
    fmt = kc.TR((2,) * 8, (2,) * 8, 2)
    assert len(fmt.network().legs) == 17
    factors = fmt.init(torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.randn(3, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(fmt.matmul(x, factors, "optimal"), x @ fmt.to_dense(factors), rtol=1e-11, atol=1e-12)


def test_disconnected_networks_can_be_contracted() -> None:
    sizes = {"a": 2, "b": 3}
    network = Network.of([Factor("P", ("a",)), Factor("Q", ("b",))], (), ("a", "b"), sizes)
    for tree in (optimal(network), greedy(network)):
        P, Q = torch.arange(2.0), torch.arange(3.0)
        torch.testing.assert_close(contract_network(Plan(network, tree), {"P": P, "Q": Q}), torch.outer(P, Q))
