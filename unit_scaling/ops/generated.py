"""Names, docstrings and signatures of generated functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any, TypeVar

__all__ = ["REQUIRED", "described"]

#: Stands for the default of an argument without a default.
REQUIRED: Any = Parameter.empty

F = TypeVar("F", bound=Callable[..., Any])


def described(function: F, name: str, documentation: str | None, arguments: Mapping[str, Any]) -> F:
    """Returns ``function`` with this name, docstring and signature.

    arguments: name -> default or `REQUIRED`, in order; ``inplace`` is keyword-only.
    """
    function.__name__ = function.__qualname__ = name
    function.__doc__ = documentation
    kinds = {"inplace": Parameter.KEYWORD_ONLY}
    function.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(n, kinds.get(n, Parameter.POSITIONAL_OR_KEYWORD), default=default)
            for n, default in arguments.items()
        ]
    )
    return function
