"""Published selections of the layers that run in FP8, as rules on the structure of a model.

The *blocks* of a model are its repeated modules: the items of an `nn.ModuleList` or
`nn.Sequential` that all have the same class and contain layers. The *width* of a block is the
input size of its first layer, which is that of the residual stream. The *parts* of a block are its
children (attention, MLP); a list among them counts item by item. Among direct children that are
layers, a width-preserving layer starts a part, and a widening layer closes the part before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from ..common.mixin import bare_class
from ..common.validation import check_name
from .layers import holds_experts

__all__ = [
    "WHERE",
    "Layers",
    "Where",
    "blocks_of",
    "checked_function",
    "checked_where",
    "choose",
    "sizes_of",
    "within",
]

Where = Callable[[str, nn.Module], bool]
"""(name, layer) -> whether the layer is cast."""

Layers = Mapping[str, nn.Module]
"""Name -> layer, in the order of the model."""

_OUTSIDE = "outside of the blocks that the model repeats"
_LAST = "the last layer of a model that repeats no block"
_JOINS = "joins the residual stream: attention output or down projection"
_WHOLE = "one module with the output projection of the attention"
_EXPERTS = "one module with the down projections of the experts"


def _hidden(model: nn.Module, layers: Layers) -> dict[str, str]:
    """Leaves alone the layers outside of all blocks: the readout, and what precedes or follows the
    blocks (arXiv:2502.05967: "all hidden linear layer computations"). In a model without repeated
    modules, the last layer only."""
    blocks = blocks_of(model, layers)
    if not blocks:
        return dict.fromkeys(list(layers)[-1:], _LAST)
    return {name: _OUTSIDE for name in layers if not any(within(name, block) for block in blocks)}


def _umup(model: nn.Module, layers: Layers) -> dict[str, str]:
    """As "hidden", and also leaves alone the layers whose output is added to the residual stream:
    attention outputs and down projections stay in 16 bits (u-muP, arXiv:2407.17465, section 4).
    Such a layer is the last one of a part and its output has the width of the block. An
    `nn.MultiheadAttention` is one layer, and so is a module that holds stacks of weights of
    experts.
    """
    left = _hidden(model, layers)
    for name, layer in layers.items():
        if isinstance(layer, nn.MultiheadAttention):
            left.setdefault(name, _WHOLE)
        elif holds_experts(layer):
            left.setdefault(name, _EXPERTS)
    for block in blocks_of(model, layers):
        inside = {name: layer for name, layer in layers.items() if within(name, block)}
        width = sizes_of(next(iter(inside.values())))[0]
        for part in _parts(block, model.get_submodule(block), inside):
            if sizes_of(inside[part[-1]])[1] == width:
                left.setdefault(part[-1], _JOINS)
    return left


WHERE: dict[str, Callable[[nn.Module, Layers], dict[str, str]]] = {
    "hidden": _hidden,
    "umup": _umup,
}
"""Name -> (model, its layers by name) -> the layers to leave alone: name -> reason."""


def checked_where(where: Any) -> str | Where | None:
    """``where``; a function is wrapped as one of (name, layer) that returns a bool.

    A function of (layer, name) is recognized by the annotations or the names of its arguments. If
    those do not tell, it is called with (layer, name) if (name, layer) raises an AttributeError or
    TypeError or selects nothing. Raises ValueError for a name that is not in `WHERE`, TypeError
    unless ``where`` is a name, a function of two arguments or None.
    """
    if isinstance(where, str):
        check_name("where", where, WHERE)
        return where
    if where is None or isinstance(where, _Checked):
        return where
    if not callable(where):
        raise TypeError(f"where is a {type(where).__name__}; give a name or (name, layer) -> bool")
    return _Checked(where, _turns(where))


def checked_function(where: Any) -> Where | None:
    """`checked_where`, for a function or None. Raises TypeError for a name."""
    if isinstance(where, str):
        raise TypeError(f"where={where!r} is a name; here give (name, layer) -> bool")
    found: Any = checked_where(where)
    return found


class _Checked:
    """A function of name and layer, called with its arguments in the order it takes them. turned:
    whether that order is (layer, name); None if not known yet."""

    def __init__(self, function: Callable[..., Any], turned: bool | None) -> None:
        self.function = function
        self.turned = turned

    def __call__(self, name: str, layer: nn.Module) -> bool:
        if self.turned is None:
            answer = self._first(name, layer)
        else:
            answer = self.function(*((layer, name) if self.turned else (name, layer)))
        if not isinstance(answer, bool):
            raise TypeError(
                f"where must return a bool, got {answer!r} for layer {name!r}: wrap it in bool()"
            )
        return answer

    def _first(self, name: str, layer: nn.Module) -> Any:
        try:
            answer = self.function(name, layer)
        except (AttributeError, TypeError):
            answer = self.function(layer, name)
            self.turned = True
        return answer


_NAME = frozenset("name fqn path key module_name layer_name mod_name".split())
_LAYER = frozenset("module layer mod m child submodule linear".split())


def _turns(where: Callable[..., Any]) -> bool | None:
    """Whether a function takes (layer, name), judged by its arguments; None if they do not tell."""
    try:
        found = inspect.signature(where)
    except (TypeError, ValueError):  # implemented in C
        return None
    try:
        found.bind("", None)
    except TypeError as error:
        raise TypeError(f"where is called as where(name, layer); {where!r}: {error}") from None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    told = [_about(p) for p in found.parameters.values() if p.kind in kinds]
    first, second = (*told, "", "")[:2]
    return None if first == second else first == "layer" or second == "name"


def _about(parameter: inspect.Parameter) -> str:
    """Whether an argument is a "name" or a "layer", judged by annotation or name; "" if neither."""
    hint = parameter.annotation
    text = hint if isinstance(hint, str) else getattr(hint, "__name__", "")
    if text == "str":
        return "name"
    if text.rpartition(".")[2] == "Module" or (
        isinstance(hint, type) and issubclass(hint, nn.Module)
    ):
        return "layer"
    word = parameter.name.strip("_").lower()
    return "name" if word in _NAME else "layer" if word in _LAYER else ""


def weighted(layers: Layers) -> dict[str, nn.Module]:
    """The layers that have parameters."""
    return {name: layer for name, layer in layers.items() if list(layer.parameters())}


def choose(where: str | Where | None, model: nn.Module, layers: Layers) -> dict[str, str]:
    """The layers that ``where`` leaves alone: name -> reason.

    where: a name in `WHERE`; (name, layer) -> whether to convert it; or None, which selects all.
    """
    if where is None:
        return {}
    if isinstance(where, str):
        left_alone = WHERE[where](model, weighted(layers))
        return {name: f"{where}: {why}" for name, why in left_alone.items()}
    left = [name for name, layer in layers.items() if not where(name, layer)]
    if len(left) == len(layers) and isinstance(where, _Checked) and where.turned is None:
        with suppress(AttributeError, TypeError):  # perhaps it takes (layer, name)
            turned = _Checked(where.function, True)
            left = [name for name, layer in layers.items() if not turned(name, layer)]
    return dict.fromkeys(left, "not chosen")


def within(name: str, block: str) -> bool:
    """Whether the module ``name`` is inside of the module ``block``."""
    return name.startswith(f"{block}.")


def blocks_of(model: nn.Module, layers: Layers) -> list[str]:
    """The names of the blocks, outer ones before blocks nested in them (experts)."""
    found = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        names = [f"{path}.{key}" if path else key for key, _ in module.named_children()]
        if not path and len(names) == 1:  # a wrapper around a model
            continue
        inside = all(any(within(layer, name) for layer in layers) for name in names)
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
            before, after = sizes_of(layers[name])
            joined = open_part and after <= before
            parts = [*parts[:-1], [*parts[-1], name]] if joined else [*parts, [name]]
            open_part = joined or after == before
        elif isinstance(child, nn.ModuleList):
            parts += _parts(name, child, layers)
        else:
            inner = [layer for layer in layers if within(layer, name)]
            parts += [inner] if inner else []
            open_part = open_part and not inner
    return parts


def sizes_of(layer: Any) -> tuple[int, int]:
    """(inputs, outputs) of a layer; (0, -1) for other kinds of layers."""
    for inputs, outputs in (("in_features", "out_features"), ("in_channels", "out_channels")):
        if hasattr(layer, inputs):
            return getattr(layer, inputs), getattr(layer, outputs)
    if isinstance(layer, nn.MultiheadAttention):
        return layer.embed_dim, layer.embed_dim
    if hasattr(layer, "nx"):  # transformers' Conv1D
        return layer.nx, layer.nf
    return 0, -1
