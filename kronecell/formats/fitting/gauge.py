"""The same matrix by factors that do not cancel each other.

Between two factors that share a leg any invertible matrix may stand, followed by its inverse: W stays, the factors
change. A fit takes what comes. In a ring that can be factors a thousand times as large as they need be, whose products
cancel: the fit is good, but a step of training or a rounding to integers is not. The best matrix for a leg makes the
sum of squares of both factors smallest; leg after leg, a few rounds come close to the best for all. A tree (TT, HT,
Tucker) starts from orthogonal factors and does not come to cancel: its factors stay as they are.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from kronecell.plans.network import GATE, Network

ROUNDS = 30
ENOUGH = 1e-3  # relative change of the sum of squares in a round
FLOOR = 1e-6  # of the mean: what is added to both Gram matrices, so that no direction grows without bound


def settled(network: Network, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Factors of a network with a ring, each leg of it balanced; those of other networks as they are."""
    legs = _ring(network)
    if not legs:
        return factors
    factors = {name: tensor.double() for name, tensor in factors.items()}
    before = _squares(factors)
    for _ in range(ROUNDS):
        for leg in legs:
            _balance(network, factors, leg)
        after = _squares(factors)
        if not after < (1 - ENOUGH) * before:
            break
        before = after
    return factors


def _ring(network: Network) -> list[str]:
    """The legs between two parameters, if there are as many as parameters that have one: then some close a ring."""
    outside = {*network.inputs, *network.outputs, GATE}
    held = Counter(leg for f in network.factors for leg in f.legs)
    inner = Counter(leg for f in network.parameters for leg in f.legs if leg not in outside)
    legs = [leg for leg, count in inner.items() if count == held[leg] == 2 and network.sizes[leg] > 1]
    joined = [f for f in network.parameters if any(leg in f.legs for leg in legs)]
    return legs if len(legs) >= len(joined) > 1 else []


def _balance(network: Network, factors: dict[str, Tensor], leg: str) -> None:
    """Put A and its inverse between both holders of a leg: (A A^T) P (A A^T) = Q for their Gram matrices P and Q."""
    first, second = ((f.name, f.legs.index(leg)) for f in network.parameters if leg in f.legs)
    P, Q = (_gram(factors[name], axis) for name, axis in (first, second))
    if not min(float(P.trace()), float(Q.trace())) > torch.finfo(P.dtype).tiny:  # of zeros
        return
    root, inverse = _power(P, 0.5), _power(P, -0.5)
    square = inverse @ _power(root @ Q @ root, 0.5) @ inverse
    for (name, axis), matrix in ((first, _power(square, 0.5)), (second, _power(square, -0.5))):
        factors[name] = (factors[name].movedim(axis, -1) @ matrix).movedim(-1, axis).contiguous()


def _gram(tensor: Tensor, axis: int) -> Tensor:
    lines = tensor.movedim(axis, 0).flatten(1)
    gram = lines @ lines.mT
    return gram + torch.eye(len(gram), dtype=gram.dtype, device=gram.device) * (FLOOR * gram.trace() / len(gram))


def _power(matrix: Tensor, power: float) -> Tensor:
    """Of a symmetric positive matrix."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return (vectors * values.clamp_min(values[-1] * 1e-15).pow(power)) @ vectors.mT


def _squares(factors: dict[str, Tensor]) -> float:
    return sum(float(tensor.square().sum()) for tensor in factors.values())
