"""The roles of layers in a model, found by its structure. `fp8.Policy.keep` names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..common.mixin import bare_class
from .layers import is_transposed, layers_of
from .where import WHERE, Layers, blocks_of, sizes_of, weighted, within

__all__ = ["NEVER_CAST", "roles", "with_role"]

NEVER_CAST = ("embedding", "norm")
"""Roles of which a model may have only modules that `fp8.convert` never casts (lookups, norms)."""


def _outside(model: nn.Module, layers: Layers, reads: bool) -> dict[str, str]:
    """The layers outside of all blocks that read the residual stream, or those that do not.

    A layer whose input, but not output, has the width of the blocks reads it, and one whose output
    alone has that width does not. For others the position decides: after the first block or before.
    """
    layers = weighted(layers)
    left = WHERE["hidden"](model, layers)
    blocks = blocks_of(model, layers)
    why = f"outside of the blocks, {'reads' if reads else 'does not read'} the residual stream"
    if not blocks:
        return dict.fromkeys(left, why) if reads else {}
    names = list(layers)
    start = next(i for i, name in enumerate(names) if any(within(name, b) for b in blocks))
    width = sizes_of(layers[names[start]])[0]
    found = {}
    for name in left:
        before, after = (size == width for size in sizes_of(layers[name]))
        if reads == (before if before != after else names.index(name) > start):
            found[name] = why
    return found


def _residual(model: nn.Module, layers: Layers) -> dict[str, str]:
    layers = weighted(layers)
    outside = WHERE["hidden"](model, layers)
    joins = WHERE["umup"](model, layers)
    return {name: why for name, why in joins.items() if name not in outside}


def _router(model: nn.Module, layers: Layers) -> dict[str, str]:
    """A layer inside of a block whose number of outputs is the length of a list of modules, or of a
    stack of weights (3 dimensions), that lies beside it or beside its parent."""
    blocks = blocks_of(model, layers)
    found = {}
    for name, layer in layers.items():
        outputs = sizes_of(layer)[1]
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and not is_lazy(weight) and weight.dim() == 2:
            outputs = weight.shape[1] if is_transposed(layer) else weight.shape[0]
        if outputs < 2 or not any(within(name, block) for block in blocks):
            continue
        path = name
        for _ in range(2):
            path = path.rpartition(".")[0]
            if outputs in _counts(model.get_submodule(path), layer):
                found[name] = f"one output for each of {outputs} experts beside it"
            if not path:
                break
    return found


def _counts(parent: nn.Module, but: nn.Module) -> Iterator[int]:
    """The lengths of lists of modules, and of stacks of weights, in ``parent`` and its children.
    but: not among them."""
    for module in (parent, *parent.children()):
        if isinstance(module, nn.ModuleList):
            yield len(module)
        if module is not but:
            stacks = (p for p in module.parameters(recurse=False) if not is_lazy(p))
            yield from (p.shape[0] for p in stacks if p.dim() == 3)


def _attention(model: nn.Module, layers: Layers) -> dict[str, str]:
    found = {}
    for name in layers:
        path = name
        while path:
            module = model.get_submodule(path)
            words = f"{path.rpartition('.')[2]} {bare_class(module).__name__}".lower()
            if "attention" in words or "attn" in words:
                found[name] = f"in {path}, a {bare_class(module).__name__}"
                break
            path = path.rpartition(".")[0]
    return found


_FINDERS: dict[str, Callable[[nn.Module, Layers], dict[str, str]]] = {
    "embedding": partial(_outside, reads=False),
    "readout": partial(_outside, reads=True),
    "residual": _residual,
    "router": _router,
    "attention": _attention,
    "norm": lambda model, layers: {},  # which has no product to cast
}
"""Role -> (model, its layers by name) -> the layers with this role: name -> reason."""

_NOT_FOUND = {
    "residual": "the model repeats no block",
    "router": "no layer in a repeated block has as many outputs as there are experts beside it",
    "attention": "no layer is inside of a module whose class or name contains 'attention' or "
    "'attn'",
}


def with_role(role: str, model: nn.Module, layers: Layers) -> dict[str, str]:
    """The layers of ``model`` with a role of `fp8.recipes.policy.ROLES`: name -> reason.

    layers: name -> layer, those that can be converted. Empty if only modules that are never
    converted have the role: lookups and norms, and layers whose products are their own.

    Raises ValueError if nothing in the model has the role: it cannot be determined.
    """
    found = _FINDERS[role](model, layers)
    every = {name: layer for name, layer, _ in layers_of(model)}
    if not found and role not in NEVER_CAST and not _FINDERS[role](model, every):
        why = _NOT_FOUND.get(role, "it has no layer")
        raise ValueError(
            f"role {role!r} is not found in this {bare_class(model).__name__}: {why}. Use a rule "
            "with the names of the layers"
        )
    return found


def roles(model: nn.Module, layers: Layers) -> dict[str, str]:
    """Layer -> its role: the first of "readout", "embedding", "router" and "attention" that it has,
    or "hidden" for others inside of a block, and "other".

    layers: name -> layer, as `fp8.selection.layers.candidates` finds them.
    """
    blocks = blocks_of(model, layers)
    found: dict[str, str] = {}
    for role in ("readout", "embedding", "router", "attention"):
        for name in _FINDERS[role](model, layers):
            found.setdefault(name, role)
    for name in layers:
        inside = not blocks or any(within(name, block) for block in blocks)
        found.setdefault(name, "hidden" if inside else "other")
    return {name: found[name] for name in layers}
