"""Contraction orders as nested pairs of names, such as ((("x", "G1"), "G2"), "G3"), and the search for the best one."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import opt_einsum

from kronecell.errors import PlanError
from kronecell.plans.network import GATE, INPUT, Network

Tree = str | tuple["Tree", "Tree"]

EXACT_LIMIT = 10  # tensors up to which every order is tried, outer products included
ENOUGH = 16  # elements that must lie together for a product over something else to run at speed
CONNECTED_LIMIT = 14  # tensors up to which every order without outer products is tried


def leaves(tree: Tree) -> tuple[str, ...]:
    """Names in the tree, left to right."""
    return (tree,) if isinstance(tree, str) else (*leaves(tree[0]), *leaves(tree[1]))


def chain(first: Tree, *rest: Tree) -> Tree:
    """Left to right: chain(x, a, b) is ((x, a), b)."""
    for item in rest:
        first = (first, item)
    return first


@lru_cache(maxsize=1024)
def optimal(network: Network, rows: int = 1, traffic: int = 0) -> Tree:
    """The order with the fewest multiply-adds for `rows` rows, work without x charged once.

    `traffic` is the price, in multiply-adds, of an element read or written: a machine that waits for memory prefers
    fewer and larger products to the fewest multiply-adds, and products that take x as it lies in memory.

    Exact over all orders for small networks; over all orders without outer products for medium ones; greedy beyond
    (no format at the paper's shapes is beyond). Ties go to the smaller intermediates.
    """
    names = [*network.legs]
    if len(names) == 1:
        return names[0]
    if len(names) > CONNECTED_LIMIT:
        return greedy(network, rows)
    return _exhaustive(network, rows, traffic, outer=len(names) <= EXACT_LIMIT)


def _exhaustive(network: Network, rows: int, traffic: int, outer: bool) -> Tree:
    """Dynamic programme over subsets of tensors; the legs of a contracted subset do not depend on its order.

    A subset that alone costs more than a greedy order of everything cannot be part of the best order and is dropped,
    which is what keeps a ring of thirteen cores within milliseconds.
    """
    names = [*network.legs]
    bit_of_leg = {leg: 1 << i for i, (leg, _) in enumerate(network.leg_sizes)}
    held = [sum(bit_of_leg[leg] for leg in network.legs[name]) for name in names]
    wanted = sum(bit_of_leg[leg] for leg in network.outputs)
    sizes = [size for _, size in network.leg_sizes]
    x_bit = 1 << names.index(INPUT) if INPUT in names else 0
    full = (1 << len(names)) - 1
    joining = ~bit_of_leg.get(GATE, 0)  # sharing the gate leg alone does not make two factors neighbours

    def union(subset: int) -> int:
        legs = 0
        for i, mask in enumerate(held):
            if subset >> i & 1:
                legs |= mask
        return legs

    volume: dict[int, int] = {}

    def size(legs: int) -> int:
        if legs not in volume:
            volume[legs] = prod(s for i, s in enumerate(sizes) if legs >> i & 1)
        return volume[legs]

    def open_legs(subset: int) -> int:
        return union(subset) & (union(full & ~subset) | wanted)

    def price(part: int, legs_a: int, other: int, legs_b: int) -> int:
        """Of contracting two subsets, whose own contraction is done."""
        hot = rows if (part | other) & x_bit else 1
        cost = size(legs_a | legs_b) * hot
        if traffic:
            read = size(legs_a) * (rows if part & x_bit else 1) + size(legs_b) * (rows if other & x_bit else 1)
            cost += traffic * (read + size(open_legs(part | other)) * hot)
            if x_bit in (part, other) and torn(legs_a & legs_b & ~open_legs(part | other)):
                cost += 2 * traffic * size(held[names.index(INPUT)]) * rows
        return cost

    input_bits = [bit_of_leg[leg] for leg in network.inputs]

    def torn(summed: int) -> bool:
        """Whether x must be copied to contract these legs at once: they do not stand together, or little is behind."""
        places = [i for i, bit in enumerate(input_bits) if summed & bit]
        if not places:
            return False
        behind = prod(sizes[bit.bit_length() - 1] for bit in input_bits[places[-1] + 1 :])
        return places[-1] - places[0] >= len(places) or 1 < behind < ENOUGH

    def price_of(tree: Tree) -> tuple[int, int]:
        """(subset, price) of a whole tree."""
        if isinstance(tree, str):
            return 1 << names.index(tree), 0
        (left, a), (right, b) = price_of(tree[0]), price_of(tree[1])
        return left | right, a + b + price(left, open_legs(left), right, open_legs(right))

    bound = price_of(greedy(network, rows))[1]
    # One table per number of tensors: subset -> (price, total size of intermediates, tree, open legs).
    tables: list[dict[int, tuple[int, int, Tree, int]]] = [{} for _ in range(len(names) + 1)]
    for i, name in enumerate(names):
        tables[1][1 << i] = (0, 0, name, open_legs(1 << i))
    for count in range(2, len(names) + 1):
        table = tables[count]
        for small in range(1, count // 2 + 1):
            for part, (cost_a, size_a, tree_a, legs_a) in tables[small].items():
                for other, (cost_b, size_b, tree_b, legs_b) in tables[count - small].items():
                    if part & other or (2 * small == count and part > other):
                        continue
                    apart = not legs_a & legs_b & joining
                    if apart and not outer and (legs_a | legs_b) & ~wanted:
                        continue  # an outer product, unless both are whole components of a disconnected network
                    subset = part | other
                    cost = cost_a + cost_b + price(part, legs_a, other, legs_b)
                    if cost > bound or (subset in table and cost > table[subset][0]):
                        continue
                    legs = open_legs(subset)
                    weight = size_a + size_b + size(legs) * (rows if subset & x_bit else 1)
                    if subset not in table or (cost, weight) < table[subset][:2]:
                        tree = (tree_b, tree_a) if other & x_bit else (tree_a, tree_b)
                        table[subset] = (cost, weight, tree, legs)
    return tables[-1][full][2]


def greedy(network: Network, rows: int = 1) -> Tree:
    """A good order quickly, by opt_einsum's greedy search; the row leg makes it charge hoisted work once."""
    sizes = {**network.sizes, "row": rows}
    legs = {name: [*held, "row"] if name == INPUT else [*held] for name, held in network.legs.items()}
    output = {*network.outputs, "row"} if INPUT in legs else {*network.outputs}
    path = opt_einsum.paths.greedy([frozenset(held) for held in legs.values()], frozenset(output), sizes)
    trees: list[Tree] = [*legs]
    for pair in path:
        picked = [trees.pop(i) for i in sorted(pair, reverse=True)]
        if len(picked) == 1:
            trees.append(picked[0])
            continue
        a, b = picked
        trees.append((b, a) if INPUT in leaves(b) else (a, b))
    if len(trees) != 1:
        raise PlanError(f"greedy search left {len(trees)} tensors instead of 1")
    return trees[0]
