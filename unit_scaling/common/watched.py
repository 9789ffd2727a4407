"""Functions of `unit_scaling` that observers of a model see as one call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from .argument_errors import check_arguments

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
