"""Observes the calls of a model, and the modules that make them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fp8.common.step import running_modules
from fp8.frame import FRAMES, framed

from ...common.calls import Args, Function, Kwargs
from ...common.watched import watched_by
from .calls import Calls

unseen = torch.DisableTorchFunction
"""Disables function modes within the block, so that plans do not count its calls."""


def is_observed() -> bool:
    """Whether a call of this thread is one of an observed model, or of the first call of one."""
    return FRAMES.items[-1].observer is not None


def _watch(
    function: Function,
    body: Function,
    args: Args,
    kwargs: Kwargs,
) -> object:
    """Passes a call to the innermost observer of the calling thread: a function of `WATCHERS`."""
    observer = FRAMES.items[-1].observer
    if not observer or not observer.sees():
        return body(*args, **kwargs)
    return observer.see(function, args, kwargs)


class Observer(Calls):
    """Observes a call of a model: torch functions, and what of `unit_scaling` the model calls by
    name, but not what those call in turn."""

    def sees(self) -> bool:
        """Whether the call is the model's, not this package's or a recording's."""
        return not self._busy and FRAMES.items[-1].observer is self

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Within the block, it sees the calls of ``model`` in this thread."""
        with (
            running_modules(model) as self.paths,
            framed(observer=self),
            watched_by(_watch),
            self,
        ):
            yield
