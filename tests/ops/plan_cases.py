"""Every plan for a matrix, and the comparison of a product with the dense one: values, first and second derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

import kronecell as kc
from kronecell.ops.choose import candidates
from kronecell.plans.plan import Plan

F64 = torch.float64
GATINGS: list[tuple[int, bool]] = [(1, False), (3, False), (3, True)]
CHUNKS = (1, 3)


def every_plan(fmt: kc.Format, rows: int, gates: int = 1, shared: bool = False) -> dict[str, Plan]:
    """All candidates of a layer, each also wide, and each in chunks of one and of three rows."""
    layer = kc.TensorLinear(fmt, device="meta", gates=gates, shared=shared)
    plans = dict(candidates(layer.product(rows)))
    if gates > 1:
        plans |= {f"{name}, wide": replace(plan, wide=True) for name, plan in plans.items() if not plan.wide}
    whole = {name: replace(plan, chunk=None) for name, plan in plans.items()}
    return plans | {f"{name}, by {n}": plan.in_chunks(n) for name, plan in whole.items() for n in CHUNKS}


def leaves_of(fmt: kc.Format, gates: int = 1, shared: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Factors in double precision, as leaves of a graph."""
    drawn = fmt.init(torch.Generator().manual_seed(seed), dtype=F64, gates=gates, shared=shared)
    return {name: tensor.requires_grad_() for name, tensor in drawn.items()}


def derivatives(product: Callable[[], Tensor], leaves: Sequence[Tensor], seed: int = 3) -> list[Tensor]:
    """The product, the gradients of a function of it, and the derivatives of these along a fixed direction."""
    generator = torch.Generator().manual_seed(seed)
    y = product()
    weights = torch.randn(y.shape, generator=generator, dtype=y.dtype)
    first = torch.autograd.grad((weights * y + y.square()).sum(), leaves, create_graph=True, materialize_grads=True)
    along = [torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for leaf in leaves]
    total = torch.stack([(a * g).sum() for a, g in zip(along, first, strict=True)]).sum()
    second = torch.autograd.grad(total, leaves, materialize_grads=True)
    return [y.detach(), *(g.detach() for g in first), *second]


def assert_same(got: Sequence[Tensor], want: Sequence[Tensor], name: str, tolerance: float = 1e-12) -> None:
    """Every tensor within `tolerance` of the largest number of its oracle."""
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape, f"{name}: tensor {number} has shape {tuple(a.shape)}, expected {tuple(b.shape)}"
        scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        worst = (a.double() - b.double()).abs().max().item() if b.numel() else 0.0
        assert worst <= tolerance * scale, f"{name}: tensor {number} is off by {worst:.1e}, largest {scale:.1e}"
