"""The stance "force_eager" of torch.compile, while at least one block holds it.

Works around: `torch.compiler.set_stance` (2.11 to 2.14) restores the stance that it found, so that
two threads, of which the first to set it is the first to restore it, leave the stance of a block.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import ContextDecorator, ExitStack
from typing import TypeVar

import torch

from ..frame import IN_PIECES

T = TypeVar("T")


class _Uncompiled(ContextDecorator):
    """Holds torch.compile at its stance "force_eager", in all threads, while a thread holds it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._changed = ExitStack()

    def hold(self) -> None:
        with self._lock:
            if not self._holders:
                try:
                    # Imports the compiler, as every optimizer does.
                    stance = torch.compiler.set_stance("force_eager")
                except RuntimeError as error:
                    raise RuntimeError(IN_PIECES) from error
                self._changed.enter_context(stance)
            self._holders += 1

    def release(self, *error: object) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._changed.close()

    __enter__, __exit__ = hold, release


STANCE = _Uncompiled()


def outside_compiler(call: Callable[[], T]) -> T:
    """``call()`` without compilation in all of it: a mode that is active in eager code would
    intercept again what was compiled under a mode."""
    if torch.compiler.is_dynamo_compiling():  # which traces no cached function
        return torch.compiler.disable(STANCE(call))()
    return _uncompiled()(call)


@functools.cache
def _uncompiled() -> Callable[[Callable[[], T]], T]:
    """Made once: the compiler wraps each function that it is disabled for."""
    return torch.compiler.disable(lambda call: STANCE(call)())
