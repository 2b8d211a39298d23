"""One call of an operator for the law suite: how inputs are drawn, its plain einsum, what must raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[Any, ...]
Change = Callable[[Arguments], Arguments]


@dataclass(frozen=True)
class Case:
    """One call of an operator. `exact` is the dense oracle, which is called with float64."""

    name: str
    operator: Any
    draw: Callable[[torch.Generator], Arguments]
    exact: Callable[..., Any]
    bad: tuple[tuple[str, Change, str], ...] = ()  # what is wrong, a change of the arguments, words of the error
    by_rows: int | None = None  # which argument has rows that must not depend on each other
    threads: bool = True  # whether the result has the same bits for any number of threads
    differentiable: bool = True  # more than once, through the operator's own gradient
    small: bool = True  # small enough for numerical derivatives
    outputs: int | None = None  # the first results that have gradients; None: all

    def __str__(self) -> str:
        return self.name


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def change(place: int, how: Callable[[Any], Any]) -> Change:
    """The arguments with one of them changed."""
    return lambda args: (*args[:place], how(args[place]), *args[place + 1 :])


def put(place: int, value: Any) -> Change:
    """The arguments with one of them replaced."""
    return change(place, lambda _: value)
