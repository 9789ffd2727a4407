"""Functions that are a single opaque call in a compiled graph.

torch.compile guards every object read during tracing and rechecks the guards on each call. Large
tensors evict the guarded objects from the caches: for an 8 MB pooling, guards on rule and settings
took up to 0.1 ms of 1 ms.
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
    """Returns ``body`` as a function that the compiler does not trace: one call by name in a graph.

    body: reads only its arguments and the state that every compiled call guards on (autocast,
    gradient mode). In a graph, numbers are constants and sizes may be symbolic. in_graph: the
    function to call in a graph; by default ``body``.
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
    """Arguments with symbolic numbers replaced by their values."""
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_known(item) for item in value]
    if isinstance(value, torch.SymInt):
        return int(value)
    return float(value) if isinstance(value, torch.SymFloat) else value
