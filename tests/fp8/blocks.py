"""Blocks under any recipe, also one that keeps scales, for products that no layer computes."""

import torch
from torch import nn

import fp8
from fp8.casts.watch import LayerWatch, Watch
from fp8.common.mixin import add_mixin
from fp8.layers.settings import Converted, LayerSettings
from fp8.modes.autocast import LayerBlock
from fp8.recipes.history import LayerState, add_buffers
from fp8.recipes.recipe import get_recipe


def keeper(recipe):
    """A layer of several products, whose buffers keep the scales of each by its order."""
    layer = nn.Identity()
    add_mixin(layer, Converted)
    recipe = get_recipe(recipe)
    vars(layer)["fp8_settings"] = LayerSettings(
        sources=(recipe,), recipe=recipe, by_call=True
    )
    vars(layer)["fp8_watch"] = LayerWatch("", Watch())
    add_buffers(layer)
    return layer


def block(recipe, backend="simulate", layer=None):
    """`fp8.autocast`, or under a recipe with state the block of one call of ``layer``, a `keeper`
    (None: a new one)."""
    recipe = get_recipe(recipe)
    if not recipe.keeps_history:
        return fp8.autocast(recipe, backend=backend)
    return LayerBlock(recipe, backend, LayerState(layer or keeper(recipe)))


def saved_by(run):
    """The tensors that autograd saves in a call."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t) or t, lambda t: t
    ):
        run()
    return saved


def bytes_of(tensors):
    """The bytes of the storages of tensors, shared ones once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors
    }
    return sum(storages.values())
