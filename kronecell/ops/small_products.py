"""All small products of weights in one call; provisional: steps run one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kronecell.ops.program import Program


@dataclass(frozen=True)
class Products:
    """Hoisted steps as the kernel reads them."""

    inputs: tuple[str, ...]
    description: Tensor


def products_of(program: Program) -> Products | None:
    """The hoisted steps for the kernel, if they are small."""
    return None


def small_products(inputs: list[Tensor], description: Tensor) -> list[Tensor]:
    """Their results."""
    raise NotImplementedError


small_products_backward: Any = None
