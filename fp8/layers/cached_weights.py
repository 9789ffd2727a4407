"""`cached_weights`: casts the weights of a model once for several micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..casts.casting import QuantizedOperand
from ..casts.operands import casts_of
from ..common.compiler import BITS, compiled_as
from ..common.step import parameters_of, unwrapped
from ..common.validation import check_module
from ..kernels import product as native
from ..kernels.table import store
from ..torch_internals import Arguments, Keywords, Layer
from ..torch_internals.decorators import taken_as_constant
from .select import check_values_set
from .settings import converted

Layouts = tuple[QuantizedOperand, QuantizedOperand]
"""A weight (n, k) for the product that sums over k, and for that which sums over n."""


@contextmanager
def cached_weights(model: nn.Module) -> Iterator[None]:
    """Within the block, the linear layers of ``model`` cast their weights once, not in each pass.

    For gradient accumulation, with results that are the same to the bit. Each weight is cast when
    the block opens, after each step of a `torch.optim.Optimizer` that has it and after
    `load_state_dict`: for the forward and for the backward product, two bytes an element. The block
    may contain one step or a whole run, and eager or compiled calls. Copies have no casts.

    Cached are the weights of converted layers whose products FP8 kernels compute, under a recipe
    that casts the weight for both products, without random bits and without a history ("delayed":
    each pass changes the scale). A static scale has to be set when the block opens. Other layers,
    and sharded weights, are cast as before.

    Eager code casts a weight again after any other change that torch counts, not through ``.data``.
    Each step, and the end of the block, compares the weights with those that were cast.

    Args:
        model: a model converted by `fp8.convert`. `torch.compile` and DistributedDataParallel may
            wrap it.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: if no cast can be cached; before the first call of a model of ``unit_scale``
            without a batch.
        RuntimeError: at the next step or at the end of the block, if a weight was changed through
            ``.data``, or, where compiled code reads its cast, in any way but a step or
            `load_state_dict`.

    >>> import torch, fp8
    >>> model = fp8.convert(torch.nn.Linear(32, 16), "tensor", backend="native")
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> with fp8.cached_weights(model):
    ...     for micro_batch in torch.ones(4, 8, 32):
    ...         model(micro_batch).mean().backward()
    >>> optimizer.step()
    """
    check_module("cached_weights", model)
    check_values_set("cached_weights", model)
    weights = dict(_weights(unwrapped(model)))
    if not weights:
        raise ValueError(
            f"cached_weights: no layer of {type(model).__name__} has FP8 kernels and a weight "
            "whose cast can be cached; fp8.report(model) lists the layers and their recipes"
        )

    def before(optimizer: Optimizer, args: object, kwargs: object) -> None:
        _check(changing := _of(optimizer, weights))
        for weight in changing.values():
            weight.fp8_cache.drop()

    def after(optimizer: Optimizer, args: object, kwargs: object) -> None:
        for weight in _of(optimizer, weights).values():
            weight.fp8_cache.cast(weight)

    handles = (
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
        unwrapped(model).register_load_state_dict_post_hook(_after_loading),
    )
    try:
        yield
        _check(weights)
    finally:
        for handle in handles:
            handle.remove()
        for weight in weights.values():
            del weight.fp8_cache


class WeightCast:
    """The cast of a weight, its attribute ``fp8_cache``, which is None in copies and pickles.

    Attributes:
        token: the `weight_token` of the casts; "" without operands.
        operands: `Layouts`.
        in_graph: whether a graph reads them. It does not notice that the weight changes.
    """

    def __init__(self, weight: Tensor, casts: str, scale: Tensor | None) -> None:
        """Casts the weight. casts: the token of those of its products. scale: its static scale, if
        it has one."""
        self._casts = casts
        self._scale = scale
        self.in_graph = False
        self.cast(weight)

    def __reduce__(self) -> Arguments:
        return type(None), ()

    @torch.no_grad()
    def cast(self, weight: Tensor) -> None:
        """Casts the weight, which may be another one now."""
        self._alias = weight.detach()  # so that no other tensor gets its memory
        self._versions = self._versions_of(weight)
        self._sums = _sums(weight)
        layouts = _compiled if self.in_graph else _layouts
        self.operands: Any = layouts(self._alias, self._casts, self._scale)
        self.token = native.weight_token(self._casts)

    def drop(self) -> None:
        """Forgets the operands; products cast the weight themselves."""
        self.token = ""
        self.operands = ()

    def is_stale(self, weight: Tensor) -> bool:
        """Whether torch has counted a change of the weight or its scale."""
        return self._versions != self._versions_of(weight)

    def differs(self, weight: Tensor) -> Tensor:
        """Whether the bits of the weight have changed, 0-dim."""
        return (_sums(weight) != self._sums).any()

    def _versions_of(self, weight: Tensor) -> list[int]:
        versions = []
        for x in (weight, self._alias, self._scale):
            if x is not None:
                versions += [x._version, x.data_ptr()]
        return versions

    @taken_as_constant
    def note_graph(self) -> bool:
        self.in_graph = True
        return True

    def _read_in_graph(self, weight: Tensor) -> Layouts:
        self.note_graph()
        return self.operands

    @compiled_as(_read_in_graph)
    def read(self, weight: Tensor) -> Layouts:
        """The operands, computed again if the weight has changed."""
        if self.is_stale(weight):
            self.cast(weight)
        return self.operands


def _sums(weight: Tensor) -> Tensor:
    """The sums of the bits of each column and of each row."""
    # Bits are summed, so that no change cancels in rounding, over both axes, so that no swap of two
    # elements cancels.
    bits = weight.detach().view(BITS[weight.itemsize])
    return torch.cat([bits.sum(axis, dtype=torch.int64) for axis in (0, 1)])


def _layouts(weight: Tensor, token: str, scale: Tensor | None) -> Layouts:
    casts = casts_of(token)
    first = store(weight, casts.b, -1, scale)
    if casts.reuses_b and not first.scale.dim():
        again = first.mT
    else:
        again = store(weight, casts.b_for_grad_a, -2)
    # FP8 kernels read both operands along the axis that they sum over.
    return first, again._replace(values=again.values.contiguous())


def _compiled(weight: Tensor, casts: str, scale: Tensor | None) -> Layouts:
    """`_layouts`, compiled: one kernel writes both."""
    like = (weight.shape, weight.stride(), weight.dtype, weight.device)
    kernel = _kernel(casts, *like, scale is not None)
    tensors = kernel(weight) if scale is None else kernel(weight, scale)
    half = len(tensors) // 2
    return QuantizedOperand(*tensors[:half]), QuantizedOperand(*tensors[half:])


@cache
def _kernel(
    casts: str,
    size: Any,
    stride: Any,
    dtype: Any,
    device: Any,
    is_static: bool,
) -> Any:
    from ..torch_internals.inductor import compiled  # imports the compiler

    def cast(weight: Tensor, scale: Tensor | None) -> list[Tensor]:
        first, again = _layouts(weight, casts, scale)
        return [x for x in (*first, *again) if x is not None]

    example = torch.empty_strided(size, stride, dtype=dtype, device=device)
    if is_static:
        return compiled(cast, example, torch.ones((), device=device))
    return compiled(lambda weight: cast(weight, None), example)


def _weights(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    """The weights whose casts can be cached, by name, each cast."""
    for name, layer in converted(model).items():
        weight = layer._parameters.get("weight")
        if weight is None or weight.ndim != 2:
            continue
        if getattr(weight, "fp8_cache", None) is not None:  # of a block around this one
            continue
        casts = layer.fp8_recipe.text
        scale = getattr(layer, "fp8_scale_weight", None)
        if _is_cacheable(layer, weight, casts, scale):
            weight.fp8_cache = WeightCast(weight, casts, scale)
            yield name, weight


def _is_cacheable(
    layer: Layer,
    weight: Tensor,
    token: str,
    scale: Tensor | None,
) -> bool:
    casts = casts_of(token)
    specs = casts.b, casts.b_for_grad_a
    if any(spec is None or spec.is_random or spec.is_simulated for spec in specs):
        return False
    if weight.is_inference():  # for which torch counts no changes
        return False
    takes = native.takes(layer.fp8_settings.backend, weight, weight)
    if layer.fp8_recipe.accumulate or not takes:
        return False
    return not hasattr(layer, "fp8_amax_weight") and (scale is None or bool(scale > 0))


def _of(optimizer: Optimizer, weights: Keywords) -> Keywords:
    """The weights of an optimizer."""
    ids = set(map(id, parameters_of(optimizer)))
    return {name: weight for name, weight in weights.items() if id(weight) in ids}


def _after_loading(model: nn.Module, keys: object) -> None:
    # Not a closure, because hooks are pickled with the model.
    parameters: Any = model.parameters()
    for weight in parameters:
        cast = getattr(weight, "fp8_cache", None)
        if cast is not None and cast.token:
            cast.cast(weight)


def _check(weights: Keywords) -> None:
    """Raises RuntimeError if products have used the cast of a weight that was changed since."""
    casts = {name: weight.fp8_cache for name, weight in weights.items()}
    counted = {name for name, cast in casts.items() if cast.is_stale(weights[name])}
    changed = [name for name in counted if casts[name].in_graph]
    others = [name for name in casts if casts[name].token and name not in counted]
    if others and not changed:
        # One transfer for all.
        flags = [casts[name].differs(weights[name]).cpu() for name in others]
        pairs = zip(others, torch.stack(flags).tolist(), strict=True)
        changed = [name for name, flag in pairs if flag]
    if changed:
        raise RuntimeError(
            f"cached_weights: {changed[0]!r} was changed inside of the block, and products have "
            "used the cast of its earlier values. Change weights by a step of an optimizer, by "
            "load_state_dict, or in eager mode in place (not through .data), or close the block"
        )
