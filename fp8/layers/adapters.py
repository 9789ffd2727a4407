"""Layers of other libraries in a model: the record of them, and the one recipe that they take."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..common.report import Report, Row
from ..recipes.policy import Policy, composed, name_of, recipe_of
from ..recipes.recipe import PLAIN, Recipe
from .policies import resolve
from .select import Where

#: The attribute of a model whose layers were replaced: an `Adapted`.
ADAPTED = "fp8_adapted"

#: The attribute of a replacement: the names of the attributes that the old layer had and it lacks.
CARRIED = "fp8_carried"


@dataclass(frozen=True)
class Adapted:
    """The record of a model whose layers were replaced: the adapter, and the report."""

    adapter: str
    report: Report[Row]


def adapted(model: nn.Module) -> Adapted | None:
    """The record that `swap` stored on ``model``, or None."""
    return vars(model).get(ADAPTED)


def is_replacement(module: nn.Module) -> bool:
    """Whether `swap` inserted ``module`` for an adapter."""
    return CARRIED in vars(module)


def adapter(name: str) -> Any:
    """The `fp8.adapters` module of a backend of ADAPTERS, imported on first use."""
    return importlib.import_module(f"fp8.adapters.{name}")


def check_base(backend: str, policy: Policy) -> None:
    """Raises ValueError if a library does not have the recipe that a policy gives all layers."""
    base = recipe_of(policy.recipe)
    if base is not None and not policy.selects:
        adapter(backend).its_recipe(base)


def decided(
    backend: str,
    policy: Policy,
    model: nn.Module,
    where: Where | None,
) -> tuple[Recipe, Where]:
    """The recipe that a policy gives the layers of a model, and which layers those are. Raises
    ValueError for several recipes, for a switch, and if the library does not have the recipe."""
    decisions = resolve(policy, model)
    recipes: set[Recipe | None] = {
        composed(d.sources, PLAIN) for d in decisions.values()
    }
    recipes.discard(None)
    if not recipes:
        recipes = {recipe_of(policy.recipe)} - {None}
    if len(recipes) != 1 or policy.switch:
        got = ", ".join(sorted(repr(name_of(recipe)) for recipe in recipes)) or "none"
        switch = ", and a switch" if policy.switch else ""
        raise ValueError(
            f"the layers of another library take one recipe; the policy gives {got}{switch}. "
            "Convert with a backend of this library, or see fp8.adapters.policies"
        )
    # The converters of torchao and TransformerEngine take one recipe for all layers.
    recipe: Any = recipes.pop()
    adapter(backend).its_recipe(recipe)

    def chosen(name: str, module: nn.Module) -> bool:
        decision = decisions.get(name)
        if decision is not None and decision.recipe is None:
            return False
        return where is None or where(name, module)

    return recipe, chosen
