"""A trained model made smaller: matrices found, ranks chosen, layers fitted and replaced, the loss reported.

`kronecell.compress` is this package and also the function: `kronecell.compress(model, rules)`. Importing any part of
the package sets `kronecell.compress` to the module, so the function cannot live under that name beside it. Instead the
module itself can be called. The alternative, another name for the package, would leave two words for one thing.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kronecell.compress.model import compress
    from kronecell.compress.report import LayerReport, Report

__all__ = ["LayerReport", "Report", "compress"]

_HOME = {"compress": "model", "LayerReport": "report", "Report": "report"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return __getattr__("compress")(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(__getattr__("compress"))


sys.modules[__name__].__class__ = _CallablePackage
