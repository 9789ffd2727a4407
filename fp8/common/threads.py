"""State of what is running: it belongs to the thread that runs it, or to the process as a whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["Setting", "Stack"]


class Stack(threading.local):
    """What is running, innermost last: a list of its own, empty at first, in each thread.

    A list that is changed, not an attribute that is set: torch.compile traces changes of a list in
    a thread-local, and loses the setting of an attribute. Not a context variable: torch.compile
    cannot trace one, and torch's own stack of modes belongs to the thread. Copies and pickles are
    empty: they are of what runs, not of the run.
    """

    def __init__(self) -> None:
        self.items: list[Any] = []

    def __reduce__(self) -> Any:
        return Stack, ()


class Setting:
    """A setting of the whole process, changed for as long as at least one thread holds it.

    Threads that each change such a setting and put it back would put back what another one has
    changed. change: changes it and returns what changes it back when it exits, or None where there
    is nothing to change yet.
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
