"""A stance of torch.compile for some threads.

Works around: `torch.compiler.set_stance` (2.11 to 2.14) sets that of the process.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator, nullcontext
from typing import Any, cast

import torch

from ..frame import FRAMES, IN_PIECES, close_frame, open_frame


class _Stance(str):
    """A stance of torch.compile that is "force_eager" in threads that hold `STANCE`, and ``before``
    in others. The compiler compares it with the names of stances."""

    before = "default"
    __hash__ = str.__hash__

    def __eq__(self, name: object) -> bool:
        return name == ("force_eager" if FRAMES.items[-1].uncompiled else self.before)

    def __ne__(self, name: object) -> bool:
        return not self == name


def _set_stance() -> AbstractContextManager[object]:
    stance = _Stance("force_eager")
    try:  # imports the compiler, as every optimizer does: torch.cond would import it otherwise
        context: Any = torch.compiler.set_stance(stance)
    except RuntimeError as error:
        raise RuntimeError(IN_PIECES) from error
    stance.before = context.prev.stance
    return cast("AbstractContextManager[object]", context)


class _Uncompiled(ContextDecorator):
    """Holds torch.compile at its stance "force_eager" in the threads that hold it, while at least
    one does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._changed: AbstractContextManager[object] = nullcontext()

    def hold(self) -> None:
        with self._lock:
            if not self._holders:
                self._changed = _set_stance()
            self._holders += 1
        open_frame(self, uncompiled=True)

    def release(self, *error: object) -> None:
        close_frame(self)
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._changed.__exit__(None, None, None)

    __enter__, __exit__ = hold, release


STANCE = _Uncompiled()


def outside_compiler(call: Callable[[], Any]) -> Any:
    """``call()`` without compilation in all of it, in this thread: a mode that is active in eager
    code would intercept again what was compiled under a mode."""
    if torch.compiler.is_dynamo_compiling():  # which traces no cached function
        return torch.compiler.disable(STANCE(call))()
    return _uncompiled()(call)


@functools.cache
def _uncompiled() -> Callable[[Callable[[], Any]], Any]:
    """Made once: the compiler wraps each function that it is disabled for."""
    return torch.compiler.disable(lambda call: STANCE(call)())
