"""The error on data: |X (W - W')| for calibration inputs X instead of |W - W'|.

X W' is the network of W' with one more tensor, X, which takes part and never changes; so the refinement of the plain
error refines this one too. With at most as many columns as fit a square matrix, X is first replaced by the triangular
root of X^T X / rows + ridge I: the same error, a bounded cost however many rows there are, and the small ridge keeps
W' sensible in directions the calibration inputs do not show. Wider inputs are used as they are; then the start, which
is the plain fit, decides in the directions that X does not show.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from kronecell.errors import ShapeError
from kronecell.formats.fitting.als import FROZEN
from kronecell.plans.network import GATE, Factor, Network

ROOT_WIDTH = 2048  # widest input for which the root of the Gram matrix is made
RIDGE = 1e-4  # of the mean eigenvalue
ROW = "calibration"  # the leg that counts calibration rows ("row" is the one of x in a plan)


def check_inputs(inputs: Tensor, width: int) -> Tensor:
    """Calibration inputs as (rows, M)."""
    if not isinstance(inputs, torch.Tensor) or not inputs.is_floating_point() or inputs.ndim < 1:
        raise ShapeError(f"inputs must be a floating point tensor (..., {width}), got {_kind(inputs)}")
    if inputs.shape[-1] != width or inputs.numel() == 0:
        raise ShapeError(
            f"calibration inputs have the wrong shape: expected (..., {width}) with at least one row, "
            f"got {tuple(inputs.shape)}"
        )
    if not torch.isfinite(inputs).all():
        raise ShapeError("calibration inputs hold NaN or infinite entries; remove those rows")
    return inputs.reshape(-1, width)


def root(inputs: Tensor) -> Tensor:
    """L (rows', M) with L^T L = X^T X / rows, plus a small ridge where the width allows it."""
    rows, width = inputs.shape
    if width > ROOT_WIDTH:
        return inputs / rows**0.5
    gram = torch.zeros(width, width, dtype=torch.float64, device=inputs.device)
    for block in inputs.split(max(1, (1 << 22) // width)):
        gram.addmm_(block.double().mT, block.double())
    gram /= rows
    gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()))
    triangle, info = torch.linalg.cholesky_ex(gram)
    return inputs / rows**0.5 if int(info) else triangle.mT


def seen_through(network: Network, rows: int) -> Network:
    """The dense network of X W' for a network of W': output legs (g, row, n ...)."""
    gate = tuple(leg for leg in network.outputs if leg == GATE)
    rest = tuple(leg for leg in network.outputs if leg != GATE)
    factors = (*network.factors, Factor(FROZEN, (ROW, *network.inputs)))
    return Network.of(factors, (), (*gate, ROW, *rest), {**network.sizes, ROW: rows})


def seen_target(L: Tensor, W: Tensor, network: Network) -> Tensor:
    """L W with the legs of `seen_through`."""
    product = L.to(W.dtype) @ W  # (rows, N) or (gates, rows, N)
    legs = seen_through(network, L.shape[0])
    assert product.numel() == prod(legs.shape(legs.outputs))
    return product.reshape(legs.shape(legs.outputs))


def _kind(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
