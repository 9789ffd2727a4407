"""Functions that observers of a model see as one call, and whose errors name wrong arguments.

The type of an argument is not checked in advance. After a call fails, its arguments are compared
with their annotations, and the first mismatch is reported.
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
#: the body; only the last is used. `unit_scaling.verify`, `track_scales` and `analyse_module` use
#: them to see the `unit_scaling` functions that a model calls by name. All threads share this list,
#: which compiled ops guard on: in other threads a watcher makes the call unchanged.
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


#: A type -> the method of values that are accepted for it.
_METHODS = {Tensor: "__torch_function__", int: "__index__", float: "__float__"}

_NAMES: dict[Any, str] = {
    Tensor: "a Tensor",
    int: "an int",
    float: "a number",
    bool: "True or False",
    str: "a str",
    type(None): "None",
}


def check_arguments(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raises TypeError, replacing the current error, if an argument does not fit its annotation.

    name: the public name of the function. Arguments without an annotation or with an unsupported
    type are not compared, nor are calls that lack an argument.

    >>> def half(x: int | None): ...
    >>> check_arguments("half", half, ("a",), {})
    Traceback (most recent call last):
    TypeError: half: x must be an int or None, got str 'a'
    """
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:  # Python's own error names missing and unknown arguments
        return
    hints = _hints(function)
    for argument, value in given.items():
        by_plan = argument == "constraint" and isinstance(value, tuple)
        hint = Any if by_plan else hints.get(argument, Any)
        if not _fits(value, hint):
            got = f"{type(value).__name__} {short(value)}"
            raise TypeError(f"{name}: {argument} must be {_named(hint)}, got {got}") from None


def named_in_errors(cls: Any) -> None:
    """Makes the class name the argument of a wrong type if its ``__init__`` fails."""
    init = cls.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except Exception:
            check_arguments(f"uu.{cls.__name__}", cls, args, kwargs)
            raise

    cls.__init__ = __init__


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotated types of the arguments; for a class, those of every inherited ``__init__``."""
    if not isinstance(function, type):
        return _types(function)
    found: dict[str, Any] = {}
    for base in reversed(function.__mro__):
        if inspect.isfunction(init := vars(base).get("__init__")):
            found |= _types(init)
    return found


def _types(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except NameError:  # a type imported only for type checkers
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value fits a type; True for unsupported types."""
    hint = Sequence[int] if hint is Size else hint
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in get_args(hint))
    if origin in (Sequence, list, tuple):
        if not isinstance(value, Sequence) or isinstance(value, str):
            return isinstance(value, Tensor)  # its rows
        each = get_args(hint)
        if _is_fixed(hint):
            return all(map(_fits, value, each))
        return all(_fits(item, kind) for item in value for kind in each[:1])
    if hint in _METHODS:
        return isinstance(value, hint) or hasattr(value, _METHODS[hint])
    return hint not in _NAMES or isinstance(value, hint)


def _named(hint: Any) -> str:
    hint = Sequence[int] if hint is Size else hint
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_named, get_args(hint))))
    if _is_fixed(hint):
        return f"({', '.join(map(_named, get_args(hint)))})"
    if origin in (Sequence, list, tuple):
        return f"a sequence, each {_named(get_args(hint)[0])}"
    return _NAMES.get(hint, str(hint))


def _is_fixed(hint: Any) -> bool:
    """Whether it is a tuple type with one type for each item."""
    return get_origin(hint) is tuple and Ellipsis not in get_args(hint)
