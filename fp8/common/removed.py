"""Names, arguments and choices that this library does not have: those that it once had, and those
that users of other libraries expect. Each error says what to use instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

INSTEAD: dict[str, dict[str, str]] = {
    "fp8": {
        "NoEffectWarning": "it is a ConvertWarning",
        "Preflight": "it is in fp8.studies.preflight",
        "PreflightError": "it is in fp8.studies.preflight",
        "dump": "it is in fp8.studies.stats",
        "get_format": "use FORMATS[name]",
        "get_recipe": "use RECIPES[name]",
        "is_fast_norm": "apply_low_precision_layernorm changes the norms of a model",
        "low_precision_norms": "use apply_low_precision_layernorm, for norms of every type with "
        "where=lambda name, norm: True",
        "norm_report": "use report, which lists norms too",
        "quantize_backward": "it is in fp8.formats.quantize",
        "quantize_forward": "it is in fp8.formats.quantize",
        "revert_norms": "use revert, which reverts norms too",
        "set_fast_norm": "use apply_low_precision_layernorm after the model is made",
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
