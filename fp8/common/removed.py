"""Names, arguments and choices that this library does not have: those that it once had, and those
that users of other libraries expect. Each error says what to use instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

INSTEAD: dict[str, dict[str, str]] = {
    "fp8.optim": {
        "Muon": (
            "use torch.optim.Muon for hidden matrices and fp8.optim.AdamW for all other parameters"
        ),
        "muon_groups": (
            "give torch.optim.Muon the weights of linear layers inside of the blocks, and all "
            "other parameters to fp8.optim.AdamW"
        ),
    },
    "fp8.optim.AdamW": {
        "error_feedback": (
            "use stochastic_weights=True, which keeps no more bytes, or master_weights"
        ),
    },
    "first_moment": {"int8_block": "use 'e4m3_block', which takes as many bytes"},
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
