"""The uncompressed matrix, as a network of one factor: the baseline that every count and test compares with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kronecell.formats.base import Format, mode_legs
from kronecell.formats.fitting.options import FitOptions
from kronecell.plans.network import INPUT, Factor, Network
from kronecell.plans.order import Tree


@dataclass(frozen=True)
class Dense(Format):
    """W itself ("Ori." in the paper). M N multiply-adds a row.

    >>> Dense((8, 20), (4, 4)).num_params
    2560
    """

    kind: ClassVar[str] = "dense"
    equation: ClassVar[str] = "W"
    space: ClassVar[str] = "(mn)^d"
    computation: ClassVar[str] = "(mn)^d"
    optimal_start: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_modes(same_count=False)

    def _network(self) -> Network:
        m, n = mode_legs("m", self.m), mode_legs("n", self.n)
        return Network.of([Factor("W", (*m, *n))], m, n, m | n)

    def orders(self) -> dict[str, Tree]:
        return {"dense": (INPUT, "W")}

    def _decompose(self, W: Tensor, options: FitOptions) -> dict[str, Tensor]:
        return {"W": W.reshape(*self.m, *self.n).clone()}

    @property
    def unshared(self) -> tuple[str, ...]:
        return ("W",)
