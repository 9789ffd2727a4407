"""Functions of `unit_scaling` that are seen as one call by whoever watches a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from .argument_errors import check_arguments

__all__ = ["WATCHERS", "watched"]

Fn = TypeVar("Fn", bound=Callable[..., Any])

Watcher = Callable[[Callable[..., Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

#: Functions (the watched function, its body, args, kwargs) -> result that make the call in the
#: body's place, the last of them alone: how `unit_scaling.verify`, `track_scales` and
#: `analyse_module` see what a model calls of `unit_scaling` by name. All threads share this list,
#: which every compiled op compares: a watcher makes the call as it is where it is not its thread's.
WATCHERS: list[Watcher] = []


def watched(body: Fn) -> Fn:
    """``body``, but for calling the innermost of `WATCHERS` instead where there is one.

    A call that fails for an argument of a wrong type says so by the argument's name.
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
