"""Replaces weights of layers with ScaledTensors, and restores plain tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..common.dtensor import is_dtensor
from ..common.mixin import Gained, check_module, gain, lose
from ..common.pitfalls import ConvertWarning, warn_once
from ..common.validation import check_name
from ..optim.encodings import decode
from ..optim.state import MASTER, carried, has, read, rounds_to
from ..selection.layers import LAYERS, Where, checked_where, is_transposed, why_quantized
from ..surgery.convert import check_ready
from ..tensors import scaled_tensor
from ..tensors.scaled_tensor import DTYPES, ScaledTensor, plain, scaled

M = TypeVar("M", bound=nn.Module)

SHARDED = (
    "fully_shard keeps shards of its own: call fp8.distributed.fsdp.gather_in_fp8 before it, which "
    "sends weights in FP8, and step its parameters with fp8.optim.AdamW, which keeps states in FP8"
)


class _ScaledWeights(Gained):
    """A module with parameters that are ScaledTensors, and plain float32 tensors in its state_dict:
    of a weight in 8 bits the values that it was rounded from, until a master takes them over."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises ValueError if a weight is replaced by a shard, which would lose its level."""
        if hasattr(value, "device_mesh") and name in _own(self):
            raise ValueError(f"{name} has a level, which no shard of it has: {SHARDED}")
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        if not keep_vars:
            for name, parameter in _own(self).items():
                brought = carried(parameter)
                weight: Any = parameter if brought is None else brought
                destination[prefix + name] = weight.dequantize(torch.float32)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        before = _own(self)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]
        for name, old in before.items():
            new, given = getattr(self, name), state_dict.get(prefix + name)
            if not isinstance(given, Tensor) or given.shape != old.shape:
                continue
            if new is not old:  # assign=True: keep the parameter and its ties
                exact, old.exact = old.exact, False  # a checkpoint may be rounded
                old.data = new.detach()
                old.exact = exact
                setattr(self, name, old)
            _bring(old, given)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """torch replaces each parameter by a new tensor; copies attributes and hooks to it."""
        attributes = {name: _attributes(parameter) for name, parameter in _own(self).items()}
        try:
            result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        except RuntimeError as error:
            if "swap" not in str(error):
                raise
            raise RuntimeError(_HELD) from error
        for name, parameter in _own(self).items():
            _give(parameter, attributes[name], parameter)
        return result


_HELD = (
    "weights with a level cannot move or change dtype here, because other objects hold weak "
    "references to them. Move a model before fp8.initialize. DeepSpeed's engine holds and moves "
    "each weight: train with a level under DDP or FSDP2, or with DeepSpeed after fp8.convert, "
    "without a level"
)


def _own(module: Any) -> dict[str, Any]:
    """The parameters of the module itself that are ScaledTensors."""
    named = module.named_parameters(recurse=False, remove_duplicate=False)
    return {name: parameter for name, parameter in named if isinstance(parameter, ScaledTensor)}


def _attributes(parameter: Tensor) -> dict[str, Any]:
    """The attributes that others, such as tags, have set on a parameter."""
    own = (*scaled_tensor.OWN, "_is_param", "__deepcopy__", "__reduce_ex__")
    return {k: v for k, v in vars(parameter).items() if k not in own}


@torch.no_grad()
def _bring(parameter: Any, numbers: Tensor) -> None:
    """Attaches the unrounded values to a weight that is coarser than a master, and rounds the
    weight from them. Frozen weights have no master."""
    if parameter.format != "fp16" and not parameter.exact:
        parameter.loaded = scaled(numbers.to(parameter.device, torch.float32), "fp16")
        parameter.copy_(parameter.loaded)


def _give(new: Any, attributes: dict[str, Any], old: Any) -> None:
    """Gives the parameter ``new`` attributes, and the hooks of ``old``."""
    vars(new).update(attributes)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(new, hooks, getattr(old, hooks))


def _replacement(old: Any, format: str, grad_format: str | None) -> Any:
    """A parameter with the values of ``old`` in ``format``, and its other properties."""
    new: Any = nn.Parameter(scaled(old, format), old.requires_grad)
    new.exact = grad_format is None
    _bring(new, old)
    _give(new, _attributes(old), old)
    if grad_format is not None:
        scaled_tensor.keep_gradients_in(new, grad_format)
        if old.grad is not None:
            new.grad = scaled(plain(old.grad), grad_format, old.dtype)
    return new


def scale_weights(
    model: nn.Module, weights: Iterable[nn.Parameter], format: str, grad_format: str | None
) -> dict[nn.Parameter, Any]:
    """Replaces ``weights`` by ScaledTensors wherever ``model`` has them. Returns old -> new.
    grad_format: None for frozen weights, which have no gradient and no master (``exact``)."""
    new = {parameter: _replacement(parameter, format, grad_format) for parameter in weights}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in new:
                gain(module, _ScaledWeights)
                setattr(module, name, new[parameter])
    return new


def plain_weights(model: nn.Module) -> None:
    """Undoes `scale_weights` with ``grad_format=None``, except for the rounding."""
    new: dict[Any, nn.Parameter] = {}
    for module in model.modules():
        for name, old in _own(module).items():
            if old.exact:
                if old not in new:
                    new[old] = nn.Parameter(old.dequantize(), old.requires_grad)
                    _give(new[old], _attributes(old), old)
                    vars(new[old]).pop("exact", None)
                setattr(module, name, new[old])
        if not _own(module):
            lose(module, _ScaledWeights)


def store_frozen(model: M, format: str | None = "e4m3", *, where: Where | None = None) -> M:
    """Stores the frozen weights of ``model`` in ``format``, in place.

    For the base model of adapters: each weight of a linear layer or convolution that does not
    require a gradient becomes a `ScaledTensor` of ``format`` with one power-of-two scale, rounded
    once. All other parameters, names, ties, dtypes, tags and hooks stay the same; the state_dict
    has plain float32 tensors. All uses of a weight read the rounded values. Freeze and store the
    model first, then add adapters, so that they start at zero on the stored model. `fp8.convert`
    sets how products are computed.

    Args:
        model: changed in place.
        format: "e4m3", "e5m2" or "fp16". None restores plain parameters, with the rounded values.
            Do so before merging an adapter: an in-place operation whose result the format would
            round (a merge, an optimizer step) raises NotImplementedError. Loading a state_dict
            rounds.
        where: (name, layer) -> whether to store its weight, as in `fp8.convert`.

    Returns:
        ``model``.

    Warns:
        ConvertWarning: if no weight was stored.

    Raises:
        ValueError, TypeError: for an unknown format, weights that processes divide, and as
            `fp8.convert`.

    >>> import torch, fp8
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    >>> _ = model[0].requires_grad_(False)
    >>> _ = fp8.store_frozen(model)
    >>> model[0].weight.format, model[0].weight.stored.dtype, type(model[1].weight).__name__
    ('e4m3', torch.float8_e4m3fn, 'Parameter')
    """
    check_module("store_frozen", model)
    check_ready(model)
    where = checked_where(where)
    if format is None:
        plain_weights(model)
        return model
    check_name("format", format, scaled_tensor.STORED)
    layers = {
        name: m
        for name, m in model.named_modules()
        if (isinstance(m, LAYERS) or is_transposed(m)) and not why_quantized(m)
    }
    chosen = [layer for name, layer in layers.items() if where is None or where(name, layer)]
    frozen = [p for layer in chosen for p in storable(layer) if not (p.requires_grad or p.is_meta)]
    weights = [p for p in frozen if not isinstance(p, ScaledTensor)]
    if any(map(is_dtensor, weights)):
        raise ValueError(
            "store_frozen takes whole weights, and processes divide these: under FSDP2, "
            "fp8.distributed.fsdp.gather_in_fp8 before fully_shard sends weights in one byte"
        )
    if weights:
        scale_weights(model, weights, format, None)
    elif not any(isinstance(p, ScaledTensor) and p.exact for p in model.parameters()):
        warn_once(ConvertWarning, _NOTHING.format(type(model).__name__, len(chosen)), model)
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
        if name.endswith("weight") and parameter.dim() >= 2 and parameter.dtype in DTYPES
    ]


def export_weights(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Tensor]:
    """The state_dict of ``model`` as plain tensors, for the model before `initialize` or at any
    level.

    Args:
        model: the model.
        dtype: the dtype of floating-point tensors. None: their own; ScaledTensors as float32, which
            represents them exactly.
        optimizer: an optimizer with masters (level O3), which are exported instead of the weights.

    Returns:
        Name -> tensor.

    Raises:
        TypeError: if ``model`` is not a module, or for a dtype that is not floating point.
    """
    check_module("export_weights", model)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"weights are exported in a torch.dtype or None, got {dtype!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"weights are exported in a floating-point dtype, not {dtype}")
    state = {name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    if optimizer is not None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            kept = optimizer.state.get(parameter, {})
            if has(kept, MASTER):
                master = decode(read(kept, MASTER)).view(parameter.shape)
                if rounds_to(master, parameter):  # not replaced by a checkpoint
                    state[name] = master.clone()
    return {
        name: x.to(dtype) if dtype is not None and x.is_floating_point() else x
        for name, x in state.items()
    }
