"""Functions that observers of a model see as one call, and whose errors name wrong arguments: after
a call fails, its arguments are compared with their annotations.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from reprlib import repr as short
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from torch import Size, Tensor

from .calls import Args, Fn, Function, Kwargs

Watcher = Callable[[Function, Function, Args, Kwargs], object]

#: Functions (the watched function, its body, args, kwargs) -> result that make the call instead of
#: the body; only the last is used. `unit_scaling.verify` and others see the functions that a model
#: calls by them. All threads share this list, which compiled ops guard on: in other threads a
#: watcher makes the call unchanged.
WATCHERS: list[Watcher] = []


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Within the block, ``watcher`` is the last of `WATCHERS`."""
    WATCHERS.append(watcher)
    try:
        yield
    finally:
        WATCHERS.pop()


def watched(body: Fn) -> Fn:
    """Returns ``body``, which calls the last of `WATCHERS` instead if there is one.

    If a call fails because of an argument of a wrong type, the error names the argument.
    """
    space = "U." if ".ops." in body.__module__ else ""

    @functools.wraps(body)
    def fn(*args: object, **kwargs: object) -> object:
        try:
            if WATCHERS:
                return WATCHERS[-1](fn, body, args, kwargs)
            return body(*args, **kwargs)
        except Exception:
            check_arguments(f"{space}{body.__name__}", body, args, kwargs)
            raise

    return cast("Fn", fn)


#: A type -> the method of all values that are accepted for it.
_METHODS: dict[object, str] = {
    Tensor: "__torch_function__",
    int: "__index__",
    float: "__float__",
    **dict.fromkeys((Sequence, list, tuple, Size), "__len__"),
}


def check_arguments(
    name: str,
    function: Function,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """Raises TypeError, replacing the current error, if an argument does not fit its annotation.

    Not compared are annotations of other types, constraints, items of sequences, and calls that
    lack an argument.

    >>> def half(x: int | None): ...
    >>> check_arguments("half", half, ("a",), {})
    Traceback (most recent call last):
    TypeError: half: x must be int | None, got str 'a'
    """
    try:
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:  # Python's own error names missing and unknown arguments
        return
    hints = get_type_hints(function)
    for argument, value in arguments.items():
        hint = hints.get(argument, object)
        if argument != "constraint" and not _fits(value, hint):
            wanted = hint.__name__ if isinstance(hint, type) else hint
            got = f"{type(value).__name__} {short(value)}"
            raise TypeError(f"{name}: {argument} must be {wanted}, got {got}") from None


def _fits(value: object, hint: object) -> bool:
    """Whether a value fits a type; True for unsupported types."""
    kind: Any = get_origin(hint) or hint
    if kind in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in get_args(hint))
    if kind in _METHODS:
        return hasattr(value, _METHODS[kind])
    return kind not in (bool, str, types.NoneType) or isinstance(value, kind)
