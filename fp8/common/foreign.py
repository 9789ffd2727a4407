"""Arguments of the functions of other libraries that these functions replace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_REDUCE = (
    "fp8.reduce_amax(model, group) makes the scales of processes equal; "
    "transformer_engine.pytorch.autocast takes it for its own layers"
)

FOREIGN: dict[str, str] = {
    **dict.fromkeys(("amax_reduction_group", "fp8_group"), _REDUCE),
    "calibrating": "fp8.calibrate(model, batch) sets the scales of a converted model",
    "fp8_recipe": "it is recipe=, a name or a Recipe; docs/migration.md has TransformerEngine's",
    "use_te": "fp8.adapters.msamp.initialize takes it",
}
"""Argument of TransformerEngine or MS-AMP -> what to use instead."""


def refuses_foreign(function: str) -> Callable[[F], F]:
    """Decorator of ``function``: an argument that `FOREIGN` lists raises TypeError."""

    def decorate(body: F) -> F:
        @functools.wraps(body)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs.keys() & FOREIGN.keys():
                raise TypeError(f"{function} has no {name!r}: {FOREIGN[name]}")
            return body(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate
