"""The names that arguments may have: one error for those that they may not."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["check_name"]


def check_name(what: str, got: object, allowed: Iterable[object]) -> None:
    """Raises ValueError unless ``got`` is one of those ``allowed``. what: the argument.

    The error names the one that is nearest in spelling, if there is one.

    >>> check_name("rounding", "up", ("nearest", "stochastic"))
    Traceback (most recent call last):
    ValueError: unknown rounding 'up'; choose one of 'nearest', 'stochastic'
    """
    names = tuple(allowed)
    if got not in names:
        near = _nearest(got, names)
        hint = "" if near is None else f"; did you mean {near!r}?"
        listed = ", ".join(map(repr, names))
        raise ValueError(f"unknown {what} {got!r}; choose one of {listed}{hint}")


def _nearest(got: object, names: tuple[object, ...]) -> str | None:
    """The name that differs in case alone, begins so, or is spelled alike."""
    if not isinstance(got, str) or not got:
        return None
    lower = {name.lower(): name for name in names if isinstance(name, str)}
    begun = [name for name in lower if name.startswith(got.lower())]
    found = [got.lower()] if got.lower() in lower else begun[:1] if len(begun) == 1 else []
    found = found or get_close_matches(got.lower(), lower, n=1)
    return lower[found[0]] if found else None
