"""Functions that a compiled graph has as one call each, whatever they do.

What a compiled function has read while its graph was made, it compares at each of its calls, and
the more so between large tensors, which leave none of it in the caches: for a pooling of 8 MB, rule
and settings took up to 0.1 ms of 1 ms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.compiler import is_compiling

from fp8.common.compiler import IN_GRAPH

__all__ = ["one_call"]

Fn = TypeVar("Fn", bound=Callable[..., Any])


def one_call(body: Fn, in_graph: Callable[..., Any] | None = None) -> Fn:
    """``body``, of which a compiler reads nothing: in a graph it is one call of what it is named.

    body: looks at nothing but its arguments and what every compiled call compares: autocast, the
    gradient mode. In a graph the numbers among the arguments are constants, sizes may be symbols.
    in_graph: what is called there, if not ``body`` itself.
    """
    name, computed = f"{body.__module__}.{body.__qualname__}", in_graph or body
    IN_GRAPH[name] = lambda args, kwargs: computed(*_known(args), **_known(kwargs))

    @functools.wraps(body)
    def fn(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            from fp8.common.traced import apply

            return apply(name, args, kwargs)
        return body(*args, **kwargs)

    return cast("Fn", fn)


def _known(value: Any) -> Any:
    """Arguments with the numbers that a compiler has put symbols for."""
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_known(item) for item in value]
    if isinstance(value, torch.SymInt):
        return int(value)
    return float(value) if isinstance(value, torch.SymFloat) else value
