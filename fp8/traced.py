"""Functions that a compiler calls while it makes a graph, and whose result it takes as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["taken_as_constant"]

Fn = TypeVar("Fn", bound=Callable[..., Any])


def taken_as_constant(fn: Fn) -> Fn:
    """``fn``, which a compiler calls with constants while it makes a graph: in it is the result.

    Whatever a graph has read while it was made, it compares at each of its calls; what ``fn`` reads
    it does not, nor what belongs to the result. So ``fn`` depends on its arguments alone.
    `torch.compiler.assume_constant_result` leaves this mark too, and imports the compiler for it.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn
