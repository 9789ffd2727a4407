"""Argument checks: one error each for an invalid name, number, count and flag."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from .compiler import eager_only


def check_name(
    what: str,
    got: object,
    allowed: Iterable[object],
    note: str = "",
) -> None:
    """Raises ValueError, with the `nearest` name and ``note``, unless ``got`` is in ``allowed``.

    >>> check_name("rounding", "up", ("nearest", "stochastic"))
    Traceback (most recent call last):
    ValueError: unknown rounding 'up'; choose one of 'nearest', 'stochastic'
    """
    names = tuple(allowed)
    if got not in names:
        listed = ", ".join(map(repr, names)) + nearest(got, names)
        raise ValueError(f"unknown {what} {got!r}; choose one of {listed}{note}")


def nearest(got: object, names: tuple[object, ...]) -> str:
    """The end of a message: the name that is spelled alike; "" without one."""
    lower = {name.lower(): name for name in names if isinstance(name, str)}
    if isinstance(got, str):
        for match in get_close_matches(got.lower(), lower, n=1):
            return f"; did you mean {lower[match]!r}?"
    return ""


def check_number(what: str, got: Any) -> None:
    """Raises TypeError unless ``got`` is a number or a one-element tensor."""
    one = isinstance(got, torch.Tensor) and got.numel() == 1
    if isinstance(got, bool) or not (one or isinstance(got, int | float)):
        raise TypeError(f"{what} must be a number, got {got!r}")


def check_whole(
    what: str,
    got: Any,
    lowest: int = 1,
) -> None:
    """Raises TypeError unless ``got`` is an int (no bool), ValueError if it is below ``lowest``."""
    if isinstance(got, bool) or not isinstance(got, int):
        raise TypeError(f"{what} must be a whole number from {lowest}, got {got!r}")
    if got < lowest:
        raise ValueError(f"{what} must be a whole number from {lowest}, got {got!r}")


def check_flag(what: str, got: object) -> None:
    """Raises TypeError unless ``got`` is True or False."""
    if not isinstance(got, bool):
        raise TypeError(f"{what} must be True or False, got {got!r}")


def check_choice(
    what: str,
    got: object,
    allowed: Iterable[str],
    note: str = "",
) -> None:
    """`check_name`; raises TypeError unless ``got`` is a string."""
    if not isinstance(got, str):
        raise TypeError(f"{what} is a {type(got).__name__}; give a name")
    check_name(what, got, allowed, note)


def check_between(
    what: str,
    got: object,
    low: int,
    high: int,
) -> None:
    """Raises ValueError unless ``got`` is an int (not a bool) from ``low`` to ``high``."""
    if isinstance(got, bool) or not (isinstance(got, int) and low <= got <= high):
        raise ValueError(f"{what} must be {low} to {high}, got {got!r}")


def names_of(kind: type) -> tuple[str, ...]:
    """The names of the fields of a dataclass."""
    return tuple(field.name for field in fields(kind))


def check_keys(
    what: str,
    got: Mapping[str, Any],
    allowed: Iterable[str],
    needed: Iterable[str] = (),
) -> None:
    """Raises unless ``got``, read as a ``what``, is a mapping with keys ``allowed``, all those
    ``needed`` among them."""
    names = tuple(allowed)
    if not isinstance(got, Mapping):
        raise TypeError(
            f"a {what} is read from a dict, not from a {type(got).__name__}"
        )
    for key in got:
        check_choice(f"key of a {what}", key, names)
    missing = [key for key in needed if key not in got]
    if missing:
        raise ValueError(
            f"a {what} needs the keys {', '.join(map(repr, needed))}; got "
            f"{', '.join(map(repr, got)) or 'none'}, without {', '.join(map(repr, missing))}"
        )


@eager_only()
def refuse_transformed(value: torch.Tensor) -> None:
    """Raises NotImplementedError if ``value``, which becomes state, was computed under a transform
    of `torch.func`."""
    if torch.func.debug_unwrap(value) is not value:
        raise NotImplementedError(
            "a recipe that keeps scales between passes, or fp8.calibrate, would store a value that "
            "was computed under a transform of torch.func (grad, vmap, ...), outside of which it "
            "does not exist: set static scales before, by fp8.calibrate(model, scales=...) or by a "
            'step without the transform, or use a recipe without state, such as "tensor"'
        )


def check_module(what: str, model: object) -> None:
    """Raises TypeError unless ``model`` is an nn.Module. what: the name of the calling function."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{what} needs an nn.Module, got {type(model).__name__}")
