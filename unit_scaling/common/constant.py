"""Constants that ops derive from settings: computed once, outside the calling context."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from fp8.common.step import in_own_thread
from fp8.torch_internals.decorators import taken_as_constant

from .calls import T


def constant(fn: Callable[..., T], *args: object) -> T:
    """Returns ``fn(*args)``, computed at the first call with these arguments and cached.

    fn: computes numbers, possibly with torch. args: hashable, no tensors. It runs in its own
    thread, where no mode, autocast or torch.func transform of the caller is active; the compiler
    treats the result as a constant. Raises what ``fn`` raises.
    """
    return _constant(fn, *[specialised(value) for value in args])


@taken_as_constant
def _constant(fn: Callable[..., T], *args: object) -> T:
    return _cached(fn, *args)


_cached = lru_cache(maxsize=4096, typed=True)(in_own_thread)


def specialised(value: Any) -> Any:
    """The value as a concrete number: passing it to `math` makes the compiler specialise it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    number = math.copysign(value, value)
    if isinstance(value, float):
        return number
    return int(number)
