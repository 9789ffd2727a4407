"""What differs between eager code and compiled graphs. torch.compile guards every object that is
read during tracing, and rechecks it on each call, in about 0.3 microseconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..torch_internals import TorchFunction

Fn = TypeVar("Fn", bound=TorchFunction)


def compiled_as(graph: TorchFunction) -> Callable[[Fn], Fn]:
    """Decorator: compiled code calls ``graph`` instead of the function."""

    def decorate(function: Fn) -> Fn:
        @wraps(function)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return graph(*args, **kwargs)
            return function(*args, **kwargs)

        return cast("Fn", chosen)

    return decorate


@compiled_as(lambda x: x.as_strided(x.shape, x.stride()))
def in_memory(x: Tensor) -> Tensor:
    """``x``. In a graph inductor computes what several kernels read once in each of them, or stores
    it once for each, unless it is stored before; `torch.as_strided` needs a stored tensor."""
    return x


def sum_of_none(x: Tensor) -> Tensor:
    """The sum of no elements of ``x``: a byte, 0, that depends on x in a graph."""
    none = x.flatten()[:0]
    if x.itemsize == 1:
        none = none.view(torch.uint8)
    return none.sum(dtype=torch.uint8)


BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integers that read its bits."""


def _bits_after(grad: Tensor, x: Tensor) -> Tensor:
    bits = x.view(BITS[x.itemsize])
    return (bits | sum_of_none(grad)).view(x.dtype)


@compiled_as(_bits_after)
def only_after(grad: Tensor, x: Tensor) -> Tensor:
    """``x``. The partitioner of graphs merges what is computed of it with what the forward pass
    computes, and saves that, unless it depends on the gradient."""
    return x


def eager_only(otherwise: Any = None) -> Callable[[Fn], Fn]:
    """Decorator: compiled code skips the function, whose result is ``otherwise`` there."""
    return compiled_as(lambda *args, **kwargs: otherwise)


def reads_values(x: Tensor) -> bool:
    """Whether control flow may depend on ``x``: eager code, and no synchronization."""
    return not torch.compiler.is_compiling() and x.device.type == "cpu"


def updates_states() -> bool:
    """Whether a pass updates the state of a recipe: if it records gradients; an exported program
    has fixed scales."""
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        return False  # in torch 2.11, every graph that the compiler traces counts as exported
    return torch.is_grad_enabled()


def is_differentiated_again() -> bool:
    """Whether the running backward pass records its own (``create_graph=True``); never compiled."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()
