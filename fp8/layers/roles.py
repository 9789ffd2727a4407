"""The roles of layers, which `fp8.Policy.keep` names, from the structure of a model.

*Blocks* are the items of an `nn.ModuleList` or `nn.Sequential` that have one class and contain
layers. The *width* of a block is the input size of its first layer. Its *parts* are its children
(attention, MLP). Among direct children that are layers, a width-preserving layer starts a part, and
a widening layer closes the part before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..common.mixin import bare_class
from ..recipes.policy import ROLES
from ..torch_internals import Layer
from .select import holds_experts, is_transposed, layers_of

__all__ = ["Layers", "blocks_of", "sizes_of", "with_role", "within"]

Layers = Mapping[str, nn.Module]
"""Name -> layer, in the order of the model."""


def within(name: str, block: str) -> bool:
    """Whether the module ``name`` is inside of the module ``block``."""
    return name.startswith(f"{block}.")


def _in_any(name: str, blocks: list[str]) -> bool:
    return any(within(name, block) for block in blocks)


def blocks_of(model: nn.Module, layers: Layers) -> list[str]:
    """The names of the blocks, outer ones before blocks nested in them (experts)."""
    blocks = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        items = [f"{path}.{key}" if path else key for key, _ in module.named_children()]
        if not path and len(items) == 1:  # a wrapper around a model
            continue
        inside = all(any(within(name, item) for name in layers) for item in items)
        if inside and len({bare_class(child) for child in module.children()}) == 1:
            blocks += items
    return blocks


# The last of transformers' Conv1D.
_SIZES = {"in_features": "out_features", "in_channels": "out_channels", "nx": "nf"}


def sizes_of(layer: Layer) -> tuple[int, int]:
    """(inputs, outputs) of a layer; (0, -1) for other kinds of layers."""
    if isinstance(layer, nn.MultiheadAttention):
        return layer.embed_dim, layer.embed_dim
    for inputs, outputs in _SIZES.items():
        if hasattr(layer, inputs):
            return getattr(layer, inputs), getattr(layer, outputs)
    return 0, -1


def _parts(path: str, block: nn.Module, layers: Layers) -> list[list[str]]:
    """The names of the layers in each part of a block."""
    parts: list[list[str]] = []
    open_part = False
    for key, child in block.named_children():
        name = f"{path}.{key}"
        if name in layers:
            before, after = sizes_of(layers[name])
            joined = open_part and after <= before
            if joined:
                parts[-1].append(name)
            else:
                parts.append([name])
            open_part = joined or after == before
        elif isinstance(child, nn.ModuleList):
            parts += _parts(name, child, layers)
        else:
            inner = [layer for layer in layers if within(layer, name)]
            if inner:
                parts.append(inner)
                open_part = False
    return parts


def _outside(model: nn.Module, layers: Layers, reads: bool) -> dict[str, str]:
    """The layers outside of all blocks that read the residual stream, or those that do not: by the
    side that has its width, or else by their position, after the first block or before."""
    names = list(layers)
    blocks = blocks_of(model, layers)
    if not blocks:
        last = names[-1:] if reads else []
        return dict.fromkeys(last, "the last layer of a model that repeats no block")
    why = f"outside of the blocks, {'reads' if reads else 'does not read'} the residual stream"
    inside = [_in_any(name, blocks) for name in names]
    start = inside.index(True)
    width = sizes_of(layers[names[start]])[0]
    reasons = {}
    for index, name in enumerate(names):
        before, after = (size == width for size in sizes_of(layers[name]))
        # Of a layer with the width on both sides, or on none, the position decides.
        reading = before if before != after else index > start
        if not inside[index] and reads == reading:
            reasons[name] = why
    return reasons


def _residual(model: nn.Module, layers: Layers) -> dict[str, str]:
    """The last layer of each part of a block, if its output has the width of the block."""
    blocks = blocks_of(model, layers)
    reasons = {}
    for name, layer in layers.items():
        if blocks and not _in_any(name, blocks):
            continue
        if isinstance(layer, nn.MultiheadAttention):
            reasons[name] = "one module with the output projection of the attention"
        elif holds_experts(layer):
            reasons[name] = "one module with the down projections of the experts"
    for block in blocks:
        inside = {name: layer for name, layer in layers.items() if within(name, block)}
        width = sizes_of(next(iter(inside.values())))[0]
        for part in _parts(block, model.get_submodule(block), inside):
            if sizes_of(inside[part[-1]])[1] == width:
                reasons.setdefault(part[-1], "attention output or down projection")
    return reasons


def _router(model: nn.Module, layers: Layers) -> dict[str, str]:
    """Layers of a block with an output for each entry of a list or stack beside them or above."""
    blocks = blocks_of(model, layers)
    reasons = {}
    for name, layer in layers.items():
        outputs = sizes_of(layer)[1]
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and not is_lazy(weight) and weight.dim() == 2:
            outputs = weight.shape[1] if is_transposed(layer) else weight.shape[0]
        parent = name.rpartition(".")[0]
        above = parent.rpartition(".")[0]
        counts = _counts(model.get_submodule(parent), layer)
        counts |= _counts(model.get_submodule(above), layer)
        if outputs > 1 and outputs in counts and _in_any(name, blocks):
            reasons[name] = f"one output for each of {outputs} experts beside it"
    return reasons


def _counts(parent: nn.Module, but: nn.Module) -> set[int]:
    """The lengths of lists of modules and of stacks in ``parent`` and its children but ``but``."""
    lengths = set()
    for module in (parent, *parent.children()):
        if isinstance(module, nn.ModuleList):
            lengths.add(len(module))
        if module is but:
            continue
        for parameter in module.parameters(recurse=False):
            if not is_lazy(parameter) and parameter.dim() == 3:
                lengths.add(len(parameter))
    return lengths


_FINDERS: dict[str, Callable[[nn.Module, Layers], dict[str, str]]] = {
    "embedding": partial(_outside, reads=False),
    "readout": partial(_outside, reads=True),
    "residual": _residual,
    "router": _router,
}
"""Role -> (model, its layers by name) -> the layers with this role: name -> reason."""


def with_role(role: str, model: nn.Module, layers: Layers) -> dict[str, str]:
    """The layers of ``model`` with a role of `fp8.recipes.policy.ROLES`: name -> reason. layers:
    those that can be converted. Empty if only others have the role: lookups, and layers whose
    products are their own. Raises ValueError if nothing has the role "residual" or "router"."""
    find = _FINDERS[role]
    reasons = find(model, layers)
    if reasons or role in ("embedding", "readout"):
        return reasons
    every = {name: layer for name, layer, _ in layers_of(model)}
    if not find(model, every):
        missing = f"role {role!r} is not found in this {bare_class(model).__name__}: {ROLES[role]}"
        raise ValueError(f"{missing}. Use a rule with the names of the layers")
    return reasons
