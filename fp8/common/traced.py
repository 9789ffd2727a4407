"""Imported by a graph that is being compiled, and only then: it imports the compiler."""

from __future__ import annotations

from typing import Any

import torch

from .compiler import IN_GRAPH

__all__ = ["apply"]


@torch.compiler.allow_in_graph
def apply(name: str, *args: Any) -> Any:
    """The function of this name in `IN_GRAPH`, called: what is in it the compiler does not read."""
    return IN_GRAPH[name](*args)
