"""Replaces weights of layers with ScaledTensors, and restores plain tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..casts import scaled_tensor
from ..casts.scaled_tensor import DTYPES, Memory, ScaledTensor, gradient
from ..common.dtensor import is_dtensor
from ..common.mixin import Mixin, add_mixin, remove_mixin
from ..common.validation import check_module, check_name
from ..layers.convert import check_ready
from ..layers.select import (
    LAYERS,
    Where,
    check_values_set,
    checked_where,
    is_transposed,
    why_quantized,
)
from ..warnings import ConvertWarning, show
from .lost_updates import LostUpdates

M = TypeVar("M", bound=nn.Module)

SHARDED = (
    "fully_shard keeps shards of its own: call fp8.training.fsdp.gather_in_fp8 before it, which "
    "sends weights in FP8, and step its parameters with fp8.optim.AdamW, which keeps states in FP8"
)


class _ScaledWeights(Mixin):
    """A module with ScaledTensors, whose entries in its state_dict share their memory."""

    def __setattr__(self, name: str, value: object) -> None:
        """Raises ValueError if a weight is replaced by a shard, which would lose its level."""
        if hasattr(value, "device_mesh") and name in _scaled_parameters(self):
            raise ValueError(f"{name} has a level, which no shard of it has: {SHARDED}")
        super().__setattr__(name, value)

    def _save_to_state_dict(
        self, destination: dict[str, Tensor], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        if not keep_vars:
            for name, parameter in _scaled_parameters(self).items():
                entry = ScaledTensor(parameter.memory, torch.float32, parameter.stored)
                destination[prefix + name] = entry

    def _load_from_state_dict(self, *args: object) -> None:
        before = _scaled_parameters(self)
        super()._load_from_state_dict(*args)  # type: ignore[misc]
        for name, old in before.items():
            new: Tensor = getattr(self, name)
            if new is not old:  # assign=True: keep the parameter and its ties
                old.data = new.detach()
                setattr(self, name, old)
            _store(old)

    def _apply(self, *args: object, **kwargs: object) -> object:
        # torch replaces each parameter by a new tensor, which has neither its attributes nor its
        # hooks.
        attributes = {
            name: _attributes(p) for name, p in _scaled_parameters(self).items()
        }
        try:
            result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        except RuntimeError as error:
            if "swap" not in str(error):
                raise
            raise RuntimeError(_HELD) from error
        for name, parameter in _scaled_parameters(self).items():
            _set_attributes(parameter, attributes[name], parameter)
        return result


_HELD = (
    "weights with a level cannot move or change dtype here, because other objects hold weak "
    "references to them. Move a model before fp8.initialize. DeepSpeed's engine holds and moves "
    "each weight: train with a level under DDP or FSDP2, or with DeepSpeed after fp8.convert, "
    "without a level"
)


def _scaled_parameters(module: Any) -> dict[str, ScaledTensor]:
    named = module.named_parameters(recurse=False, remove_duplicate=False)
    return {name: p for name, p in named if isinstance(p, ScaledTensor)}


def _attributes(parameter: Tensor) -> dict[str, Any]:
    """The attributes that others, such as tags, have set on a parameter."""
    internal = (*scaled_tensor.STATE, "_is_param", "__deepcopy__", "__reduce_ex__")
    return {k: v for k, v in vars(parameter).items() if k not in internal}


def _store(parameter: ScaledTensor) -> None:
    """Stores a weight in its format; a trained one of 8 bits waits until its master has it."""
    if parameter.format == "fp16" or parameter.grad_format is None:
        parameter.store()


def _set_attributes(new: Tensor, attributes: dict[str, Any], old: Tensor) -> None:
    vars(new).update(attributes)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(new, hooks, getattr(old, hooks))


def scaled_parameter(old: Any, memory: Memory, grad_format: str | None = None) -> Any:
    """A parameter with the values of ``memory``, and the other properties of ``old``. grad_format:
    None for frozen weights, which have no gradient and no master."""
    memory.remembers = grad_format is None
    new = copied_parameter(old, ScaledTensor(memory, old.dtype))
    scaled_tensor.keep_gradients_in(new, grad_format)
    if grad_format is not None and old.grad is not None:
        new.grad = gradient(old.grad, grad_format, old.dtype)
    _store(new)
    return new


def copied_parameter(old: Tensor, values: Tensor) -> Any:
    """``values`` with the other properties of ``old``, a parameter or a buffer."""
    if not isinstance(old, nn.Parameter):
        return values
    new = nn.Parameter(values, old.requires_grad)
    _set_attributes(new, _attributes(old), old)
    return new


def scale_weights(
    model: nn.Module,
    weights: Iterable[nn.Parameter],
    format: str,
    grad_format: str | None,
) -> dict[nn.Parameter, Any]:
    """Replaces ``weights`` by ScaledTensors wherever ``model`` has them. Returns old -> new."""
    new = {
        p: scaled_parameter(p, Memory(p.detach(), None, format), grad_format)
        for p in weights
    }
    replace(model, new)
    return new


def replace(model: nn.Module, new: Mapping[Any, Any]) -> None:
    """Replaces parameters and buffers wherever ``model`` has them. new: old -> new."""
    for module in model.modules():
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, old in [*parameters, *buffers]:
            if old in new:
                if isinstance(new[old], ScaledTensor):
                    add_mixin(module, _ScaledWeights)
                setattr(module, name, new[old])


def plain_weights(model: nn.Module) -> None:
    """Undoes `scale_weights` with ``grad_format=None``, except for the rounding."""
    new = {}
    for old in model.parameters():
        if isinstance(old, ScaledTensor) and not old.grad_format:
            new[old] = copied_parameter(old, old.dequantize())
            del new[old].grad_format
    replace(model, new)
    for module in model.modules():
        if not _scaled_parameters(module):
            remove_mixin(module, _ScaledWeights)


def store_frozen(
    model: M, format: str | None = "e4m3", *, where: Where | None = None
) -> M:
    """Stores the frozen weights of ``model`` in ``format``, in place.

    Each weight of a linear layer or convolution that does not require a gradient becomes a
    `ScaledTensor` of ``format`` with one power-of-two scale, rounded once. All other parameters,
    names, ties, dtypes, tags and hooks stay the same. Add adapters afterwards.

    Loading a state_dict rounds. What is written otherwise (a merged adapter, an optimizer step) is
    exact, and makes the weight float32 until ``store_frozen`` is called again.

    Args:
        model: changed in place.
        format: "e4m3", "e5m2" or "fp16". None restores plain parameters, with the present values.
        where: (name, layer) -> whether to store its weight, as in `fp8.convert`.

    Returns:
        ``model``.

    Warns:
        ConvertWarning: if no weight was stored.
        RoundingWarning: if rounding removes most of what was written to a weight.

    Raises:
        ValueError, TypeError: as `fp8.convert`; for an unknown format, and for sharded weights.

    >>> import torch, fp8
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    >>> _ = model[0].requires_grad_(False)
    >>> _ = fp8.store_frozen(model)
    >>> model[0].weight.format, model[0].weight.stored.dtype, type(model[1].weight).__name__
    ('e4m3', torch.float8_e4m3fn, 'Parameter')
    """
    check_module("store_frozen", model)
    check_ready(model)
    check_values_set("store_frozen", model)
    where = checked_where(where)
    if format is None:
        plain_weights(model)
        return model
    check_name("format", format, scaled_tensor.STORED)
    chosen = [
        m
        for name, m in model.named_modules()
        if (isinstance(m, LAYERS) or is_transposed(m)) and not why_quantized(m)
        if where is None or where(name, m)
    ]
    stored = (p for layer in chosen for p in storable(layer))
    frozen = [p for p in stored if not (p.requires_grad or p.is_meta)]
    if not frozen:
        show(ConvertWarning, _NOTHING.format(type(model).__name__, len(chosen)))
    weights = [p for p in frozen if not isinstance(p, ScaledTensor)]
    if any(map(is_dtensor, weights)):
        raise ValueError(
            "store_frozen takes whole weights, and processes divide these: under FSDP2, "
            "fp8.training.fsdp.gather_in_fp8 before fully_shard sends weights in one byte"
        )
    new = scale_weights(model, weights, format, None)
    names = {p: name for name, p in model.named_parameters()}
    updates = LostUpdates()
    for old, p in new.items():
        updates.add(names[p], old, partial(p.dequantize, torch.float32))
    for p in frozen:
        if isinstance(p, ScaledTensor):
            if p.format != format:
                p.written()
                p.memory.format = format
            with updates.watching(names[p], p):
                p.store()
    updates.warn()
    return model


_NOTHING = (
    "no weight of the {} was stored: none of its {} chosen layers has a plain weight that is "
    "frozen. Call model.requires_grad_(False) before fp8.store_frozen, and add adapters after it"
)


def storable(module: nn.Module) -> list[nn.Parameter]:
    """The weights of a layer itself that a ScaledTensor can stand for."""
    return [
        parameter
        for name, parameter in module.named_parameters(recurse=False)
        if name.endswith("weight")
        and parameter.dim() >= 2
        and parameter.dtype in DTYPES
    ]
