"""Imported by a graph that is being compiled, and only then: it imports the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["evaluate"]

T = TypeVar("T")


@torch.compiler.assume_constant_result
def evaluate(fn: Callable[..., T], *args: Any) -> T:
    """``fn(*args)`` while the graph is made: in it is the result."""
    return fn(*args)
