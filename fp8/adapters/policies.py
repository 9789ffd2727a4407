"""Policies in the terms of other libraries: torchao, TransformerEngine and Megatron-LM.

What a library cannot express is a ValueError that names the rule or layer, or a line of ``notes``;
nothing is left out silently. Read from the source of torchao 0.18, TransformerEngine 2.20 and
Megatron-LM 0.16 (megatron/core/quantization and TransformerEngineMixedPrecision.md).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from ..common.libraries import need
from ..recipes.policy import Policy, composed, name_of, recipe_of
from ..recipes.recipe import PLAIN, RECIPES, Recipe
from ..selection.policies import resolve
from . import torchao, transformer_engine
from .transformer_engine import te_recipe

__all__ = [
    "Contexts",
    "Filtered",
    "MegatronFiles",
    "as_code",
    "for_megatron",
    "for_torchao",
    "for_transformer_engine",
]


def _low(recipe: Recipe | None) -> Recipe | None:
    """``recipe``; None for 16 bits, which these libraries take from the model."""
    return None if recipe == RECIPES["bf16"] else recipe


def _at_start(policy: Policy, library: str) -> tuple[Policy, list[str]]:
    """The policy at the start of training, and a note on each switch."""
    notes = [
        f"{library} does not switch recipes: at {start:g} of the steps, resume from a checkpoint "
        f"with policy.at({start:g}), whose recipe is {name_of(recipe)!r}"
        for start, recipe in policy.switch
    ]
    return policy.at(0), notes


def _recipes(policy: Policy, model: nn.Module) -> dict[str, Recipe | None]:
    """Layer -> recipe; "auto" is "tensor", as the layers of these libraries are not unit-scaled."""
    return {n: _low(composed(d.sources, PLAIN)) for n, d in resolve(policy, model).items()}


def _translated(name: str, make: Any, recipe: Recipe) -> Any:
    """``make(recipe)``. Raises ValueError with the name of the layer."""
    try:
        return make(recipe)
    except ValueError as error:
        raise ValueError(f"layer {name!r}: {error}") from None


@dataclass(frozen=True)
class Filtered:
    """A configuration of torchao's and the layers that it is for.

    Attributes:
        config: a Float8LinearConfig, or an MXFP8TrainingOpConfig.
        layers: the names of the linear layers.
    """

    config: Any
    layers: frozenset[str]

    def filter(self, module: nn.Module, name: str) -> bool:
        """Whether torchao converts this module: a ``module_filter_fn``."""
        return name in self.layers

    def apply(self, model: nn.Module) -> nn.Module:
        """Converts the layers of ``model`` in place by torchao's own function; returns it."""
        library = need("torchao")
        if isinstance(self.config, library.Float8LinearConfig):
            library.convert_to_float8_training(
                model, config=self.config, module_filter_fn=self.filter
            )
        else:
            quantize = importlib.import_module("torchao.quantization").quantize_
            quantize(model, self.config, filter_fn=self.filter)
        return model


def for_torchao(
    policy: Policy, model: nn.Module, *, emulate: bool = False
) -> tuple[list[Filtered], list[str]]:
    """The configurations of torchao, and the linear layers for each.

    Args:
        policy: a policy.
        model: the model before torchao converts it; not changed.
        emulate: as in `fp8.adapters.torchao.ao_config`.

    Returns:
        (configurations with their filters, notes on what is not translated).

    Raises:
        ValueError: as `fp8.selection.policies.resolve`, and for a recipe that torchao lacks.
        ImportError: without torchao.

    >>> import fp8
    >>> model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    >>> policy = fp8.Policy("row", rules=[("2", None, "tensor")])
    >>> parts, notes = for_torchao(policy, model, emulate=True)
    >>> [sorted(part.layers) for part in parts]
    [['0'], ['2']]
    """
    policy, notes = _at_start(policy, "torchao")
    groups: dict[Recipe, set[str]] = {}
    for name, recipe in _recipes(policy, model).items():
        if recipe is None:
            continue
        if isinstance(model.get_submodule(name), nn.Linear):
            groups.setdefault(recipe, set()).add(name)
        else:
            notes.append(f"torchao converts linear layers only: {name!r} stays in high precision")
    config = partial(torchao.ao_config, emulate=emulate)
    parts = [
        Filtered(_translated(min(names), config, recipe), frozenset(names))
        for recipe, names in groups.items()
    ]
    return parts, notes


@dataclass(frozen=True)
class Contexts:
    """The contexts of TransformerEngine in which a model and some of its modules run.

    Attributes:
        recipe: TransformerEngine's recipe of the context around the model; None: not enabled.
        inner: name of a module -> the recipe of the context around its forward; None: not enabled.
        notes: what is not translated.
    """

    recipe: Any
    inner: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)

    def attach(self, model: nn.Module) -> list[Any]:
        """Adds hooks to ``model`` and to the modules in ``inner`` that open the contexts.

        Returns the handles of the hooks. Raises AttributeError if the model has no such module.
        """
        every = {"": self.recipe, **self.inner}
        modules = [(model.get_submodule(name), recipe) for name, recipe in every.items()]
        return [handle for module, recipe in modules for handle in _hooked(module, recipe)]


def _hooked(module: nn.Module, recipe: Any) -> list[Any]:
    contexts: list[Any] = []

    def before(*_: Any) -> None:
        context = transformer_engine.autocast(recipe or "tensor", enabled=recipe is not None)
        context.__enter__()
        contexts.append(context)

    def after(*_: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    return [
        module.register_forward_pre_hook(before),
        module.register_forward_hook(after, always_call=True),
    ]


def for_transformer_engine(policy: Policy, model: nn.Module) -> Contexts:
    """The recipe of TransformerEngine, and the modules that need another context.

    Args:
        policy: a policy.
        model: with layers of torch, before those of TransformerEngine replace them; not changed.

    Returns:
        The contexts; `Contexts.attach` opens them in the model with TransformerEngine's layers.

    Raises:
        ValueError: as `fp8.selection.policies.resolve`, and for a recipe that TransformerEngine
            lacks, such as one with a single cast in high precision.
        ImportError: without TransformerEngine.
    """
    policy, notes = _at_start(policy, "TransformerEngine")
    base = _low(recipe_of(policy.recipe))
    inner = {
        name: recipe and _translated(name, te_recipe, recipe)
        for name, recipe in _recipes(policy, model).items()
        if recipe != base
    }
    return Contexts(base and te_recipe(base), inner, notes)


@dataclass(frozen=True)
class MegatronFiles:
    """A policy for Megatron-LM.

    Attributes:
        flags: of its training script; with ``yaml`` also ``--te-precision-config-file FILE``.
        yaml: the text of that file; "" if none is needed.
        notes: what is not translated, and what differs.
    """

    flags: list[str]
    yaml: str = ""
    notes: list[str] = field(default_factory=list)


_MEGATRON = {"tensor": "tensorwise", "delayed": "delayed", "block": "blockwise", "mxfp8": "mxfp8"}
"""Our recipe -> Megatron's ``--fp8-recipe``."""

_FORMATS = {"e4m3": "e4m3", "e5m2": "hybrid"}
"""The format of gradients -> Megatron's ``--fp8-format``; others are e4m3."""

_MEGATRON_ROLES = {
    "attention": ("*attention.linear_*",),
    "residual": ("*.linear_proj", "*.linear_fc2"),
}
"""Role -> the names of Megatron's modules. The other roles never run in FP8 there."""


def _in_megatron(what: str, recipe: Recipe | None) -> dict[str, str]:
    """The fields of a TEQuantizationRecipe; {} is high precision. what: the rule, for errors."""
    if recipe is None:
        return {}
    if recipe == replace(RECIPES["nvfp4_nvidia"], name=recipe.name):
        return {"fp4_quantization_recipe": "nvfp4"}
    for name, theirs in _MEGATRON.items():
        for format, kind in _FORMATS.items():
            candidate = RECIPES[name]
            grad = replace(candidate.grad, format=format) if candidate.grad else None
            if recipe == replace(candidate, name=recipe.name, grad=grad):
                return {"fp8_quantization_recipe": theirs, "fp8_format": kind}
    allowed = ", ".join(map(repr, (*_MEGATRON, "nvfp4_nvidia", "bf16")))
    raise ValueError(f"{what}: Megatron has no recipe {recipe.name!r}; it has {allowed} and None")


def for_megatron(policy: Policy) -> MegatronFiles:
    """The flags of Megatron-LM and the text of its ``--te-precision-config-file``.

    Patterns are matched with the names of Megatron's modules, "decoder.layers.0.mlp.linear_fc1".

    Args:
        policy: a policy whose rules name Megatron's modules.

    Returns:
        The flags, the file and notes.

    Raises:
        ValueError: for a rule of single casts, a recipe that Megatron does not have, "delayed" in a
            rule or with ``first`` and ``last``, for ``first`` and ``last`` without a recipe, and
            for ``others`` but None and "bf16".
    """
    policy, notes = _at_start(policy, "Megatron")
    base = _in_megatron("the policy", _low(recipe_of(policy.recipe)))
    flags = [f"--{key}={value}" for key, value in _base_flags(base).items()]
    if policy.first or policy.last:
        ends = {"start": policy.first, "end": policy.last}
        asked = f"first={policy.first}, last={policy.last}"
        if not base:
            raise ValueError(f"{asked}: Megatron has these only with a recipe for the whole model")
        if base.get("fp8_quantization_recipe") == "delayed":
            raise ValueError(f"{asked}: Megatron does not combine these with 'delayed'")
        flags += ["--first-last-layers-bf16"]
        flags += [f"--num-layers-at-{end}-in-bf16={count}" for end, count in ends.items()]
    if _low(recipe_of(policy.others)) is not None:
        others = name_of(policy.others)
        raise ValueError(f"others={others!r}: Megatron keeps these layers in high precision")
    matchers = _matchers(policy, base)
    if base and "readout" not in policy.keep:
        notes.append("Megatron computes the output layer in high precision, whatever the policy")
    if base.get("fp8_quantization_recipe") == "tensorwise":
        notes.append("the scales of Megatron's tensorwise recipe are not powers of two")
    if policy.rules:
        notes.append("the patterns are matched with the names of Megatron's modules")
    return MegatronFiles(flags, _precision_file(matchers) if matchers else "", notes)


def _base_flags(base: dict[str, str]) -> dict[str, str]:
    if not base:
        return {}
    if "fp4_quantization_recipe" in base:
        return {"fp4-format": "e2m1", "fp4-recipe": base["fp4_quantization_recipe"]}
    flags = {"fp8-format": base["fp8_format"], "fp8-recipe": base["fp8_quantization_recipe"]}
    history = {"fp8-amax-history-len": "16", "fp8-amax-compute-algo": "max"}
    return flags | (history if flags["fp8-recipe"] == "delayed" else {})


def _matchers(policy: Policy, base: dict[str, str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> (pattern, configuration), the last rule first: the first that matches decides."""
    matchers: dict[str, tuple[str, dict[str, Any]]] = {
        f"keep_{role}_{i}": (pattern, {})
        for role in policy.keep
        for i, pattern in enumerate(_MEGATRON_ROLES.get(role, ()), 1)
    }
    enable = {} if base else {"override_nonquantized_autocast": True}
    for index, rule in reversed(list(enumerate(policy.rules, 1))):
        what = f"rule {index} ({rule})"
        if rule.product is not None:
            raise ValueError(f"{what}: Megatron has no recipe for single casts of a layer")
        config = _in_megatron(what, _low(recipe_of(rule.recipe)))
        if config.get("fp8_quantization_recipe") == "delayed":
            raise ValueError(f"{what}: Megatron has 'delayed' for the whole model only")
        matchers[f"rule_{index}"] = (rule.layers, config | enable if config else {})
    return matchers


def _precision_file(matchers: dict[str, tuple[str, dict[str, Any]]]) -> str:
    configs, entries = {}, {}
    for matcher, (pattern, recipe) in matchers.items():
        name = "_".join(list(recipe.values())[:2]) or "high_precision"
        kind = {"transformer_engine_config_type": "TEQuantizationParams"}
        configs[name] = kind | {"training_recipe": recipe}
        entries[matcher] = {"config": name, "type": "glob", "pattern": pattern, "enabled": True}
    return _yaml({"configs": configs, "matchers": entries})


def _yaml(mapping: Mapping[str, Any], indent: str = "") -> str:
    return "".join(
        f"{indent}{key}:\n{_yaml(value, indent + '  ')}"
        if isinstance(value, dict) and value
        else f"{indent}{key}: {json.dumps(value)}\n"
        for key, value in mapping.items()
    )


def as_code(policy: Policy) -> dict[str, str]:
    """Lines to copy that apply ``policy``, by library.

    Returns:
        "fp8", "torchao", "transformer_engine" and "megatron" -> the lines; a comment with the
        reason where the library cannot express the policy.

    >>> import fp8
    >>> print(as_code(fp8.Policy("mxfp8", keep=("readout",)))["fp8"])
    import fp8
    <BLANKLINE>
    policy = fp8.Policy("mxfp8", keep=["readout"])
    fp8.convert(model, policy)
    """
    made = f"policy = {_source(policy)}\n"
    step = "\nfp8.advance(model, step / steps)  # before each step" if policy.switch else ""
    first = "import fp8\nfrom fp8.adapters.policies import"
    torchao_lines = """parts, notes = for_torchao(policy, model)
for part in parts:  # convert_to_float8_training(model, config=, module_filter_fn=)
    part.apply(model)
print(*notes)"""
    te_lines = """contexts = for_transformer_engine(policy, model)  # layers of torch
contexts.attach(te_model)  # with te.Linear under the same names
print(*contexts.notes)"""
    return {
        "fp8": f"import fp8\n\n{made}fp8.convert(model, policy){step}",
        "torchao": f"{first} for_torchao\n\n{made}{torchao_lines}",
        "transformer_engine": f"{first} for_transformer_engine\n\n{made}{te_lines}",
        "megatron": _megatron_code(policy),
    }


def _megatron_code(policy: Policy) -> str:
    try:
        files = for_megatron(policy)
    except ValueError as error:
        return f"# not possible: {error}"
    flags = [*files.flags, *(["--te-precision-config-file=policy.yaml"] if files.yaml else [])]
    text = "# flags\n" + "\n".join(flags or ["# none"])
    text += f"\n\n# policy.yaml\n{files.yaml}" if files.yaml else ""
    return "\n".join([text.rstrip(), *(f"# {note}" for note in files.notes)])


def _source(policy: Policy) -> str:
    named = (policy.recipe, policy.others, *(r for _, r in policy.switch))
    if any(isinstance(recipe, Recipe) for recipe in (*named, *(r.recipe for r in policy.rules))):
        return f"fp8.Policy.from_json({json.dumps(json.dumps(policy.to_dict()))})"
    q = lambda value: "None" if value is None else json.dumps(value)  # noqa: E731
    rules = [f"({q(r.layers)}, {q(r.product)}, {q(r.recipe)})" for r in policy.rules]
    switch = [f"({start!r}, {q(recipe)})" for start, recipe in policy.switch]
    lists = {"rules": rules, "keep": map(q, policy.keep), "switch": switch}
    texts = {name: f"[{', '.join(items)}]" for name, items in lists.items()}
    names = ("rules", "first", "last", "keep", "others", "switch", "name")
    arguments = [f"{n}={texts.get(n) or q(x)}" for n in names if (x := getattr(policy, n))]
    return f"fp8.Policy({', '.join([q(policy.recipe), *arguments])})"
