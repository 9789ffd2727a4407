"""Imported by a graph that is being compiled, and only then: it imports the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["outside_graph"]

_REASON = (
    "unit_scale has not seen this form of call yet: call the model once before compiling it with "
    "fullgraph=True"
)


@torch.compiler.disable(reason=_REASON)
def outside_graph(call: Callable[[], Any]) -> Any:
    """``call()``, left out of the graph."""
    return call()
