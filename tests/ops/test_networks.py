"""Networks that no format has: constants, hyperedges, factors apart from x, in any order, against the dense tensor."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kronecell.ops.execute import contract_network, execute, plain_execute
from kronecell.plans.network import Factor, Network
from kronecell.plans.order import Tree, greedy, optimal
from kronecell.plans.plan import Plan
from tests.ops.plan_cases import CHUNKS, F64, assert_same, derivatives

SIZES = {"m1": 3, "m2": 2, "n1": 2, "n2": 3, "k": 2, "r": 4, "s": 2, "b": 5}
ONES = Factor("I", ("r",), "ones")
DELTA = Factor("D", ("r", "s", "k"), "delta")

NETWORKS: dict[str, Network] = {
    "a matrix": Network.of([Factor("W", ("m1", "n1"))], ("m1",), ("n1",), SIZES),
    "a matrix transposed": Network.of([Factor("W", ("n1", "m1"))], ("m1",), ("n1",), SIZES),
    "a diagonal": Network.of([Factor("W", ("m1",))], ("m1",), ("m1",), SIZES),
    "a leg that passes by": Network.of([Factor("W", ("m1", "n1"))], ("m1", "m2"), ("n1", "m2"), SIZES),
    "a leg that passes by, first": Network.of([Factor("W", ("m1", "n1"))], ("m2", "m1"), ("m2", "n1"), SIZES),
    "outputs in another order": Network.of([Factor("W", ("m1", "n1", "n2"))], ("m1",), ("n2", "n1"), SIZES),
    "an outer product": Network.of([Factor("a", ("m1",)), Factor("b", ("n1",))], ("m1",), ("n1",), SIZES),
    "a factor without x": Network.of(
        [Factor("W", ("m1", "r")), Factor("V", ("r", "s")), Factor("b", ("s", "n1"))], ("m1",), ("n1",), SIZES
    ),
    "a hyperedge": Network.of(
        [Factor("A", ("m1", "k")), Factor("B", ("m2", "k")), Factor("C", ("n1", "k"))], ("m1", "m2"), ("n1",), SIZES
    ),
    "a hyperedge that is an output": Network.of(
        [Factor("A", ("m1", "k")), Factor("B", ("m2", "k", "n1"))], ("m1", "m2"), ("k", "n1"), SIZES
    ),
    "a hyperedge that is an input": Network.of(
        [Factor("A", ("m1", "n1")), Factor("B", ("m1", "n2"))], ("m1",), ("n1", "n2"), SIZES
    ),
    "ones": Network.of([Factor("A", ("m1", "r")), ONES], ("m1",), (), SIZES),
    "ones beside a hyperedge": Network.of(
        [Factor("A", ("m1", "r")), Factor("B", ("n1", "r")), ONES], ("m1",), ("n1",), SIZES
    ),
    "a superdiagonal": Network.of(
        [Factor("A", ("m1", "r")), Factor("B", ("m2", "s")), Factor("C", ("k", "n1")), DELTA],
        ("m1", "m2"), ("n1",), {**SIZES, "s": 4, "k": 4},
    ),
    "blocks": Network.of(
        [Factor("A", ("m1", "b")), Factor("S", ("b", "k"), "blocks", (2, 3)), Factor("B", ("k", "n1"))],
        ("m1",), ("n1",), SIZES,
    ),
    "blocks that meet x first": Network.of(
        [Factor("S", ("b", "k"), "blocks", (1, 4)), Factor("B", ("k", "n1"))], ("b",), ("n1",), SIZES
    ),
    "two ways from x to y": Network.of(
        [Factor("A", ("m1", "r")), Factor("B", ("m1", "s")), Factor("C", ("r", "s", "n1"))], ("m1",), ("n1",), SIZES
    ),
    "one number out": Network.of([Factor("A", ("m1",)), Factor("B", ("m2",))], ("m1", "m2"), (), SIZES),
    "legs of size one": Network.of(
        [Factor("A", ("m1", "r")), Factor("B", ("r", "n1"))], ("m1",), ("n1",), {"m1": 1, "r": 1, "n1": 1}
    ),
}  # fmt: skip


def constant(factor: Factor, network: Network) -> Tensor:
    """The tensor of a constant, by its definition."""
    shape = network.shape(factor.legs)
    if factor.constant == "ones":
        return torch.ones(shape, dtype=F64)
    tensor = torch.zeros(shape, dtype=F64)
    if factor.constant == "delta":
        for i in range(shape[0]):
            tensor[(i,) * len(shape)] = 1
        return tensor
    row = 0
    for column, height in enumerate(factor.blocks):
        for _ in range(height):
            tensor[row, column] = 1
            row += 1
    return tensor


def dense(network: Network, factors: dict[str, Tensor], x: Tensor | None = None) -> Tensor:
    """Everything in one einsum."""
    names = {leg: chr(ord("a") + i) for i, (leg, _) in enumerate(network.leg_sizes)}
    tensors = [factors[f.name] if f.constant is None else constant(f, network) for f in network.factors]
    terms = ["".join(names[leg] for leg in f.legs) for f in network.factors]
    end = "".join(names[leg] for leg in network.outputs)
    if x is None:
        return torch.einsum(f"{','.join(terms)}->{end}", *tensors)
    terms.append("Z" + "".join(names[leg] for leg in network.inputs))
    y = torch.einsum(f"{','.join(terms)}->Z{end}", *tensors, x.reshape(len(x), *network.shape(network.inputs)))
    return y.reshape(len(x), prod(network.shape(network.outputs)))


def drawn(network: Network) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=F64, requires_grad=True)
        for name, shape in network.shapes.items()
    }


def trees(names: list[str]) -> st.SearchStrategy[Tree]:
    """Any order of contraction."""
    if len(names) == 1:
        return st.just(names[0])

    @st.composite
    def tree(draw: st.DrawFn) -> Tree:
        order = draw(st.permutations(names))
        cut = draw(st.integers(1, len(names) - 1))
        return draw(trees([*order[:cut]])), draw(trees([*order[cut:]]))

    return tree()


def check(network: Network, tree: Tree, rows: int, wide: bool = False) -> None:
    factors = drawn(network)
    width = prod(network.shape(network.inputs))
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(1), dtype=F64, requires_grad=True)
    leaves = [x, *factors.values()]
    want = derivatives(lambda: dense(network, factors, x), leaves)
    plan = Plan(network, tree, rows, wide=wide)
    for each in (plan, *(plan.in_chunks(count) for count in CHUNKS)):
        assert_same(derivatives(lambda each=each: execute(each, x, factors), leaves), want, f"{tree} by {each.chunk}")
    assert_same([plain_execute(plan, x, factors)], want[:1], f"{tree} in operations of torch")


@pytest.mark.parametrize("name", NETWORKS)
def test_any_order_of_an_unusual_network_is_the_dense_product(name: str) -> None:
    network = NETWORKS[name]

    @settings(max_examples=8)
    @given(trees([*network.legs]), st.sampled_from([1, 4]))
    def law(tree: Tree, rows: int) -> None:
        check(network, tree, rows)

    law()
    for tree in (optimal(network, 4), greedy(network, 4), optimal(network, 4, 32)):
        check(network, tree, 4)


@pytest.mark.parametrize("name", [name for name, network in NETWORKS.items() if network.outputs])
def test_gates_on_any_factors_of_an_unusual_network(name: str) -> None:
    network = NETWORKS[name]

    @settings(max_examples=12)
    @given(trees([*network.legs]), st.booleans(), st.sampled_from([f.name for f in network.parameters]))
    def law(tree: Tree, wide: bool, on: str) -> None:
        check(network.with_gates(2, [on]), tree, 3, wide)

    law()


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Two to four factors over up to six legs; what is left with one holder gets a vector of its own."""
    legs = ["a", "b", "c", "d", "e", "f"][: draw(st.integers(2, 6))]
    sizes = {leg: draw(st.integers(1, 4)) for leg in legs}
    some, any_legs = (st.lists(st.sampled_from(legs), unique=True, min_size=n, max_size=4).map(tuple) for n in (1, 0))
    factors = [Factor(f"F{i}", draw(some)) for i in range(draw(st.integers(2, 4)))]
    inputs, outputs = draw(some), draw(any_legs)
    holders = [*(f.legs for f in factors), inputs, outputs]
    for leg in legs:
        if sum(leg in held for held in holders) == 1:
            factors.append(Factor(f"V{leg}", (leg,), draw(st.sampled_from([None, "ones"]))))
    return Network.of(factors, inputs, outputs, sizes)


@settings(max_examples=60)
@given(networks().flatmap(lambda network: st.tuples(st.just(network), trees([*network.legs]))), st.integers(1, 4))
def test_any_order_of_any_network_is_the_dense_product(drawn_case: tuple[Network, Tree], rows: int) -> None:
    check(*drawn_case, rows)


@settings(max_examples=40)
@given(networks().flatmap(lambda network: st.tuples(st.just(network), trees([f.name for f in network.factors]))))
def test_any_network_without_x_is_contracted_to_its_tensor(drawn_case: tuple[Network, Tree]) -> None:
    network, tree = drawn_case
    assume(not {*network.inputs} & {*network.outputs})  # a tensor cannot hold a leg twice
    outer = network.as_dense()
    factors = drawn(outer)
    leaves = [*factors.values()]
    want = derivatives(lambda: dense(outer, factors), leaves)
    assert_same(derivatives(lambda: contract_network(Plan(outer, tree), factors), leaves), want, str(tree))
