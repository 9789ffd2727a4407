"""Functions that observers of a model see as one call, and whose errors name wrong arguments: after
a call fails, its arguments are compared with their annotations.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from reprlib import repr as short
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from torch import Size, Tensor

Fn = TypeVar("Fn", bound=Callable[..., Any])

Watcher = Callable[[Callable[..., Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

#: Functions (the watched function, its body, args, kwargs) -> result that make the call instead of
#: the body; only the last is used. `unit_scaling.verify` and others see the functions that a model
#: calls by them. All threads share this list, which compiled ops guard on: in other threads a
#: watcher makes the call unchanged.
WATCHERS: list[Watcher] = []


def watched(body: Fn) -> Fn:
    """Returns ``body``, which calls the last of `WATCHERS` instead if there is one.

    If a call fails because of an argument of a wrong type, the error names the argument.
    """
    space = "U." if ".ops." in body.__module__ else ""

    @functools.wraps(body)
    def fn(*args: Any, **kwargs: Any) -> Any:
        try:
            return WATCHERS[-1](fn, body, args, kwargs) if WATCHERS else body(*args, **kwargs)
        except Exception:
            check_arguments(f"{space}{body.__name__}", body, args, kwargs)
            raise

    return cast("Fn", fn)


#: A type -> its name in errors.
_NAMES: dict[Any, str] = {
    Tensor: "a Tensor",
    int: "an int",
    float: "a number",
    bool: "True or False",
    str: "a str",
    type(None): "None",
}
#: A type -> the method of other values that are accepted for it.
_METHODS = {Tensor: "__torch_function__", int: "__index__", float: "__float__"}


def check_arguments(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raises TypeError, replacing the current error, if an argument does not fit its annotation.

    Annotations of an unsupported type are not compared, nor are calls that lack an argument.

    >>> def half(x: int | None): ...
    >>> check_arguments("half", half, ("a",), {})
    Traceback (most recent call last):
    TypeError: half: x must be an int or None, got str 'a'
    """
    try:
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:  # Python's own error names missing and unknown arguments
        return
    hints = get_type_hints(function)
    for argument, value in arguments.items():
        by_plan = argument == "constraint" and isinstance(value, tuple)
        hint = Any if by_plan else hints.get(argument, Any)
        if not _fits(value, hint):
            got = f"{type(value).__name__} {short(value)}"
            raise TypeError(f"{name}: {argument} must be {_named(hint)}, got {got}") from None


def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The generic type and its arguments: Union, tuple (a type for each item) or Sequence."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Size or origin is list or (origin is tuple and Ellipsis in args):
        return Sequence, args[:1] or (int,)
    return Union if origin is types.UnionType else origin or hint, args


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value fits a type; True for unsupported types."""
    kind, args = _parts(hint)
    if kind is Union:
        return any(_fits(value, choice) for choice in args)
    if kind in (Sequence, tuple):
        if not isinstance(value, Sequence) or isinstance(value, str):
            return isinstance(value, Tensor)  # its rows
        each = args if kind is tuple else args * len(value)
        return all(map(_fits, value, each))
    if kind in _METHODS and hasattr(value, _METHODS[kind]):
        return True
    return kind not in _NAMES or isinstance(value, kind)


def _named(hint: Any) -> str:
    kind, args = _parts(hint)
    if kind is Union:
        return " or ".join(dict.fromkeys(map(_named, args)))
    if kind is tuple:
        return f"({', '.join(map(_named, args))})"
    if kind is Sequence:
        return f"a sequence, each {_named(args[0])}"
    return _NAMES.get(kind, str(hint))
