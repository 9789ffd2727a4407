"""Arguments of the functions of other libraries that these functions replace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_REDUCE = "fp8.reduce_amax(model, group) makes the scales of processes equal"
_TE = "call transformer_engine.pytorch.autocast, which it calls"
_RECIPE = "it is recipe=, a name or a Recipe; docs/migration.md has TransformerEngine's"

FOREIGN: dict[str, dict[str, str]] = {
    "fp8.autocast": {
        "amax_reduction_group": _REDUCE,
        "calibrating": "fp8.calibrate(model, batch) sets the scales of a converted model",
        "fp8_group": _REDUCE,
        "fp8_recipe": _RECIPE,
    },
    "fp8.adapters.transformer_engine.autocast": {
        **dict.fromkeys(("amax_reduction_group", "calibrating", "fp8_group"), _TE),
        "fp8_recipe": _RECIPE,
    },
    "fp8.initialize": {"use_te": "fp8.adapters.msamp.initialize takes it"},
}
"""Function -> argument of TransformerEngine or MS-AMP -> what to use instead."""


def refuses_foreign(function: str) -> Callable[[F], F]:
    """Decorator: an argument that `FOREIGN` lists for ``function`` raises TypeError."""

    def decorate(body: F) -> F:
        @functools.wraps(body)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs.keys() & FOREIGN[function].keys():
                raise TypeError(f"{function} has no {name!r}: {FOREIGN[function][name]}")
            return body(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate
