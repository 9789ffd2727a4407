"""Policies in the terms of other libraries: torchao, TransformerEngine and Megatron-LM.

What a library cannot express is a ValueError that names the rule or layer, or one of the returned
notes; nothing is left out silently. Read from the source of torchao 0.18, TransformerEngine 2.20
and Megatron-LM 0.16 (megatron/core/quantization and TransformerEngineMixedPrecision.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from torch import nn

from ..layers.policies import resolve
from ..recipes.policy import Policy, blocks_in, composed, name_of, recipe_of
from ..recipes.recipe import PLAIN, RECIPES, Recipe
from . import torchao, transformer_engine
from .transformer_engine import TERecipe

__all__ = [
    "MegatronFiles",
    "as_code",
    "for_megatron",
    "for_torchao",
    "for_transformer_engine",
    "open_contexts",
]


T = TypeVar("T")


def _low(recipe: Recipe | None) -> Recipe | None:
    """``recipe``; None for 16 bits, which these libraries take from the model."""
    if recipe == RECIPES["bf16"]:
        return None
    return recipe


def _at_start(policy: Policy, library: str) -> tuple[Policy, list[str]]:
    """The policy at the start of training, and a note on each switch."""
    notes = [
        f"{library} does not switch recipes: at {start:g} of the steps, resume from a checkpoint "
        f"with policy.at({start:g}), which is {name_of(to)!r}"
        for start, to in policy.switch
    ]
    return policy.at(0), notes


def _translated(
    policy: Policy, model: nn.Module, make: Callable[[Recipe], T]
) -> Iterator[tuple[str, Recipe | None, T | None]]:
    """(layer, recipe, ``make(recipe)``), None twice for high precision."""
    for name, decision in resolve(policy, model).items():
        # "auto" is "tensor", as the layers of these libraries are not unit-scaled.
        recipe = _low(composed(decision.sources, PLAIN))
        made = None
        if recipe is not None:
            try:
                made = make(recipe)
            except ValueError as error:
                raise ValueError(f"layer {name!r}: {error}") from None
        yield name, recipe, made


def for_torchao(
    policy: Policy, model: nn.Module, *, emulate: bool = False
) -> tuple[list[tuple[torchao.Config, set[str]]], list[str]]:
    """The configurations of torchao, and the linear layers for each.

    Args:
        model: the model before torchao converts it; not changed.
        emulate: as in `fp8.adapters.torchao.ao_config`.

    Returns:
        (pairs of a configuration and the names of its layers, notes on what is not translated).
        `fp8.adapters.torchao.convert`, or a filter of torchao's own function, takes each pair.

    Raises:
        ValueError: as `fp8.layers.policies.resolve`, and for a recipe that torchao lacks.
        ImportError: without torchao.
    """
    policy, notes = _at_start(policy, "torchao")
    groups: dict[Recipe, tuple[torchao.Config, set[str]]] = {}
    config = partial(torchao.ao_config, emulate=emulate)
    for name, recipe, theirs in _translated(policy, model, config):
        if recipe is not None and isinstance(model.get_submodule(name), nn.Linear):
            groups.setdefault(recipe, (theirs, set()))[1].add(name)
        elif recipe is not None:
            notes.append(
                f"torchao converts linear layers only: {name!r} stays in high precision"
            )
    return [*groups.values()], notes


def for_transformer_engine(
    policy: Policy, model: nn.Module
) -> tuple[dict[str, TERecipe | None], list[str]]:
    """The contexts of TransformerEngine in which a model and some of its modules run.

    Args:
        model: with layers of torch, before layers of TransformerEngine replace them; not changed.

    Returns:
        (module -> TransformerEngine's recipe of the context around its forward, or None where it is
        not enabled; notes on what is not translated). "" is the model. `open_contexts` takes them.

    Raises:
        ValueError: as `fp8.layers.policies.resolve`, and for a recipe that TransformerEngine
            lacks, such as one with a single cast in high precision.
        ImportError: without TransformerEngine.
    """
    policy, notes = _at_start(policy, "TransformerEngine")
    base = _low(recipe_of(policy.recipe))
    make = transformer_engine.te_recipe
    contexts = {"": base and make(base)}
    for name, recipe, theirs in _translated(policy, model, make):
        if recipe != base:
            contexts[name] = theirs
    return contexts, notes


def open_contexts(model: nn.Module, contexts: Mapping[str, TERecipe | None]) -> None:
    """Runs modules of ``model``, with TransformerEngine's layers, in ``contexts``.
    `fp8.adapters.transformer_engine.revert` undoes it.

    Args:
        model: changed in place.
        contexts: the result of `for_transformer_engine`.

    Raises:
        AttributeError: if the model has no such module.
    """
    modules = {name: model.get_submodule(name) for name in contexts}
    for name, module in modules.items():
        transformer_engine.run_under(module, contexts[name], in_eval=True)


class MegatronFiles(NamedTuple):
    """flags: of Megatron's training script. yaml: the text of the file of
    ``--te-precision-config-file``, "" if none is needed. notes: what differs."""

    flags: list[str]
    yaml: str
    notes: list[str]


_MEGATRON = {
    "tensor": "tensorwise",
    "delayed": "delayed",
    "block": "blockwise",
    "mxfp8": "mxfp8",
}
"""Our recipe -> Megatron's ``--fp8-recipe``."""


def _in_megatron(what: str, recipe: str | Recipe | None) -> dict[str, str]:
    """The fields of a TEQuantizationRecipe; {} is high precision. what: the rule, for errors."""
    chosen = _low(recipe_of(recipe))
    if chosen is None:
        return {}
    if chosen == replace(RECIPES["nvfp4_nvidia"], name=chosen.name):
        return {"fp4_quantization_recipe": "nvfp4"}
    for name, theirs in _MEGATRON.items():
        candidate = RECIPES[name]
        assert candidate.grad is not None
        for format, kind in (("e4m3", "e4m3"), ("e5m2", "hybrid")):  # of gradients
            grad = replace(candidate.grad, format=format)
            if chosen == replace(candidate, name=chosen.name, grad=grad):
                return {"fp8_quantization_recipe": theirs, "fp8_format": kind}
    allowed = ", ".join(map(repr, (*_MEGATRON, "nvfp4_nvidia", "bf16")))
    raise ValueError(
        f"{what}: Megatron has no recipe {chosen.name!r}; it has {allowed} and None"
    )


def for_megatron(policy: Policy, blocks: int | None = None) -> MegatronFiles:
    """The flags of Megatron-LM and the text of its ``--te-precision-config-file``.

    Args:
        policy: a policy whose rules match the names of Megatron's modules,
            "decoder.layers.0.mlp.linear_fc1".
        blocks: Megatron's ``--num-layers``; needed if ``first`` or ``last`` is a share.

    Raises:
        ValueError: for a rule of single casts, a recipe that Megatron does not have, "delayed" in a
            rule or with ``first`` and ``last``, for ``first`` and ``last`` without a recipe or as a
            share of an unknown number of blocks, and for ``others`` but None and "bf16".
    """
    policy, notes = _at_start(policy, "Megatron")
    base = _in_megatron("the policy", policy.recipe)
    scaling = base.get("fp8_quantization_recipe")
    ends = {
        "start": _count("first", policy.first, blocks),
        "end": _count("last", policy.last, blocks),
    }
    has_ends = any(ends.values())
    if has_ends and scaling == "delayed":
        raise ValueError(
            f"blocks {ends}: Megatron does not combine these with 'delayed'"
        )
    if has_ends and not base:
        raise ValueError(
            f"blocks {ends}: Megatron has these only with a recipe for the others"
        )
    if _low(recipe_of(policy.others)) is not None:
        others = name_of(policy.others)
        raise ValueError(
            f"others={others!r}: Megatron keeps these layers in high precision"
        )
    if base and "readout" not in policy.keep:
        notes.append(
            "Megatron computes the output layer in high precision, whatever the policy"
        )
    flags = []
    if "fp4_quantization_recipe" in base:
        flags = ["--fp4-format=e2m1", "--fp4-recipe=nvfp4"]
    elif base:
        flags = [f"--fp8-format={base['fp8_format']}", f"--fp8-recipe={scaling}"]
    if scaling == "delayed":
        flags += ["--fp8-amax-history-len=16", "--fp8-amax-compute-algo=max"]
    if scaling == "tensorwise":
        notes.append("the scales of Megatron's tensorwise recipe are not powers of two")
    if has_ends:
        flags.append("--first-last-layers-bf16")
        flags += [
            f"--num-layers-at-{end}-in-bf16={count}" for end, count in ends.items()
        ]
    return MegatronFiles(flags, _precision_file(policy, base), notes)


def _count(field: str, share: int | float, blocks: int | None) -> int:
    if blocks is None and isinstance(share, float):
        raise ValueError(
            f"{field}={share}: Megatron takes a number of blocks: for_megatron(policy, blocks=n)"
        )
    return blocks_in(share, blocks or 0)


def _precision_file(policy: Policy, base: dict[str, str]) -> str:
    """The rules, the last one first, as Megatron takes the first that matches. JSON is YAML."""
    configs: dict[str, object] = {}
    matchers: dict[str, object] = {}

    def match(matcher: str, pattern: str, recipe: dict[str, object]) -> None:
        name = "_".join(map(str, [*recipe.values()][:2])) or "high_precision"
        kind = {"transformer_engine_config_type": "TEQuantizationParams"}
        configs[name] = kind | {"training_recipe": recipe}
        matchers[matcher] = {
            "config": name,
            "type": "glob",
            "pattern": pattern,
            "enabled": True,
        }

    if "residual" in policy.keep:  # the other roles never run in FP8 there
        match("keep_residual_1", "*.linear_proj", {})
        match("keep_residual_2", "*.linear_fc2", {})
    enable: dict[str, object] = {}
    if not base:  # else Megatron skips the rules, outside of its own autocast
        enable = {"override_nonquantized_autocast": True}
    for index, rule in reversed(list(enumerate(policy.rules, 1))):
        what = f"rule {index} ({rule})"
        if rule.product is not None:
            raise ValueError(
                f"{what}: Megatron has no recipe for single casts of a layer"
            )
        config = _in_megatron(what, rule.recipe)
        if config.get("fp8_quantization_recipe") == "delayed":
            raise ValueError(f"{what}: Megatron has 'delayed' for the whole model only")
        # Megatron reads brackets as `fnmatch` does; here they are plain characters.
        glob = rule.layers.replace("[", "[[]")
        match(f"rule_{index}", glob, {**config, **enable} if config else {})
    if matchers:
        return json.dumps({"configs": configs, "matchers": matchers}, indent=2)
    return ""


def as_code(policy: Policy) -> dict[str, str]:
    """Lines to copy that apply ``policy``, by library.

    Returns:
        "fp8", "torchao", "transformer_engine" and "megatron" -> the lines; a comment with the
        reason where the library cannot express the policy.
    """
    made = f"policy = {_source(policy)}\n"
    step = ""
    if policy.switch:
        step = "\nfp8.advance(model, step / steps)  # before each step"
    return {
        "fp8": f"import fp8\n\n{made}fp8.convert(model, policy){step}",
        "torchao": f"""import fp8
from fp8.adapters import policies, torchao

{made}parts, notes = policies.for_torchao(policy, model)
for config, names in parts:
    torchao.convert(model, config, where=lambda name, layer: name in names)
print(*notes)""",
        "transformer_engine": f"""import fp8
from fp8.adapters import policies

{made}contexts, notes = policies.for_transformer_engine(policy, model)  # layers of torch
policies.open_contexts(te_model, contexts)  # with te.Linear under the same names
print(*notes)""",
        "megatron": _megatron_code(policy),
    }


def _megatron_code(policy: Policy) -> str:
    try:
        flags, yaml, notes = for_megatron(policy)
    except ValueError as error:
        return f"# not possible: {error}"
    if yaml:
        flags = [*flags, "--te-precision-config-file=policy.yaml"]
        yaml = f"\n\n# policy.yaml\n{yaml}"
    lines = ["# flags", *(flags or ["# none"])]
    lines[-1] += yaml
    return "\n".join([*lines, *(f"# {note}" for note in notes)])


def _source(policy: Policy) -> str:
    """An expression for the policy: the arguments that are not the defaults."""
    values = policy.to_dict()
    recipes = [policy.recipe, policy.others, *(rule.recipe for rule in policy.rules)]
    recipes += [to for _, to in policy.switch if not isinstance(to, Policy)]
    if any(isinstance(recipe, Recipe) for recipe in recipes):
        return f"fp8.Policy.from_json({json.dumps(json.dumps(values))})"
    arguments = [repr(values.pop("recipe"))]
    values["rules"] = [(r.layers, r.product, r.recipe) for r in policy.rules]
    entries = []
    # A policy in a switch has no switch of its own.
    for start, to in policy.switch:
        source = _source(to) if isinstance(to, Policy) else repr(to)
        entries.append(f"({start!r}, {source})")
    for name, value in values.items():
        source = repr(value)
        if name == "switch":
            source = f"[{', '.join(entries)}]"
        if value:
            arguments.append(f"{name}={source}")
    return f"fp8.Policy({', '.join(arguments)})"
