"""The types of what calls or wraps any function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Given = tuple[Args, Kwargs]
"""The positional and the keyword arguments of a call."""

Fn = TypeVar("Fn", bound=Function)
T = TypeVar("T")
P = ParamSpec("P")
