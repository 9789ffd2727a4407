"""Warnings about code that runs without an error but probably does not do what was intended.

Each warning is shown once. All are subclasses of `PitfallWarning`; `strict` turns them into errors.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch

from .common.compiler import eager_only
from .common.validation import check_flag


class PitfallWarning(UserWarning):
    """Base class of all warnings of this package. Filter it, or a subclass, with `warnings`."""


class RecipeWarning(PitfallWarning):
    """A recipe does not fit the model: its casts lose values that another recipe would preserve."""


class ConvertWarning(PitfallWarning):
    """A conversion changed nothing, or not what its arguments suggest."""


class RoundingWarning(PitfallWarning):
    """Rounding removes most of an update of weights in low precision, such as a merged adapter."""


class ScaleWarning(PitfallWarning):
    """A tensor of a unit-scaled model has an RMS far from 1, or an operand an RMS far from its
    static scale."""


class OptimizerWarning(PitfallWarning):
    """An optimizer updates the wrong parameters, or uses the wrong learning rate for them."""


_LOCK = threading.Lock()
_SHOWN = weakref.WeakKeyDictionary[Any, set[tuple[type[PitfallWarning], str]]]()
"""Object -> the warnings shown about it; of those about none, the object is `PitfallWarning`."""
_STRICT = [False]
OWN = tuple(
    str(Path(folder).resolve())
    for folder in (Path(__file__).parent, Path(__file__).parents[1] / "unit_scaling")
)
"""The folders of this project's code."""
_TORCH = str(Path(torch.__file__).parent)


class strict:
    """Raises every `PitfallWarning` as an error. Call it once, or use it as a context manager.

    The setting applies to the whole process, including all threads.

    Args:
        enabled: False restores warnings.

    Raises:
        TypeError: if ``enabled`` is not a bool.

    >>> import fp8
    >>> with fp8.strict():
    ...     pass  # a PitfallWarning in here is an exception
    """

    def __init__(self, enabled: bool = True) -> None:
        check_flag("enabled", enabled)
        self._before = _STRICT[0]
        _STRICT[0] = enabled

    def __enter__(self) -> strict:
        return self

    def __exit__(self, *error: Any) -> None:
        _STRICT[0] = self._before


@eager_only()
def warn_once(
    category: type[PitfallWarning], message: str, about: Any = None, key: str = ""
) -> None:
    """`show`, once per ``about``, ``category`` and ``key``; nothing while torch.compile traces.
    about: a module or an optimizer, held by a weak reference; None: once per process."""
    if _STRICT[0]:
        raise category(message)
    with _LOCK:
        shown = _SHOWN.setdefault(PitfallWarning if about is None else about, set())
        if (category, key) in shown:
            return
        shown.add((category, key))
    show(category, message)


def show(category: type[PitfallWarning], message: str) -> None:
    """Shows a warning that points to the line of the user's code; raises it under `strict`."""
    if _STRICT[0]:
        raise category(message)
    warnings.warn(message, category, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """The stacklevel, for `show`, of the innermost frame outside of this project and torch."""
    level, frame = 1, sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*OWN, _TORCH)):
            return level
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    return 2
