"""Functions that are a single opaque call in a compiled graph.

torch.compile guards every object read during tracing and rechecks the guards on each call. Large
tensors evict the guarded objects from the caches: for an 8 MB pooling, guards on rule and settings
took up to 0.1 ms of 1 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fp8.common.compiler import in_graph

Fn = TypeVar("Fn", bound=Callable[..., Any])


def one_call(body: Fn) -> Fn:
    """`in_graph`, where numbers are constants of the graph and sizes may be symbolic.

    body: reads only its arguments and the state that every compiled call guards on (autocast,
    gradient mode).
    """
    return in_graph(body, lambda *args, **kwargs: body(*_known(args), **_known(kwargs)))


def _known(value: Any) -> Any:
    """Arguments with symbolic numbers replaced by their values."""
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_known(item) for item in value]
    if isinstance(value, torch.SymInt):
        return int(value)
    return float(value) if isinstance(value, torch.SymFloat) else value
