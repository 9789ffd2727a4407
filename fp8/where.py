"""Published choices of the layers that run in FP8, as rules over the structure of a model.

The *blocks* of a model are what it repeats: the items of an `nn.ModuleList` or `nn.Sequential` that
are all of one class and have layers inside. A block's *width* is the input size of its first layer,
that of the residual stream. Its *parts* are its children, those of a list in it one by one
(attention, MLP); of layers that are its children themselves, one that keeps the width begins a
part, and one that widens it ends that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .names import check_name
from .subclass import bare_class
from .swap import Where

__all__ = ["WHERE", "checked_where", "choose"]

Layers = Mapping[str, nn.Module]
"""Name -> layer, in the order of the model."""

_OUTSIDE = "outside of the blocks that the model repeats"
_LAST = "the last layer of a model that repeats no block"
_JOINS = "joins the residual stream: attention output or down projection"
_WHOLE = "one module with the output projection of the attention"


def _hidden(model: nn.Module, layers: Layers) -> dict[str, str]:
    """Every layer of a block; not the readout, nor what is before the blocks or after them
    (arXiv:2502.05967: "all hidden linear layer computations"). Where nothing is repeated, all but
    the last layer."""
    blocks = _blocks(model, layers)
    if not blocks:
        return dict.fromkeys(list(layers)[-1:], _LAST)
    return {name: _OUTSIDE for name in layers if not any(_within(name, block) for block in blocks)}


def _umup(model: nn.Module, layers: Layers) -> dict[str, str]:
    """As "hidden", without the layers that join the residual stream: attention outputs and down
    projections stay in 16 bits (u-muP, arXiv:2407.17465, section 4). These are the last layer of a
    part, where its output has the width of the block. An `nn.MultiheadAttention` is one layer."""
    left = _hidden(model, layers)
    for name, layer in layers.items():
        if isinstance(layer, nn.MultiheadAttention):
            left.setdefault(name, _WHOLE)
    for block in _blocks(model, layers):
        inside = {name: layer for name, layer in layers.items() if _within(name, block)}
        width = _sizes(next(iter(inside.values())))[0]
        for part in _parts(block, model.get_submodule(block), inside):
            if _sizes(inside[part[-1]])[1] == width:
                left.setdefault(part[-1], _JOINS)
    return left


WHERE: dict[str, Callable[[nn.Module, Layers], dict[str, str]]] = {
    "hidden": _hidden,
    "umup": _umup,
}
"""Name -> (model, its layers by name) -> those to leave alone, name -> reason."""


def checked_where(where: str | Where | None) -> str | Where | None:
    """``where``. Raises ValueError for a name that is not in `WHERE`, TypeError for what is neither
    a name nor a function nor None."""
    if isinstance(where, str):
        check_name("where", where, WHERE)
    elif not (where is None or callable(where)):
        raise TypeError(f"where is a {type(where).__name__}; give a name or (name, layer) -> bool")
    return where


def choose(where: str | Where | None, model: nn.Module, layers: Layers) -> dict[str, str]:
    """The names of the layers that ``where`` leaves alone, each with the reason.

    where: a name in `WHERE`, or (name, layer) -> whether to convert it, or None: all.
    """
    if where is None:
        return {}
    if isinstance(where, str):
        layers = {name: layer for name, layer in layers.items() if list(layer.parameters())}
        return {name: f"{where}: {why}" for name, why in WHERE[where](model, layers).items()}
    return {name: "not chosen" for name, layer in layers.items() if not where(name, layer)}


def _within(name: str, block: str) -> bool:
    return name.startswith(f"{block}.")


def _blocks(model: nn.Module, layers: Layers) -> list[str]:
    """The names of the blocks, outer ones before what is repeated in them (experts)."""
    found = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        names = [f"{path}.{key}" if path else key for key, _ in module.named_children()]
        if not path and len(names) == 1:  # wraps a model
            continue
        inside = all(any(_within(layer, name) for layer in layers) for name in names)
        if inside and len({bare_class(child) for child in module.children()}) == 1:
            found += names
    return found


def _parts(path: str, block: nn.Module, layers: Layers) -> list[list[str]]:
    """The names of the layers in each part of a block."""
    parts: list[list[str]] = []
    open_part = False
    for key, child in block.named_children():
        name = f"{path}.{key}"
        if name in layers:
            before, after = _sizes(layers[name])
            joined = open_part and after <= before
            parts = [*parts[:-1], [*parts[-1], name]] if joined else [*parts, [name]]
            open_part = joined or after == before
        elif isinstance(child, nn.ModuleList):
            parts += _parts(name, child, layers)
        else:
            inner = [layer for layer in layers if _within(layer, name)]
            parts += [inner] if inner else []
            open_part = open_part and not inner
    return parts


def _sizes(layer: Any) -> tuple[int, int]:
    """(inputs, outputs) of a layer, (0, -1) of one of another kind."""
    for inputs, outputs in (("in_features", "out_features"), ("in_channels", "out_channels")):
        if hasattr(layer, inputs):
            return getattr(layer, inputs), getattr(layer, outputs)
    if isinstance(layer, nn.MultiheadAttention):
        return layer.embed_dim, layer.embed_dim
    if hasattr(layer, "nx"):  # transformers' Conv1D
        return layer.nx, layer.nf
    return 0, -1
