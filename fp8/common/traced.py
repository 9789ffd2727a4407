"""Imported only while a graph is compiled, because it imports the compiler."""

from __future__ import annotations

from typing import Any

import torch

from .frames import refuse_split_graphs
from .graph_functions import GRAPH_FUNCTIONS

_UNMARKED = torch.__version__ < "2.13"
"""Whether `torch.compiler.is_compiling` is false while the compiler calls `apply`."""


@torch.compiler.allow_in_graph
def apply(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the function ``name`` of `GRAPH_FUNCTIONS`. The compiler does not trace into it.

    The flag of `torch.compiler.is_compiling` is private. torch 2.13 sets it for the duration of a
    compilation; with earlier versions it is set here, or `same` and `own` would return views whose
    gradients are lost.
    """
    refuse_split_graphs()
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = before or _UNMARKED
    try:
        return GRAPH_FUNCTIONS[name](*args, **kwargs)
    finally:
        torch.compiler._is_compiling_flag = before
