"""Imported only while a graph is compiled, because it imports the compiler."""

from __future__ import annotations

from typing import Any

import torch

from .graph_functions import GRAPH_FUNCTIONS


@torch.compiler.allow_in_graph
def apply(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the function ``name`` of `GRAPH_FUNCTIONS`. The compiler does not trace into it."""
    return GRAPH_FUNCTIONS[name](*args, **kwargs)
