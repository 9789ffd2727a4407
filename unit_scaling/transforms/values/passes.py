"""Passes over a model: what runs one, and the pass that measures the RMS of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from fp8.casts.measuring import uncast
from fp8.common.dtensor import is_masked
from fp8.common.step import (
    detached,
    restored,
    running_modules,
    tensors_within,
    untouched,
)
from fp8.torch_internals.running_calls import apart
from fp8.torch_internals.stance import outside_compiler

from ...common.calls import Args, Function, Given, Kwargs
from ..install import is_in_fsdp
from ..record.calls import Pass, Place
from ..record.values import has_scale, is_any, is_strided, size_of

Before = Callable[[Place, Args, Kwargs], None]
"""Called before a call. It may change parameters, and arguments in place."""


class Sizes(Pass):
    """Measures the RMS of results, 0 for zeros, as ``sizes`` by name.

    name_of: the name for the result of a call, None for one that is not measured. before: is
    called before each call. has_nan: whether the output has NaN.
    """

    def __init__(self, name_of: Callable[[Place], str | None], before: Before) -> None:
        super().__init__()
        self._name_of = name_of
        self._before = before
        self.sizes: dict[str, float] = {}
        self.has_nan = False

    def end(self, output: Any, written: restored) -> None:
        results = [t for t in tensors_within(output) if has_scale(t) and is_strided(t)]
        self.has_nan = any(is_any(t.isnan()) for t in results)

    def before(
        self, place: Place, function: Function, args: Args, kwargs: Kwargs
    ) -> None:
        with torch.no_grad():
            self._before(place, args, kwargs)

    def after(self, place: Place, results: list[Tensor], begun: None) -> None:
        name = self._name_of(place)
        if name is not None:
            self.sizes[name] = read_size(max(results, key=Tensor.numel))


def read_size(tensor: Tensor) -> float:
    """The RMS of the values, 0 for zeros; 1 where they cannot be read."""
    if has_scale(tensor) and not is_masked(tensor):
        return size_of(tensor)
    return 1.0


def _saving_as_torch() -> AbstractContextManager[object]:
    """Within the block, tensors are saved for the backward pass without hooks: an activation
    checkpoint around the model counts them."""
    try:
        with disable_saved_tensors_hooks(""):  # which raises if there are hooks
            return nullcontext()
    except RuntimeError:
        return saved_tensors_hooks(Tensor.detach, lambda saved: saved)


def run_pass(model: nn.Module, given: Given, seen: Pass) -> None:
    """Runs the model on a copy of its arguments, in eager mode, observed by ``seen``. Parameters
    that the model writes, their gradients, buffers, counts and random states are as they were
    afterwards."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    torch.clear_autocast_cache()  # which has the weights as they were in the last pass
    try:
        with (
            untouched(model, seed=0),
            apart(),
            # Autograd shows functions that make no call of torch; inference mode would not.
            torch.inference_mode(False),
            torch.enable_grad(),
            uncast(),
            _saving_as_torch(),
            running_modules(model) as seen.paths,
            # A look-up with max_norm writes into its table.
            restored(parameters) as written,
            _gathered(model, seen),
        ):
            args, kwargs = detached(given)
            seen.begin((args, kwargs))
            with seen:
                output = outside_compiler(lambda: model(*args, **kwargs))
            seen.end(output, written)
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        torch.clear_autocast_cache()


@contextmanager
def _gathered(model: nn.Module, seen: Pass) -> Iterator[None]:
    """Within the block, ``seen`` knows what FSDP2 gathers of parameters. It gathers what a module
    holds before that runs, and frees it afterwards but for the root's."""

    def enter(module: nn.Module, *_: Any) -> None:
        for name, parameter in module.named_parameters(prefix=seen.path):
            seen.name(parameter, name)

    with ExitStack() as hooks:
        for module in model.modules() if is_in_fsdp(model) else ():
            hooks.enter_context(module.register_forward_pre_hook(enter))
        try:
            yield
        finally:
            reshard(model)


def reshard(model: nn.Module) -> None:
    """Frees what FSDP2 has gathered, so that the parameters are the parts of each process."""
    parts: list[Any] = list(model.modules())
    for part in parts:
        if hasattr(part, "reshard"):
            part.reshard()
