"""The flag of `torch.compiler.is_compiling` while the compiler calls functions of these packages.
Imported late, because it imports the compiler.

Works around: before torch 2.13 the flag is false there, and a function that decides by it takes the
way of eager code in a graph.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.autograd import Function

from . import Arguments, Keywords
from .pipelining import refuse_split_graphs

#: Whether `torch.compiler.is_compiling` is false while the compiler calls `call_by_name`, or the
#: backward of an autograd function.
_UNMARKED = torch.__version__ < "2.13"


_LOCK = threading.Lock()
#: The flag at each open `marked_as_compiling`, of all threads: the last restores the first.
_BEFORE: list[bool] = []


@contextmanager
def marked_as_compiling(sets: bool = _UNMARKED) -> Iterator[None]:
    """Sets the private flag of `torch.compiler.is_compiling`, as torch itself does from 2.13 on:
    else `same` and `unaliased` would return views whose gradients are lost."""
    if not sets:
        yield
        return
    with _LOCK:
        _BEFORE.append(torch.compiler._is_compiling_flag)
        torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        with _LOCK:
            last = _BEFORE.pop()
            torch.compiler._is_compiling_flag = bool(_BEFORE) or last


@torch.compiler.allow_in_graph
def call_by_name(name: str, args: Arguments, kwargs: Keywords) -> Any:
    """Calls the function that `in_graph` has decorated, without the compiler tracing into it. Its
    name, since a graph can hold a string where it cannot hold a class."""
    refuse_split_graphs()
    module, _, attribute = name.rpartition(".")
    function = getattr(sys.modules[module], attribute)
    with marked_as_compiling():
        return function.in_graph(*args, **kwargs)


@cache
def marked(function: type[Function]) -> type[Function]:
    """``function``, whose backward counts as compiled too."""
    if not _UNMARKED:
        return function

    def backward(*args: Any) -> Any:
        with marked_as_compiling():
            return function.backward(*args)

    return type(function.__name__, (function,), {"backward": staticmethod(backward)})
