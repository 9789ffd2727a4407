"""`fp8.override`: other recipes for parts of a converted model while a block is open."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from ..casts.counts import forget_checks
from ..common.compiler import eager_only
from ..common.mixin import check_module
from ..common.threads import frames
from ..products.active import ACTIVE
from ..recipes.policy import CASTS, Rule, RuleTuple, Source, composed, source_of
from ..selection.layers import auto_of
from ..selection.policies import matches
from ..warnings import RecipeWarning, show
from .convert import Converted, set_recipe

_RESTORED = (
    *("fp8_recipe", "fp8_backend", "fp8_since"),
    *("fp8_measured", "fp8_by_call", "_buffers"),
)


class override:
    """Within the block, the layers of ``model`` that match take the recipes of the rules.

    For debugging: which product of which layer makes a loss diverge? Rules apply in order, on top
    of the recipe in force, to the products whose forward pass runs in the block, and to their
    backward pass, wherever that runs. Checkpoints with ``use_reentrant=False`` run both inside of
    the block, or both outside. Inside of ``fp8.autocast(enabled=False)`` it has no effect, and
    warns. Afterwards every layer is as before, with its scales and histories. Blocks can be nested.
    A compiled model is compiled again. `advance` belongs outside of the block.

    Args:
        model: a model that `fp8.convert` has converted, or a part of it.
        rules: `Rule` objects, or tuples (layers, product, recipe), as in `fp8.Policy`.

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

    def __init__(self, model: nn.Module, *rules: Rule | RuleTuple) -> None:
        check_module("override", model)
        if not rules:
            raise ValueError('override needs a rule: ("*.mlp.*", "grad_weight", None)')
        self._model = model
        self._rules = tuple(map(Rule.of, rules))
        self._before: list[list[tuple[Any, dict[str, Any]]]] = []
        self._hooks: list[Any] = []
        self._sources()  # raises before anything changes

    def _sources(self) -> dict[Any, tuple[Source, ...]]:
        modules = self._model.named_modules()
        named: dict[str, Any] = {n: m for n, m in modules if isinstance(m, Converted)}
        by_layer: dict[Any, list[Source]] = {}
        for rule in self._rules:
            layers = {name: m for name, m in named.items() if matches(rule.layers, name)}
            if not layers:
                names = ", ".join(map(repr, list(named)[:8])) or "none"
                raise ValueError(f"override: {rule} matches no converted layer; there are {names}")
            for layer in layers.values():
                sources = by_layer.setdefault(layer, [vars(layer)["fp8_recipe"]] * len(CASTS))
                for cast in rule.casts:
                    sources[cast] = source_of(rule.recipe)
                composed(tuple(sources), auto_of(layer))  # raises for what no recipe has
        return {layer: tuple(sources) for layer, sources in by_layer.items()}

    def __enter__(self) -> override:
        if ACTIVE.blocks and ACTIVE.blocks[-1].off:
            show(
                RecipeWarning,
                "fp8.override has no effect inside of fp8.autocast(enabled=False), where converted "
                "layers run in high precision: open it outside of such blocks",
            )
        before = []
        for layer, sources in self._sources().items():
            attributes = {key: vars(layer)[key] for key in _RESTORED if key in vars(layer)}
            before.append((layer, attributes | {"_buffers": dict(layer._buffers)}))
            set_recipe(layer, sources)
            vars(layer)["fp8_since"] = "override"
            self._hooks.append(layer.register_forward_pre_hook(_check_checkpoint))
        self._before.append(before)
        forget_checks(self._model)
        return self

    def __exit__(self, *error: Any) -> None:
        for layer, attributes in self._before.pop():
            self._hooks.pop().remove()
            for key in _RESTORED:
                vars(layer).pop(key, None)
            vars(layer).update(attributes)
        forget_checks(self._model)


_REENTRANT = (CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__)


@eager_only()
def _check_checkpoint(layer: nn.Module, args: Any) -> None:
    if any(frame.f_code in _REENTRANT for frame in frames()):
        raise RuntimeError(
            "fp8.override: checkpoint(use_reentrant=True) may recompute layers on the other side "
            "of the block, under other recipes: use checkpoint(use_reentrant=False)"
        )
