"""Names, docstrings and signatures of generated functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

#: Stands for the default of an argument without a default.
REQUIRED: Any = Parameter.empty

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")
First = TypeVar("First")


def described(function: F, name: str, documentation: str | None, arguments: Mapping[str, Any]) -> F:
    """Returns ``function`` with this name, docstring and signature.

    arguments: name -> default or `REQUIRED`, in order.
    """
    function.__name__ = function.__qualname__ = name
    function.__doc__ = documentation
    kind = Parameter.POSITIONAL_OR_KEYWORD
    parameters = [Parameter(n, kind, default=default) for n, default in arguments.items()]
    function.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return function


def renamed(body: Callable[P, R], name: str, documentation: str) -> Callable[P, R]:
    """Returns a function that calls ``body``, with another name and docstring."""

    @wraps(body)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        return body(*args, **kwargs)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = documentation
    return function


def with_first(
    body: Callable[Concatenate[First, P], R], first: First, name: str, documentation: str
) -> Callable[P, R]:
    """Returns ``body`` with its first argument given, and with another name and docstring."""

    @wraps(body)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        return body(first, *args, **kwargs)

    given = signature(body)
    _, *others = given.parameters.values()
    function.__name__ = function.__qualname__ = name
    function.__doc__ = documentation
    function.__signature__ = given.replace(parameters=others)  # type: ignore[attr-defined]
    return function
