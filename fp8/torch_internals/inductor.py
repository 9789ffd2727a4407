"""Kernels of inductor outside of torch.compile. Imported late, because it imports the compiler.

Works around: `torch.compile` holds a lock that a thread which is being compiled may hold, and shows
no configuration of a kernel but the one that autotuning found fastest (2.11 to 2.14).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, _inductor
from torch.fx.experimental.proxy_tensor import make_fx

from . import TorchFunction
from .compiling_flag import marked_as_compiling


def run_compiled(
    function: Callable[..., Sequence[Tensor]], *args: Tensor
) -> Sequence[Tensor]:
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


def compiled(function: Callable[..., Sequence[Tensor]], *args: Tensor) -> TorchFunction:
    """``function``, without gradients, as inductor compiles it for tensors like ``args``; takes no
    lock of the compiler."""
    with torch.no_grad(), marked_as_compiling(True):
        return _inductor.compile(make_fx(function)(*args), list(args))
