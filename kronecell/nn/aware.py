"""Training with weights as they will be after kc.quantize: rounded in every forward, with gradients that pass through.

Rounding has no gradient. The straight-through estimator (Bengio, Leonard and Courville 2013) takes that of the
identity where nothing was cut off. Scales learn, too, as in LSQ (Esser and others 2020); here as exp(a) times the first
scale, so that a step changes every scale by the same part.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronecell.errors import ShapeError
from kronecell.nn.quantize import OURS, Bits, Group, layout, quantize, with_layout, with_report
from kronecell.nn.quantized import Integers, QuantizedFactor
from kronecell.ops.quantized import pack


class Rounding(nn.Module):
    """How the weights of a module are rounded: what kc.quantize chose for it, with scales that learn.

    >>> layer = nn.Linear(32, 32)
    >>> rounding = Rounding(layer, bits=4)
    >>> [(name, len(weight.unique()) <= 16 * 32) for name, weight in rounding.weights(layer).items()]
    [('weight', True)]
    """

    def __init__(self, module: nn.Module, bits: Bits, group: Group = None) -> None:
        super().__init__()
        quantized = quantize(module, bits, group)
        self.layout = layout(quantized)
        if not self.layout:
            raise ShapeError("there is nothing to round: every matrix is small, or none matches the names of bits")
        self.lines: dict[str, _Lines] = {}
        known = dict(module.named_parameters())
        for name in self.layout:
            part = quantized.get_submodule(name)
            choices = (name, f"{name}.weight".removeprefix("."), name.replace("quantized.", ""))
            parameter = next(choice for choice in choices if choice in known)
            self.lines[name] = _Lines(part, parameter)
            self.register_parameter(_key(name), nn.Parameter(torch.zeros_like(part.scales)))

    def scales(self, name: str) -> Tensor:
        """Of one of the integers; differentiable."""
        return self.lines[name].scales * self.get_parameter(_key(name)).exp()

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Parameter -> its rounded weights: for torch.func.functional_call."""
        parameters = dict(module.named_parameters())
        return {
            lines.parameter: lines.tensor(_straight(*lines.levels(parameters[lines.parameter], self.scales(name))))
            for name, lines in self.lines.items()
        }

    @torch.no_grad()
    def quantized(self, module: nn.Module) -> Any:
        """The module with integers, as kc.quantize gives it, with these scales."""
        made = with_layout(ours(module), self.layout)
        parameters = dict(module.named_parameters())
        for name, lines in self.lines.items():
            scales, part = self.scales(name), made.get_submodule(name)
            levels, _ = lines.levels(parameters[lines.parameter], scales)
            integers = levels.round().flatten(1)[:, : part.columns].to(torch.int8)
            part.integers.copy_(pack(integers, part.bits))
            part.scales.copy_(scales)
            if getattr(part, "bias", None) is not None:
                part.bias.copy_(parameters[f"{name}.bias".removeprefix(".")])
            weight = lines.matrix(parameters[lines.parameter])
            part.error = float((part.matrix() - weight).double().norm() / weight.double().norm().clamp_min(1e-300))
        made.load_state_dict(made.state_dict())  # products of weights are made of integers that were loaded
        return with_report(made)


class _Lines:
    """A weight as rows (or groups of rows) with one scale each."""

    def __init__(self, part: Integers, parameter: str) -> None:
        self.parameter, self.bits, self.group = parameter, part.bits, part.group or part.columns
        self.columns, self.scales = part.columns, part.scales.clone()
        self.leg = part.leg if isinstance(part, QuantizedFactor) else 0
        self.shape = part.shape if isinstance(part, QuantizedFactor) else (part.rows, part.columns)

    def matrix(self, weight: Tensor) -> Tensor:
        """(rows, columns)."""
        if self.leg < 0:
            return weight.reshape(1, -1)
        return weight.movedim(self.leg, 0).reshape(self.shape[self.leg], -1)

    def levels(self, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Weights over their scales, cut off where the integers end: (rows, groups, columns), and the scales."""
        matrix = self.matrix(weight)
        lines = F.pad(matrix, (0, -self.columns % self.group)).reshape(len(matrix), -1, self.group)
        half = 2 ** (self.bits - 1)
        return (lines / scales[:, :, None]).clamp(-half, half - 1), scales

    def tensor(self, lines: Tensor) -> Tensor:
        """Back in the shape of the weight."""
        matrix = lines.flatten(1)[:, : self.columns]
        if self.leg <= 0:
            return matrix.reshape(self.shape)
        rest = [size for leg, size in enumerate(self.shape) if leg != self.leg]
        return matrix.reshape(self.shape[self.leg], *rest).movedim(0, self.leg)


def _straight(levels: Tensor, scales: Tensor) -> Tensor:
    """Rounded, with the gradient of the identity."""
    return (levels + (levels.round() - levels).detach()) * scales[:, :, None]


def _key(name: str) -> str:
    return "scale_" + name.replace(".", "/")


def ours(module: nn.Module) -> nn.Module:
    """A copy whose recurrent layers and cells of torch.nn are this package's, with the same parameters."""
    return _with_ours(copy.deepcopy(module))


def _with_ours(module: nn.Module) -> nn.Module:
    if type(module) in OURS:
        layer: Any = OURS[type(module)]
        return layer.from_dense(module)
    for name, child in [*module.named_children()]:
        made = _with_ours(child)
        if made is not child:
            setattr(module, name, made)
    return module
