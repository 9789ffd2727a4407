"""Names, arguments and choices that this library does not have: those that it once had, and those
that users of other libraries expect. Each error says what to use instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_OF_A_CAST = {
    "mean": "leave it out; the mean of an operand is cast with the rest",
    "random_bits": "leave it out; stochastic rounding in casts draws 31 random bits",
    "residual": "leave it out; rounding errors are not cast again",
}
_OF_A_RECIPE = dict.fromkeys(
    ("attention_scores", "attention_values"),
    'leave it out; attention is one product, cast as "input" and "grad"',
)

INSTEAD: dict[str, dict[str, str]] = {
    "fp8.Cast": _OF_A_CAST,
    "fp8.Recipe": _OF_A_RECIPE,
    "fp8.adapters.transformers": {
        "register_attention": 'use set_attn_implementation("sdpa"), which casts query, key, value '
        'and the gradient of the output, or "eager", which casts the probabilities too',
    },
    "key of a Cast": _OF_A_CAST,
    "key of a Recipe": _OF_A_RECIPE,
    "recipe": {
        "coat": "use Recipe.saved_activations of a recipe of your own",
        "fog": 'use "delayed", or casts with history=1024',
        "moss": 'use "block"',
        "mus": 'use "unit" with fp8.Policy.hidden("unit")',
        "smooth_swiglu": 'use "delayed", whose casts are the same',
        "ufp4": 'use "nvfp4", or casts of format "e1m2" with scaling "block"',
    },
    "rule": {"two_level": 'use scaling "block" with its rule "up"'},
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
