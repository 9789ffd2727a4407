"""State that belongs to the running thread, or to the process as a whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class Stack(threading.local):
    """A per-thread stack of what is running, innermost last; initially empty in each thread.

    It is a list that is mutated, because torch.compile traces mutations of a list in a thread-local
    but loses attribute assignments. It is not a context variable, which torch.compile cannot trace;
    torch's own mode stack is per thread too. Copies and pickles are empty.
    """

    def __init__(self) -> None:
        self.items: list[Any] = []

    def __reduce__(self) -> Any:
        return Stack, ()


class Setting:
    """A process-wide setting that is changed while at least one thread holds it.

    If each thread changed and restored such a setting itself, a thread could restore the value that
    another one set. change: changes the setting and returns a context manager whose exit restores
    it, or None if there is nothing to change yet.
    """

    def __init__(self, change: Callable[[], AbstractContextManager[Any] | None]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._holders = 0
        self._changed: AbstractContextManager[Any] | None = None

    def hold(self) -> None:
        with self._lock:
            if self._changed is None:
                self._changed = self._change()
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._changed is not None:
                self._changed.__exit__(None, None, None)
                self._changed = None

    def __enter__(self) -> None:
        self.hold()

    def __exit__(self, *error: Any) -> None:
        self.release()
