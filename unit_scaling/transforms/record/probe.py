"""Observes the calls of a model as it makes them, before any transform replaces them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from fp8.common.threads import Stack

from ...common.watched import WATCHERS
from ..install import Args, Call, Given, Kwargs, Scope, pushed
from .calls import Calls

unseen = torch.DisableTorchFunction
"""Disables function modes within the block, so that plans do not count its calls."""


_OBSERVERS = Stack()
"""The observers of the module that is running in this thread, innermost last, which alone sees
calls; None for none."""


def unobserved() -> AbstractContextManager[None]:
    """Within the block, no observer of this thread sees a call."""
    return pushed(_OBSERVERS.items, None)


def _watch(function: Any, body: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """As in `WATCHERS`: passes a call to the innermost observer of the calling thread."""
    observer = _OBSERVERS.items[-1] if _OBSERVERS.items else None
    if observer is None or not observer.sees():
        return body(*args, **kwargs)
    return observer.see(function, args, kwargs)


class Observer(Calls):
    """Observes a call of a model: torch functions, and what of `unit_scaling` the model calls by
    name, but not what those call in turn. path: that of the `Observing` that it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Stack()

    def inside(self, call: Call, path: str, given: Given) -> Any:
        """Returns ``call()``, with this mode above all other modes of the module."""
        with (
            pushed(self.path.items, path),
            pushed(_OBSERVERS.items, self),
            pushed(WATCHERS, _watch),
            self,
        ):
            return call()

    def sees(self) -> bool:
        """Whether the call is the model's, not this package's or a recording's."""
        return not self._busy and _OBSERVERS.items[-1:] == [self]


class Observing(Scope):
    """Passes the modules of a model to the observer of this thread, if there is one. It is entered
    last, so that the observer's mode is above those of the transforms."""

    order = 9
    each = True

    def __init__(self) -> None:
        self.path = Stack()
        self._observers = Stack()

    def run(self, call: Call, module: nn.Module, path: str, given: Given) -> Any:
        observers = self._observers.items
        observed = observers and _OBSERVERS.items[-1:] != [None]
        return observers[-1].inside(call, path, given) if observed else call()

    @property
    def active(self) -> bool:
        return bool(self._observers.items)

    def by(self, observer: Observer) -> AbstractContextManager[None]:
        """Within the block, ``observer`` observes the model."""
        observer.path = self.path
        return pushed(self._observers.items, observer)
