"""Learning rates and first weights by structure: one rate for recurrent layers of any input width and format.

Adam moves every number by about its rate, so a step changes what a matrix does by rate times the number of its inputs:
the rate of a dense W with M inputs should be that of U, with H inputs, times H / M (Yang et al., Tensor Programs V).

For a compressed W: where a dense one (M x N) has entries of rms s, a step in one direction changes what it does by
rate * sqrt(min(M, N)) / s, relatively. A factor with entries of rms t that sums over a numbers and gives b, one of L
factors whose changes add up, makes the same change at

    rate * (t / s) * sqrt(min(M, N) / min(a, b)) / L.

For a chain of factors that start as nn.Linear does, t = 1 / sqrt(a), and never narrow, this is rate * M / (a L), the
rule of Qiu et al. (Compute Better Spent, 2024). Here the matrix as a whole starts with a given rms, so t is read from
the factor. Indices that run through several factors (branches, a CP index, gates) count neither in a nor in b.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kronecell.errors import ShapeError
from kronecell.nn.linear import TensorLinear
from kronecell.nn.recurrent import Recurrent
from kronecell.plans.network import GATE, Network
from kronecell.plans.order import Tree, leaves

ITERATIONS = 30  # of the power method: the first singular values of a random network are close to each other


def param_groups(module: nn.Module, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Groups for an optimiser such as Adam: every matrix and every factor with the rate that suits it.

    `lr` is the rate of U in recurrent layers, ours and torch's, of biases, and of all modules that are no layers of
    ours; a dense W has lr times hidden size over inputs, and a factor what makes the same change. Call it before
    training: the rates follow from the factors as they are. A group's "scale" is its rate over `lr`, for schedules that
    set rates themselves. Weights decay by lr * weight_decay in every group.

    >>> groups = param_groups(torch.nn.LSTM(64, 16), 1e-2)
    >>> {group["scale"]: len(group["params"]) for group in groups}
    {0.25: 1, 1.0: 3}
    """
    if not 0 < lr < math.inf:
        raise ShapeError(f"lr must be a number above 0, got {lr}")
    scales: dict[int, float] = {}
    for layer in (part for part in module.modules() if isinstance(part, TensorLinear)):
        scales |= {id(layer.get_parameter(name)): scale for name, scale in rate_scales(layer).items()}
    for part in module.modules():
        if isinstance(part, (Recurrent, nn.RNNBase, nn.RNNCellBase)):
            for parameter, width in _input_weights(part):
                scales[id(parameter)] = scales.get(id(parameter), 1.0) * width
    by_scale: dict[float, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            by_scale.setdefault(scales.get(id(parameter), 1.0), []).append(parameter)
    return [
        {"params": params, "lr": lr * scale, "weight_decay": weight_decay / scale, "scale": scale}
        for scale, params in by_scale.items()
    ]


def _input_weights(layer: nn.Module) -> Iterator[tuple[nn.Parameter, float]]:
    """The parameters of every W of a recurrent layer, with the inputs of U over those of this W."""
    outputs = int(getattr(layer, "proj_size", 0) or layer.hidden_size)  # type: ignore[arg-type]
    for name, weight in [*layer.named_parameters(recurse=False), *layer.named_children()]:
        if name.startswith("weight_ih"):
            if isinstance(weight, TensorLinear):
                yield from ((factor, outputs / weight.in_features) for factor in weight.parameters())
            elif isinstance(weight, nn.Parameter):
                yield weight, outputs / weight.shape[1]


@torch.no_grad()
def rate_scales(layer: TensorLinear) -> dict[str, float]:
    """Factor -> its rate over that of a dense matrix in place of the layer."""
    factors = layer.factors()
    order, tree = next(iter(layer.format.orders().items()))
    network = layer.format.plan(order).network  # that the order is written for
    rms = layer.format.rms(factors, gates=layer.gates, shared=layer.shared)
    most = min(layer.format.M, layer.format.N)
    found = {}
    for name, tensor in factors.items():
        summed, given = widths(network, tree, name)
        own = float(tensor.double().square().mean().sqrt())
        if own == 0.0 or rms == 0.0:  # nothing to compare with
            found[name] = 1.0
        else:
            found[name] = own / rms * math.sqrt(most / min(summed, given)) / len(factors)
    return found


def widths(network: Network, tree: Tree, name: str) -> tuple[int, int]:
    """Over how many numbers a factor sums, and how many it gives, when tensors are contracted in this order.

    A leg that what came before has, and what comes later needs, runs through: it is neither.
    """
    order = [*leaves(tree)]
    place = order.index(name)
    before = {leg for other in order[:place] for leg in network.legs[other]}
    after = {leg for other in order[place + 1 :] for leg in network.legs[other]} | {*network.outputs}
    legs = [leg for leg in network.legs[name] if leg != GATE]
    summed = [leg for leg in legs if leg in before and leg not in after]
    given = [leg for leg in legs if leg not in before]
    return math.prod(network.shape(summed)), math.prod(network.shape(given))


@torch.no_grad()
def spectral_start(module: nn.Module) -> None:
    """Scale every compressed matrix down to the largest singular value that a dense one of its rms would start with.

    A matrix of low rank has the same energy in fewer directions: at equal rms its strongest is much stronger, and
    saturates gates that the dense matrix would not. Matrices that are weaker already stay as they are.
    """
    for layer in (part for part in module.modules() if isinstance(part, TensorLinear)):
        if next(iter(layer.factors().values())).is_meta:  # without numbers yet
            continue
        rms = layer.format.rms(layer.factors(), gates=layer.gates, shared=layer.shared)
        wanted = rms * (math.sqrt(layer.in_features) + math.sqrt(layer.out_features))
        largest = largest_singular_value(layer)
        if largest > wanted > 0:
            for tensor in layer.factors().values():
                tensor *= (wanted / largest) ** (1 / len(layer.factors()))


def largest_singular_value(layer: TensorLinear, iterations: int = ITERATIONS) -> float:
    """Of a layer's matrix (M, gates * N), by the power method; the matrix is never formed."""
    like = next(iter(layer.factors().values()))
    generator = torch.Generator(device=like.device).manual_seed(0)
    x = torch.randn(1, layer.in_features, generator=generator, device=like.device, dtype=like.dtype)
    value = 0.0
    for _ in range(iterations):
        x = (x / x.norm().clamp_min(torch.finfo(x.dtype).tiny)).requires_grad_()
        with torch.enable_grad():
            y = layer.project(x, None)
            value = float(y.detach().norm())
            (x,) = torch.autograd.grad(y, x, y.detach())
    return value
