"""Names, docstrings and signatures of generated functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

#: Stands for the default of an argument without a default.
REQUIRED: Any = Parameter.empty

#: The arguments of every op with a constraint, after torch's.
CONSTRAINT = {"constraint": "to_output_scale"}

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


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Name -> default or `REQUIRED` of each argument, for `described`."""
    return {p.name: p.default for p in signature(function).parameters.values()}


def by_name(
    name: str, names: tuple[str, ...], args: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call after the first by name, without their defaults."""
    if len(args) > len(names):
        raise TypeError(f"{name} takes {len(names) + 1} arguments by position")
    return {**dict(zip(names, args, strict=False)), **named}


def renamed(body: Callable[P, R], name: str, documentation: str) -> Callable[P, R]:
    """Returns a function that calls ``body``, with another name and docstring."""

    @wraps(body)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        return body(*args, **kwargs)

    return described(function, name, documentation, defaults_of(body))


def with_first(
    body: Callable[Concatenate[First, P], R], first: First, name: str, documentation: str
) -> Callable[P, R]:
    """Returns ``body`` with its first argument bound, and with another name and docstring."""

    @wraps(body)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        return body(first, *args, **kwargs)

    _, *others = defaults_of(body).items()
    return described(function, name, documentation, dict(others))
