"""Imported only while a graph is compiled, because it imports the compiler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, _inductor
from torch.autograd import Function
from torch.fx.experimental.proxy_tensor import make_fx

from .threads import GRAPH_FUNCTIONS, refuse_split_graphs

_UNMARKED = torch.__version__ < "2.13"
"""Whether `torch.compiler.is_compiling` is false while the compiler calls `apply`, or the backward
of an autograd function."""


_LOCK = threading.Lock()
_BEFORE: list[bool] = []
"""The flag at each open `_marked`, of all threads: the first value is restored by the last."""


@contextmanager
def _marked(sets: bool = _UNMARKED) -> Iterator[None]:
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
def apply(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the function ``name`` of `GRAPH_FUNCTIONS`. The compiler does not trace into it."""
    refuse_split_graphs()
    with _marked():
        return GRAPH_FUNCTIONS[name](*args, **kwargs)


@cache
def marked(function: type[Function]) -> type[Function]:
    """``function``, whose backward counts as compiled too."""
    if not _UNMARKED:
        return function

    def backward(*args: Any) -> Any:
        with _marked():
            return function.backward(*args)

    return type(function.__name__, (function,), {"backward": staticmethod(backward)})


def run_compiled(function: Callable[..., Sequence[Tensor]], *args: Tensor) -> Sequence[Tensor]:
    """``compiled(function, *args)(*args)``."""
    return compiled(function, *args)(*args)


def in_each_configuration(
    function: Callable[..., Sequence[Tensor]], x: Tensor
) -> Iterator[Sequence[Tensor]]:
    """The results of ``function``, compiled, in each configuration of its Triton kernels that
    autotuning chooses from; once on a CPU, which has none."""
    if x.device.type == "cpu":
        yield run_compiled(function, x)
        return
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    tuners: list[tuple[Any, list[Any]]] = []
    tune, here = CachingAutotuner.autotune_to_one_config, threading.get_ident()

    def take_first(tuner: Any, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == here:
            tuners.append((tuner, tuner.launchers))
            tuner.launchers = tuner.launchers[:1]
        else:
            tune(tuner, *args, **kwargs)

    # Without the configuration that an earlier process found best.
    with _inductor.config.patch(autotune_local_cache=False):
        run = compiled(function, x)
        with mock.patch.object(CachingAutotuner, "autotune_to_one_config", take_first):
            yield run(x)
    for i in range(1, max((len(launchers) for _, launchers in tuners), default=1)):
        for tuner, launchers in tuners:
            tuner.launchers = [launchers[i % len(launchers)]]
            tuner._cached_launcher = None  # of torch 2.14
        yield run(x)


def compiled(function: Callable[..., Sequence[Tensor]], *args: Tensor) -> Callable[..., Any]:
    """``function``, without gradients, as inductor compiles it for tensors like ``args``; takes no
    lock of the compiler."""
    with torch.no_grad(), _marked(True):
        return _inductor.compile(make_fx(function)(*args), list(args))
