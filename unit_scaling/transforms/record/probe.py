"""Observes the calls of a model as it makes them, before any transform replaces them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp8.common.compiler import FIRST_LOOK
from fp8.common.threads import Stack

from ...common.watched import WATCHERS
from ..install import Call, Given, Scope
from .calls import Calls, Recorder, tensors_in

unseen = torch.DisableTorchFunction
"""Disables function modes within the block, so that plans do not count its calls."""


def on_its_own(output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a product, for a hook: a copy if it is new. It may be a view (a linear map of
    three dimensions), and once another view of its base is written in place, gradients pass by.
    """
    if not isinstance(output, Tensor) or not output.requires_grad:
        return output
    given = (*tensors_in(args), *tensors_in(kwargs))
    return output if any(output is t for _, t in given) else output.clone()


_OBSERVERS = Stack()
"""The observers of the module that is running in this thread, innermost last."""


def _watch(
    function: Callable[..., Any],
    body: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """As in `WATCHERS`: passes a call to the innermost observer of the calling thread."""
    observer = _OBSERVERS.items[-1] if _OBSERVERS.items else None
    if observer is None or not observer.sees():
        return body(*args, **kwargs)
    return observer.see(function, args, kwargs)


class Observer(Calls):
    """Observes a call of a model: torch functions, and the ops of `unit_scaling`, residual
    connections and scales that the model calls by name, but not what those call in turn. path: of
    the `Observing` that it is in."""

    path: Stack

    def begin(self, module: nn.Module, given: Given) -> None:
        """Called when the model is called."""

    def end(self, output: Any) -> None:
        """Called when the model returns ``output``."""

    def inside(self, call: Call, module: nn.Module, path: str, given: Given) -> Any:
        """Returns ``call()``, with this mode above all other modes of the module."""
        outermost = not self.path.items
        if outermost:
            self.begin(module, given)
        self.path.items.append(path)
        _OBSERVERS.items.append(self)
        WATCHERS.append(_watch)
        try:
            with self:
                output = call()
        finally:
            WATCHERS.pop()
            _OBSERVERS.items.pop()
            self.path.items.pop()
        if outermost:
            self.end(output)
        return output

    def sees(self) -> bool:
        """Whether the call is the model's, not this package's or a recording's."""
        recorded = any(isinstance(mode, Recorder) for mode in FIRST_LOOK.items)
        return bool(self.path.items) and not (self._busy or recorded)


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
        return observers[-1].inside(call, module, path, given) if observers else call()

    @property
    def active(self) -> bool:
        return bool(self._observers.items)

    @contextmanager
    def by(self, observer: Observer) -> Iterator[None]:
        """Within the block, ``observer`` observes the model."""
        observer.path = self.path
        self._observers.items.append(observer)
        try:
            yield
        finally:
            self._observers.items.pop()
