"""Decorators of `torch.compiler`, without the compiler.

Works around: the decorators of torch (2.11 to 2.14) import ``torch._dynamo`` when they decorate,
which takes longer than the import of these packages: `torch.compiler.assume_constant_result`,
`torch.compiler.disable` and `torch.compiler.allow_in_graph`.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from . import TorchFunction

Fn = TypeVar("Fn", bound=TorchFunction)


def taken_as_constant(fn: Fn) -> Fn:
    """Decorator: torch.compile stores the result for constant arguments as a constant, without
    guards."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def has_compiler() -> bool:
    """Whether the compiler is imported, as where anything is compiled."""
    return "torch._dynamo" in sys.modules


def untraced(function: Fn, reason: str | None = None) -> Fn:
    """Decorator: a graph breaks at the function, which runs in eager mode. `torch.compiler.disable`
    does so too, but imports the compiler when it decorates, and not at the first call. reason: what
    fullgraph=True shows."""
    made: list[Any] = []

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.append(torch.compiler.disable(function, reason=reason))
        return made[0](*args, **kwargs)

    return cast("Fn", called)


def in_graph(function: Fn, graph: TorchFunction | None = None) -> Fn:
    """Decorator of a function of a module: in a graph the function, or ``graph``, is a single call
    by name. It may read only its arguments, and state that every graph guards (autocast, the
    gradient mode)."""
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            from .compiling_flag import call_by_name  # imports the compiler

            return call_by_name(name, args, kwargs)
        return function(*args, **kwargs)

    called.in_graph = graph or function  # type: ignore[attr-defined]
    return cast("Fn", called)
