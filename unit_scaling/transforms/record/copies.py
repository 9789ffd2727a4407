"""The copy of a model that records its calls."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from fp8.common.copies import HOOKS, deep_copy

M = TypeVar("M", bound=nn.Module)


def recording_copy(module: M, hooked: bool = False) -> M:
    """Returns a copy that shares the parameters and the transforms of ``module``, has its own
    buffers, and only the hooks that belong to the model; hooked: all hooks."""
    shared: dict[int, Any] = {id(p): p for p in module.parameters()}
    for child in module.modules():
        shared.update({id(scope): scope for scope, _ in getattr(child, "_scopes", ())})
        hooks = [] if hooked else [getattr(child, name) for name in HOOKS]
        shared.update({id(dictionary): type(dictionary)() for dictionary in hooks})
    return deep_copy(module, shared)


def package_of(function: Any) -> str:
    """The package that defines a function or a class."""
    module: str = getattr(getattr(function, "func", function), "__module__", None) or ""
    return module.partition(".")[0]
