"""Applies a policy to a model: the recipe of each layer, and the rule that decided."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..common.mixin import bare_class
from ..common.validation import nearest
from ..recipes.policy import (
    CASTS,
    LayerRule,
    Policy,
    Source,
    Sources,
    blocks_in,
    composed,
    source_of,
)
from ..recipes.recipe import Recipe
from .roles import Layers, blocks_of, with_role, within
from .select import auto_of, candidates, layers_of

__all__ = ["Decision", "bare_name", "decisions_of", "matches", "resolve"]


@dataclass(frozen=True)
class Decision:
    """The decision of a policy for a layer.

    Attributes:
        recipe: the recipe; None for high precision.
        sources: the origin of each cast, in the order of `fp8.recipes.policy.CASTS`.
        why: the rules that decided; "" if it was the policy's recipe.
        kept: whether ``first``, ``last`` or ``keep`` decided.
        start: the fraction of the training from which it holds.
    """

    recipe: Recipe | None
    sources: Sources
    why: str = ""
    kept: bool = False
    start: float = 0.0


def decisions_of(policy: Policy, model: nn.Module) -> dict[str, tuple[Decision, ...]]:
    """The decisions of ``policy`` for each layer in the order of training: one at its start, and
    one for each entry of ``switch`` after it. Raises the errors of `resolve`."""
    decisions: dict[str, tuple[Decision, ...]] = {}
    for start in sorted({0.0, *dict(policy.switch)}):
        for name, decision in resolve(policy.at(start), model).items():
            held = replace(decision, start=start)
            decisions[name] = (*decisions.get(name, ()), held)
    return decisions


def resolve(policy: Policy, model: nn.Module) -> dict[str, Decision]:
    """The decision of ``policy`` for each layer of ``model`` that `fp8.convert` can convert: name
    -> `Decision`, in the order of the model. A switch is not applied.

    Raises:
        ValueError: for a rule that matches no layer, a role that the model does not have, more
            ``first`` and ``last`` blocks than there are, and for a combination of casts that no
            recipe has; the message names the rule and the layer.
    """
    # Rules name layers as they are in the model inside.
    if isinstance(model, DistributedDataParallel | DataParallel):
        decisions = resolve(policy, model.module)
        return {
            f"module.{name}" if name else "module": d for name, d in decisions.items()
        }
    layers: Layers = candidates(model)
    exceptions = _exceptions(policy, model, layers)
    by_layer: dict[str, dict[str, LayerRule]] = {name: {} for name in layers}
    for number, rule in enumerate(policy.rules, 1):
        said = f"rule {number}: {rule}"
        for name in _matched(said, rule, model, layers):
            by_layer[name][said] = rule
    decisions = {}
    for name, layer in layers.items():
        if name in exceptions:
            sources = (source_of(policy.others),) * len(CASTS)
            chosen = composed(sources, auto_of(layer))
            decisions[name] = Decision(chosen, sources, exceptions[name], kept=True)
        else:
            decisions[name] = _decide(policy, name, layer, by_layer[name])
    return decisions


def _decide(
    policy: Policy,
    name: str,
    layer: nn.Module,
    rules: dict[str, LayerRule],
) -> Decision:
    """The decision for a layer that is no exception. rules: by what messages call them."""
    sources: list[Source] = [source_of(policy.recipe)] * len(CASTS)
    deciding = [""] * len(CASTS)
    for said, rule in rules.items():
        for cast in rule.casts:
            sources[cast], deciding[cast] = source_of(rule.recipe), said
    why = "; ".join(said for said in rules if said in deciding)
    if not why and policy.recipe is None:
        why = "the recipe of the policy is None"
    try:
        return Decision(composed(tuple(sources), auto_of(layer)), tuple(sources), why)
    except ValueError as error:
        raise ValueError(
            f"the casts of {name or '(model)'!r} by {why}: {error}"
        ) from None


def _exceptions(policy: Policy, model: nn.Module, layers: Layers) -> dict[str, str]:
    """The layers that ``first``, ``last`` and ``keep`` include: name -> reason."""
    reasons: dict[str, str] = {}
    for role in policy.keep:
        for name, why in with_role(role, model, layers).items():
            reasons.setdefault(name, f"keep {role}: {why}")
    if not policy.first and not policy.last:
        return reasons
    every = blocks_of(model, layers)
    # Without blocks inside of others, such as experts.
    blocks = [b for b in every if not any(within(b, other) for other in every)]
    first = blocks_in(policy.first, len(blocks))
    last = blocks_in(policy.last, len(blocks))
    if not blocks or first + last > len(blocks):
        needs = f"first={policy.first} and last={policy.last} need {first + last or 1}"
        raise ValueError(
            f"{needs} repeated blocks, and the {bare_class(model).__name__} has {len(blocks)}"
        )
    chosen = [(b, f"first={policy.first}") for b in blocks[:first]]
    chosen += [(b, f"last={policy.last}") for b in blocks[len(blocks) - last :]]
    for block, why in chosen:
        reasons |= {n: f"{why}: in {block}" for n in layers if within(n, block)}
    return reasons


def _matched(said: str, rule: LayerRule, model: nn.Module, layers: Layers) -> set[str]:
    """The layers that a rule matches. Raises ValueError for none, except for a rule that leaves in
    high precision what is never cast."""
    names = {name for name in layers if matches(rule.layers, name)}
    others = [
        (name, why) for name, _, why in layers_of(model) if matches(rule.layers, name)
    ]
    if names or (others and rule.recipe is None):
        return names
    if others:
        name, why = others[0]
        raise ValueError(
            f"{said} matches only layers that stay: {name!r} ({why or ''})"
        )
    raise ValueError(f"{said} matches no layer{_hint(rule.layers, layers)}")


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern of a `LayerRule` matches a name, with or without the names that wrappers
    put in."""
    name = name or "(model)"  # as in reports
    # Parts of a name may have brackets, which are sets of characters for `fnmatch`.
    glob = pattern.replace("[", "[[]")
    return fnmatchcase(name, glob) or fnmatchcase(bare_name(name), glob)


#: The names under which torch.compile, FSDP1 and checkpoint_wrapper hold modules.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def bare_name(name: str) -> str:
    """A name of a module, parameter or buffer without the names that wrappers put in."""
    for wrapper in _WRAPPERS:
        name = f"{name}.".replace(wrapper, "").removesuffix(".")
    return name


def _hint(pattern: str, layers: Layers) -> str:
    names = tuple(layers)
    if any(within(name, pattern) for name in names):
        return (
            f"; for the layers inside of that module, use {json.dumps(pattern + '.*')}"
        )
    hint = nearest(pattern, names) or "."
    shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
    return f"{hint} The {len(names)} layers: {shown or 'none'}"
