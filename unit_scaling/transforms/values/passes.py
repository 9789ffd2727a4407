"""Passes over a copy of a model: recordings that also measure the RMS of each result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from fp8.casts.measuring import uncast
from fp8.common.step import (
    Batch,
    arguments,
    detached,
    restored,
    running_modules,
    tensors_within,
    untouched,
)
from fp8.common.threads import apart

from ..install import Args, Kwargs
from ..record.calls import CallNode, Recorder, tensors_in
from ..record.kinds import KINDS, canonical, kind_of
from ..record.values import has_scale, has_values, is_strided, rms_of

Place = tuple[str, str, int]
"""A call: the path of the running module, the kind, and how many of that kind ran there before."""

Before = Callable[[Place, Args, Kwargs], None]
"""Called before each call. It may change parameters, and arguments in place."""


class Pass(Recorder):
    """A recording of one forward pass. Its calls have places, which other passes share where they
    take other branches elsewhere (a router's).

    places: the place of a call -> its index. sizes: the place of a call -> the RMS of its result, 0
    for zeros. has_nan: whether the output has NaN. normalizes: whether results of products are
    divided by their RMS.
    """

    def __init__(
        self,
        names: dict[int, str],
        inputs: set[int],
        path: Callable[[], str],
        normalizes: bool,
        before: Before | None,
    ) -> None:
        super().__init__(dict(KINDS), names, inputs, path, normalizes)
        self._before = before
        self._counts: Counter[tuple[str, str]] = Counter()
        self.places: dict[Place, int] = {}
        self.sizes: dict[Place, float] = {}
        self.has_nan = False

    def observe(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        args, kwargs = canonical(function, args, kwargs)
        for slot, tensor in (*tensors_in(args), *tensors_in(kwargs)):
            self._input(slot, tensor)  # its node comes before that of the call
        kind = self.kinds.get(function) or kind_of(function)
        path, index = self.path(), len(self.nodes)
        self._place = path, kind, self._counts[path, kind]
        if self._before is not None:
            with torch.no_grad(), torch.DisableTorchFunction():
                self._before(self._place, args, kwargs)
        output = super().observe(function, args, kwargs)
        if len(self.nodes) > index:  # it has made a tensor
            self.places[self._place] = index
            self._counts[path, kind] += 1
        return output

    def _describe(self, node: CallNode, sources: Any, results: list[Tensor]) -> None:
        super()._describe(node, sources, results)
        result = max(results, key=Tensor.numel)
        # Values of the examples inside of torch.vmap cannot be read.
        is_readable = has_scale(result) and is_strided(result) and has_values([result])
        if node.value.live and is_readable:
            with torch.no_grad(), torch.DisableTorchFunction():
                self.sizes[self._place] = rms_of(result) if bool(result.any()) else 0.0


def run_pass(
    model: nn.Module, batch: Batch, normalizes: bool = False, before: Before | None = None
) -> Pass:
    """Runs the model on a copy of the batch. Parameters that it writes, their gradients, buffers,
    counts and random states are as they were afterwards; ``before`` may change parameters."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    args, kwargs = detached(arguments(batch))
    names = {id(p): name for name, p in model.named_parameters()}
    inputs = {id(t) for _, t in tensors_in((args, kwargs))}
    try:
        with ExitStack() as stack:
            stack.enter_context(untouched(model, seed=0))
            for context in (apart(), torch.inference_mode(False), torch.enable_grad(), uncast()):
                stack.enter_context(context)
            paths = stack.enter_context(running_modules(model))
            written = stack.enter_context(restored(parameters))
            seen = Pass(names, inputs, lambda: paths[-1] if paths else "", normalizes, before)
            with seen:
                output = model(*args, **kwargs)
            seen.changed = frozenset(n for n, p in model.named_parameters() if written.changed(p))
            seen.outputs = seen.nodes_of(output)
            results = [t for t in tensors_within(output) if has_scale(t) and is_strided(t)]
            seen.has_nan = any(bool(t.isnan().any()) for t in results)
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    return seen
