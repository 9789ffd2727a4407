"""Names, arguments and choices that this library does not have: those that it once had, and those
that users of other libraries expect. Each error says what to use instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

INSTEAD: dict[str, dict[str, str]] = {
    "fp8": {
        "export_weights": "model.state_dict() loads into the plain model; at O3 "
        "fp8.optim.AdamW(plain.parameters()).load_state_dict(optimizer.state_dict()) then writes "
        "the masters to its weights. fp8.export writes files for serving",
        "state": "fp8.optim.state_bytes(optimizer) counts the bytes of weights, gradients and "
        "states, and p.nbytes those of one parameter",
    },
}
"""Owner -> name -> what to use instead. The owner is a module ("fp8.optim") for a name in it, a
function or class ("fp8.autocast") for an argument, and the argument ("recipe") for a choice."""


def check_not_removed(owner: str, name: object, error: type[Exception]) -> None:
    """Raises ``error`` if ``name`` is listed in INSTEAD under ``owner``."""
    instead = INSTEAD.get(owner, {}).get(name) if isinstance(name, str) else None
    if instead is not None:
        raise error(f"{owner} has no {name!r}: {instead}")


def attributes_of(module: str) -> Callable[[str], NoReturn]:
    """The ``__getattr__`` of a module whose removed names are listed in INSTEAD."""

    def __getattr__(name: str) -> NoReturn:
        check_not_removed(module, name, AttributeError)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


def refuses_removed(owner: str) -> Callable[[F], F]:
    """Decorator of a function or of an ``__init__``: a call with an argument that INSTEAD lists
    under ``owner`` raises a TypeError that says what to use instead."""

    def decorated(function: F) -> F:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs.keys() & INSTEAD.get(owner, {}).keys():
                check_not_removed(owner, name, TypeError)
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorated
