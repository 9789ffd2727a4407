"""Passes over a model: recordings that also measure the RMS of results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
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
from fp8.common.threads import apart
from fp8.modes.autocast import outside_compiler

from ..install import Args, Given, Kwargs, is_in_fsdp
from ..record.calls import CallNode, Recorder, tensors_in
from ..record.values import has_scale, is_any, is_strided, size_of

Place = tuple[str, str, int]
"""A call: the path of the running module, the kind, and how many of that kind ran there before."""

Before = Callable[[Place, Args, Kwargs], None]
"""Called before each call. It may change parameters, and arguments in place."""


class Pass(Recorder):
    """A recording of one forward pass. Its calls have places, which other passes share where they
    take other branches elsewhere (a router's).

    places: the place of a call -> its index. sizes: the place of a call -> the RMS of its result, 0
    for zeros. has_nan: whether the output has NaN. normalizes: whether results of products are
    divided by their RMS. number: of the pass. measured: the places whose sizes are recorded.
    """

    def __init__(
        self,
        names: dict[int, str],
        inputs: set[int],
        path: Callable[[], str],
        normalizes: bool,
        before: Before | None,
    ) -> None:
        super().__init__(names, inputs, path, normalizes)
        self._before = before
        self._counts: Counter[tuple[str, str]] = Counter()
        self.number = 0
        self.measured: Collection[Place] = ()
        self.places: dict[Place, int] = {}
        self.sizes: dict[Place, float] = {}
        self.has_nan = False

    def _node(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> CallNode:
        node = super()._node(function, args, kwargs)
        self._place = node.path, node.kind, self._counts[node.path, node.kind]
        if self._before is not None:
            with torch.no_grad():
                self._before(self._place, args, kwargs)
        return node

    def _add(self, node: CallNode, output: Any) -> None:
        index = len(self.nodes)
        super()._add(node, output)
        if len(self.nodes) > index:  # it has made a tensor
            self.places[self._place] = index
            self._counts[node.path, node.kind] += 1

    def _describe(self, node: CallNode, sources: Any, results: list[Tensor]) -> None:
        super()._describe(node, sources, results)
        result = max(results, key=Tensor.numel)
        is_readable = has_scale(result) and is_strided(result) and not is_masked(result)
        if self._place in self.measured and node.value.live and is_readable:
            self.sizes[self._place] = size_of(result)


def _saving_as_torch() -> AbstractContextManager[object]:
    """Within the block, tensors are saved for the backward pass without hooks: an activation
    checkpoint around the model counts them."""
    try:
        with disable_saved_tensors_hooks(""):  # which raises if there are hooks
            return nullcontext()
    except RuntimeError:
        return saved_tensors_hooks(Tensor.detach, lambda saved: saved)


def run_pass(
    model: nn.Module,
    given: Given,
    normalizes: bool = False,
    before: Before | None = None,
    number: int = 0,
    measured: Collection[Place] = (),
) -> Pass:
    """Runs the model on a copy of its arguments, in eager mode. Parameters that it writes, their
    gradients, buffers, counts and random states are as they were afterwards; ``before`` may change
    parameters. number: of the pass. measured: the places of the calls whose results are measured.
    """
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    names = {id(p): name for name, p in model.named_parameters()}
    torch.clear_autocast_cache()  # which has the weights as they were in the last pass
    try:
        with ExitStack() as stack:
            stack.enter_context(untouched(model, seed=0))
            for context in (apart(), torch.inference_mode(False), torch.enable_grad(), uncast()):
                stack.enter_context(context)
            stack.enter_context(_saving_as_torch())
            args, kwargs = detached(given)
            inputs = {id(t) for _, t in tensors_in((args, kwargs))}
            paths = stack.enter_context(running_modules(model))
            written = stack.enter_context(restored(parameters))
            seen = Pass(names, inputs, lambda: paths[-1] if paths else "", normalizes, before)
            seen.number, seen.measured = number, measured
            stack.enter_context(_gathered(model, seen))
            with seen:
                output = outside_compiler(lambda: model(*args, **kwargs))
            seen.changed = frozenset(n for n, p in model.named_parameters() if written.changed(p))
            seen.outputs = seen.nodes_of(output)
            results = [t for t in tensors_within(output) if has_scale(t) and is_strided(t)]
            seen.has_nan = any(is_any(t.isnan()) for t in results)
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        torch.clear_autocast_cache()
    return seen


@contextmanager
def _gathered(model: nn.Module, seen: Pass) -> Iterator[None]:
    """Within the block, ``seen`` knows what FSDP2 gathers of parameters. It gathers what a module
    holds before that runs, and frees it afterwards but for the root's."""

    def enter(module: nn.Module, *_: Any, path: str) -> None:
        for name, parameter in module.named_parameters(prefix=path):
            seen.name(parameter, name)

    with ExitStack() as hooks:
        for path, module in model.named_modules() if is_in_fsdp(model) else ():
            hooks.enter_context(module.register_forward_pre_hook(partial(enter, path=path)))
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
