"""The names that arguments may have: one error for those that they may not."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["check_name"]


def check_name(what: str, got: object, allowed: Iterable[object]) -> None:
    """Raises ValueError unless ``got`` is one of those ``allowed``. what: the argument.

    >>> check_name("rounding", "up", ("nearest", "stochastic"))
    Traceback (most recent call last):
    ValueError: unknown rounding 'up'; choose one of 'nearest', 'stochastic'
    """
    names = tuple(allowed)
    if got not in names:
        raise ValueError(f"unknown {what} {got!r}; choose one of {', '.join(map(repr, names))}")
