"""`fp8.override`: other recipes for parts of a converted model while a block is open."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from ..common.compiler import eager_only
from ..common.validation import check_module
from ..frame import FRAMES
from ..recipes.policy import (
    CASTS,
    LayerRule,
    RuleTuple,
    Source,
    Sources,
    composed,
    source_of,
)
from ..recipes.recipe import Recipe
from ..torch_internals import Keywords, Layer
from ..torch_internals.running_calls import python_frames
from ..warnings import RecipeWarning, show
from .policies import matches
from .select import auto_of
from .settings import OVERRIDDEN, Converted, converted, set_recipe, watch_layers

#: The attributes of a layer that a block changes. Layers without state have no fp8_measured.
_CHANGED = Converted._attributes

_NUMBERS = itertools.count()
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Overridden:
    """The record of a layer in open blocks.

    Attributes:
        before: its attributes without them.
        rules: number of a block -> its rules, in the order in which the blocks were opened.
    """

    before: Keywords
    rules: dict[int, list[LayerRule]]


class override:
    """Within the block, the layers of ``model`` that match take the recipes of the rules.

    For debugging: which product of which layer makes a loss diverge? Rules apply in order, on top
    of the recipe in force, to the products whose forward pass runs in the block, and to their
    backward pass, wherever that runs. Checkpoints with ``use_reentrant=False`` run both inside of
    the block, or both outside. Inside of ``fp8.autocast(enabled=False)`` it has no effect, and
    warns. A block holds for all threads. Blocks can be nested, and closed in any order: each
    removes its own rules, and with a warning those that have no recipe without them. After the last
    one every layer is as before, with its scales and histories; scales of casts that only a block
    has end with it. `fp8.convert` and `fp8.revert` end the effect on the layers that they change. A
    compiled model is compiled again. `fp8.advance`, `fp8.eject` and `fp8.export` are refused.

    Args:
        model: a model that `fp8.convert` has converted, or a part of it.
        rules: `LayerRule` objects, or tuples (layers, product, recipe), as in `fp8.Policy`.

    Raises:
        TypeError: if ``model`` is not a module, and for what is no rule.
        ValueError: without rules; for a rule that matches no converted layer; for a combination of
            casts that no recipe has.
        RuntimeError: inside of a checkpoint with ``use_reentrant=True``.

    >>> import torch, fp8
    >>> model = fp8.convert(torch.nn.Sequential(torch.nn.Linear(16, 16)), "mxfp8")
    >>> with fp8.override(model, ("0", "grad_weight", None)):
    ...     print(model[0].fp8_recipe.name)
    mxfp8 (grad_weight: high precision)
    >>> model[0].fp8_recipe.name
    'mxfp8'
    """

    def __init__(self, model: nn.Module, *rules: LayerRule | RuleTuple) -> None:
        check_module("override", model)
        if not rules:
            raise ValueError('override needs a rule: ("*.mlp.*", "grad_weight", None)')
        self._model = model
        self._rules = tuple(map(LayerRule.of, rules))
        # Numbers, and hooks by layer.
        self._open: list[tuple[int, dict[Any, RemovableHandle]]] = []
        self._by_layer()  # raises before anything changes

    def _by_layer(self) -> dict[Any, list[LayerRule]]:
        """Layer -> its rules, which have a recipe on top of the one in force."""
        named = converted(self._model)
        by_layer: dict[Any, list[LayerRule]] = {}
        for rule in self._rules:
            layers = [m for name, m in named.items() if matches(rule.layers, name)]
            if not layers:
                names = ", ".join(map(repr, list(named)[:8])) or "none"
                raise ValueError(
                    f"override: {rule} matches no converted layer; there are {names}"
                )
            for layer in layers:
                by_layer.setdefault(layer, []).append(rule)
        for layer, rules in by_layer.items():
            in_force = [layer.fp8_recipe] * len(CASTS)
            # Raises for combinations that no recipe can represent.
            composed(_changed(in_force, rules), auto_of(layer))
        return by_layer

    def __enter__(self) -> override:
        block = FRAMES.items[-1].block
        if block is not None and block.off:
            show(
                RecipeWarning,
                "fp8.override has no effect inside of fp8.autocast(enabled=False), where converted "
                "layers run in high precision: open it outside of such blocks",
            )
        with _LOCK:
            number = next(_NUMBERS)
            hooks = {}
            for layer, rules in self._by_layer().items():
                record = vars(layer).setdefault(
                    OVERRIDDEN, Overridden(_attributes(layer), {})
                )
                record.rules[number] = rules
                _apply(layer, record)
                hooks[layer] = layer.register_forward_pre_hook(_check_checkpoint)
            self._open.append((number, hooks))
        watch_layers(self._model)
        return self

    def __exit__(self, *error: object) -> None:
        dropped: list[str] = []
        with _LOCK:
            number, hooks = self._open.pop()
            for layer, hook in hooks.items():
                hook.remove()
                record = vars(layer).get(OVERRIDDEN)
                # None: a conversion inside of the block has replaced what it changed.
                if record is not None and record.rules.pop(number, None):
                    dropped += _apply(layer, record)
        watch_layers(self._model)
        for message in dropped:
            show(RecipeWarning, message)


def _attributes(layer: Layer) -> Keywords:
    """The attributes of a layer that a block changes."""
    attributes = {key: vars(layer)[key] for key in _CHANGED if key in vars(layer)}
    return attributes | {"_buffers": dict(layer._buffers)}


def _changed(sources: Iterable[Source], rules: Iterable[LayerRule]) -> Sources:
    changed = list(sources)
    for rule in rules:
        for cast in rule.casts:
            changed[cast] = source_of(rule.recipe)
    return tuple(changed)


def _apply(layer: Any, record: Overridden) -> list[str]:
    """Sets the recipe of a layer from that without blocks and the rules of the open ones. Drops
    those that have no recipe without a block that was closed, and returns why."""
    dropped: list[str] = []
    recipe: Recipe | None = record.before["fp8_settings"].recipe
    sources: Sources = (recipe,) * len(CASTS)
    for number, rules in list(record.rules.items()):
        changed = _changed(sources, rules)
        try:
            recipe = composed(changed, auto_of(layer))
            sources = changed
        except ValueError as error:
            del record.rules[number]
            dropped.append(
                f"fp8.override: {rules[0]} needs a block that was closed: {error}"
            )
    # The new object has attributes of its own: other threads see all of the change at once.
    made: Layer = object.__new__(type(layer))
    attributes = {k: value for k, value in vars(layer).items() if k not in _CHANGED}
    buffers = dict(record.before["_buffers"])
    attributes |= record.before | {"_buffers": buffers}
    object.__setattr__(made, "__dict__", attributes)
    if record.rules:
        # Buffers of open blocks stay, perhaps with scales that are set.
        if recipe is not None and recipe.keeps_history:
            for name, buffer in layer._buffers.items():
                buffers.setdefault(name, buffer)
        set_recipe(made, sources, since="override")
    else:
        del vars(layer)[OVERRIDDEN]
    after = _attributes(made)
    vars(layer).update(after)
    if "fp8_measured" not in after:
        vars(layer).pop("fp8_measured", None)
    return dropped


def check_not_overridden(what: str, model: nn.Module) -> None:
    """Raises ValueError if a block is open for a layer of ``model``."""
    for name, module in model.named_modules():
        if OVERRIDDEN in vars(module):
            why = f"would write the recipe of the block for {name or '(model)'!r}: close it first"
            raise ValueError(f"{what} inside of fp8.override {why}")


_REENTRANT = (CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__)


@eager_only()
def _check_checkpoint(layer: nn.Module, args: object) -> None:
    if any(frame.f_code in _REENTRANT for frame in python_frames()):
        raise RuntimeError(
            "fp8.override: checkpoint(use_reentrant=True) may recompute layers on the other side "
            "of the block, under other recipes: use checkpoint(use_reentrant=False)"
        )
