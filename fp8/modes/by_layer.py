"""Layers of a model that run under a recipe of their own inside of `fp8.autocast(policy, model=)`.

While the block is open, hooks of each such layer open a nested block around its forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..context.active import ACTIVE
from ..recipes.policy import Policy, source_of
from ..recipes.recipe import Recipe
from ..selection.policies import resolve

Layers = dict[nn.Module, Recipe | None]


def layers_by_policy(policy: Policy, model: nn.Module | None) -> Layers:
    """The layers of ``model`` that do not take the policy's own recipe -> the recipe of each.

    Raises ValueError for a policy with a switch, for one that needs a model without one, and as
    `fp8.selection.policies.resolve`; NotImplementedError if torch.compile traces it.
    """
    if policy.switch:
        raise ValueError(
            "fp8.autocast does not know how much of the training is done: pass policy.at(fraction) "
            "instead of a policy with a switch"
        )
    if not policy.selects:
        return {}
    check_eager()
    if not isinstance(model, nn.Module):
        raise ValueError(
            "a policy that selects layers (rules, first, last, keep) needs their names: "
            f"fp8.autocast(policy, model=model), not model={model!r}"
        )
    own = source_of(policy.recipe)
    found = resolve(policy, model, every=True)
    return {
        model.get_submodule(name): decision.recipe
        for name, decision in found.items()
        if any(source != own for source in decision.sources)
    }


def check_eager() -> None:
    """Raises NotImplementedError if torch.compile traces the call."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "fp8.autocast with a policy that selects layers cannot be compiled: use "
            "fp8.convert(model, policy)"
        )


class ByLayer:
    """The hooks of the layers of an `fp8.autocast` block.

    open: (recipe) -> the nested block of a layer.
    """

    def __init__(self, layers: Layers, open: Callable[[Recipe | None], Any]) -> None:
        self.layers = layers
        self.open = open
        self._entries = 0
        self._handles: list[Any] = []

    def enter(self, block: Any) -> None:
        """Adds the hooks, at the first of nested entries of ``block``."""
        check_eager()
        self._entries += 1
        if self._entries > 1:
            return
        for layer, recipe in self.layers.items():
            before = layer.register_forward_pre_hook(self._before(block, recipe))
            after = layer.register_forward_hook(_after, always_call=True)
            self._handles += [before, after]

    def exit(self) -> None:
        """Removes the hooks, at the last exit."""
        self._entries -= 1
        while self._handles and not self._entries:
            self._handles.pop().remove()

    def _before(self, block: Any, recipe: Recipe | None) -> Callable[..., None]:
        def before(module: nn.Module, args: Any) -> None:
            if _innermost() is block:  # another thread, or a block inside, is not concerned
                nested = self.open(recipe)
                nested.layer = module
                nested.__enter__()

        return before


def _after(module: nn.Module, args: Any, output: Any) -> None:
    innermost = _innermost()
    if getattr(innermost, "layer", None) is module:
        innermost.__exit__(None, None, None)


def _innermost() -> Any:
    entered = ACTIVE.blocks[-1].entered if ACTIVE.blocks else None
    return None if entered is None else entered.block
