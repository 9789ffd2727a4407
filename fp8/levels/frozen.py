"""`store_frozen`: stores frozen weights in one byte per element."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from ..common.dtensor import is_dtensor
from ..common.mixin import check_module
from ..common.pitfalls import ConvertWarning, warn_once
from ..common.validation import check_name
from ..selection.layers import LAYERS, is_transposed, why_quantized
from ..selection.where import Where, checked_where, choose
from ..surgery.convert import check_ready
from ..tensors.scaled_tensor import DTYPES, STORED, ScaledTensor
from .weights import plain_weights, scale_weights

M = TypeVar("M", bound=nn.Module)


def store_frozen(model: M, format: str | None = "e4m3", *, where: str | Where | None = None) -> M:
    """Stores the frozen weights of ``model`` in ``format``, in place.

    For the base model of adapters: each weight of a linear layer or convolution that does not
    require a gradient becomes a `ScaledTensor` of ``format`` with one power-of-two scale, rounded
    once. Weights stored before, trained weights, biases, norms and (unless tied) embeddings do not
    change. Names, ties, dtypes, tags and hooks stay the same. Products and other uses of a weight
    (DoRA's norm) read the rounded values. Freeze and store the model first, then add adapters, so
    that they start at zero on the stored model.

    The state_dict has plain float32 tensors under the same names. `fp8.convert` sets how products
    are computed; a converted layer uses a stored weight like any other.

    Args:
        model: changed in place.
        format: "e4m3", "e5m2" or "fp16". None restores plain parameters, with the rounded values.
            Do so before merging an adapter: an in-place operation whose result the format would
            round (a merge, an optimizer step) raises NotImplementedError. Loading a state_dict
            rounds.
        where: (name, layer) -> whether to store its weight, or a name, as in `fp8.convert`.

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
    check_name("format", format, STORED)
    layers = {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, LAYERS) or is_transposed(module)) and not why_quantized(module)
    }
    left = choose(where, model, layers)
    chosen = [module for name, module in layers.items() if name not in left]
    weights = [weight for module in chosen for weight in _frozen(module)]
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


def _frozen(module: nn.Module) -> list[nn.Parameter]:
    """The weights of the layer itself that can be stored."""
    return [
        parameter
        for name, parameter in module.named_parameters(recurse=False)
        if name.endswith("weight") and parameter.dim() >= 2 and parameter.dtype in DTYPES
        if not (parameter.requires_grad or parameter.is_meta or isinstance(parameter, ScaledTensor))
    ]
