"""`store_frozen`: the weights that nothing trains, in one byte an element."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from ..common.mixin import check_module
from ..common.pitfalls import ConvertWarning, warn_once
from ..common.validation import check_name
from ..surgery.convert import LAYERS, check_ready, is_transposed
from ..surgery.swap import Where, why_quantized
from ..surgery.where import checked_where, choose
from ..tensors.scaled_tensor import DTYPES, STORED, ScaledTensor
from .weights import plain_weights, scale_weights

__all__ = ["store_frozen"]

M = TypeVar("M", bound=nn.Module)


def store_frozen(model: M, format: str | None = "e4m3", *, where: str | Where | None = None) -> M:
    """Stores the frozen weights of ``model`` in ``format``, in place; returns ``model``.

    For the base model under adapters: each weight of a linear layer or convolution that does not
    require a gradient becomes a `ScaledTensor`, with values of ``format`` and one power-of-two
    scale, rounded once. One that is stored already stays, and so do trained weights, biases, norms
    and embeddings (unless tied). Names, ties, dtypes, tags and hooks stay; products, and whatever
    else reads a weight (DoRA's norm), see its rounded numbers. Freeze and store the model first,
    then add adapters: these then start at zero on the function that is stored.

    format: "e4m3", "e5m2" or "fp16"; None makes the weights plain parameters again, with the
    rounded numbers. Do that before an adapter is merged: an operation in place whose result the
    format would round (a merge, a step) raises NotImplementedError. Loading a state_dict rounds.
    where: as in `fp8.convert`, (name, layer) -> whether to store its weight, or a name.

    The state_dict has plain float32 tensors under the same names. `fp8.convert` decides the
    products; a converted layer takes the stored weight as any other.
    Warns with `ConvertWarning` where no weight was stored. Raises ValueError for an unknown format,
    and as `fp8.convert` does.

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
    """The weights of a layer itself that can be stored."""
    return [
        parameter
        for name, parameter in module.named_parameters(recurse=False)
        if name.endswith("weight") and parameter.dim() >= 2 and parameter.dtype in DTYPES
        if not (parameter.requires_grad or parameter.is_meta or isinstance(parameter, ScaledTensor))
    ]
