"""Policies: which recipe each layer and cast of a model gets, and when."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeAlias

from ..common.validation import check_keys, check_name, check_whole, names_of
from ..torch_internals import Arguments, Keywords
from .cast import Cast
from .recipe import (
    AUTO,
    OPERANDS,
    PLAIN,
    PRODUCTS,
    RECIPES,
    SAME,
    Recipe,
    recipe_unless_auto,
)

CASTS = tuple(f"{name}.{each}" for name, pair in PRODUCTS.items() for each in pair)
"""The casts of a layer: product.operand."""

CONCERNS = tuple(chain(PRODUCTS, OPERANDS, CASTS))
"""What `LayerRule.product` may name: the casts of a product, of an operand, or a single one."""

ROLES: dict[str, str] = {
    "embedding": "layers outside of the repeated blocks that do not read the residual stream "
    "(patch and input projections), and lookups",
    "readout": "layers outside of the repeated blocks that read the residual stream; the last "
    "layer of a model that repeats no block",
    "residual": "layers whose output is added to the residual stream: the last of each part of a "
    "block, if its output has the width of the block; attention that is one module, and stacks of "
    "the weights of experts",
    "router": "layers with one output per expert of the list or stack of experts beside them",
}
"""What `Policy.keep` may name -> the rule by which `fp8.layers.roles` finds it."""

Source = Recipe | str | None
"""What a cast is taken from: a `Recipe`, "auto", or None for high precision."""

Sources = tuple[Source, ...]
"""What the casts of a layer are taken from, in the order of `CASTS`."""


def source_of(recipe: str | Recipe | None) -> Source:
    """The `Source` that a recipe of a policy stands for. Raises as `get_recipe`."""
    if recipe is None or recipe == AUTO:
        return recipe
    return recipe_unless_auto(recipe)


def _stored(recipe: Any) -> Source:
    """``recipe``, by its name if it is registered. Raises as `get_recipe`."""
    source = source_of(recipe)
    if source in RECIPES.values():
        return name_of(source)
    return source


def recipe_of(recipe: str | Recipe | None) -> Recipe | None:
    """The recipe that one of a policy stands for, "tensor" for "auto"; None: high precision."""
    if recipe is None:
        return None
    return recipe_unless_auto(recipe) or PLAIN


def name_of(recipe: str | Recipe | Policy | None) -> str:
    """The name in messages."""
    if recipe is None:
        return "high precision"
    if isinstance(recipe, Policy):
        return recipe.name or f"a policy of {name_of(recipe.recipe)}"
    return str(getattr(recipe, "name", recipe))


@dataclass(frozen=True)
class LayerRule:
    """The recipe of some layers, or of some of their casts.

    Attributes:
        layers: the dotted name of a layer, or a pattern: "lm_head", "*.mlp.*". "*" matches any
            characters, dots included, and "?" one; all others, as brackets, are themselves.
        recipe: a name in `fp8.RECIPES`, a `Recipe`, "auto", or None for high precision.
        product: the casts that the rule concerns: the casts of a product ("forward", "grad_input",
            "grad_weight"), of an operand ("input", "weight", "grad"), or one ("forward.input", a
            name in `CASTS`). None: all.

    Raises:
        TypeError: if ``layers`` is not a string.
        ValueError: for an empty pattern, and for an unknown recipe or product.
    """

    layers: str
    recipe: str | Recipe | None = None
    product: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layers, str):
            raise TypeError(
                f"LayerRule.layers must be a pattern of names, got {self.layers!r}"
            )
        if not self.layers:
            raise ValueError(
                'LayerRule.layers is empty: name a layer, or use "*" for all'
            )
        if self.product is not None:
            check_name("product of a rule", self.product, CONCERNS)
        object.__setattr__(self, "recipe", _stored(self.recipe))

    @staticmethod
    def of(rule: Any) -> LayerRule:
        """``rule``, or the LayerRule of a tuple (layers, product or None, recipe or None)."""
        if isinstance(rule, LayerRule):
            return rule
        if not isinstance(rule, tuple | list) or len(rule) != 3:
            raise TypeError(
                f"a rule is a tuple (layers, product, recipe), not {rule!r}"
            )
        layers, product, recipe = rule
        return LayerRule(layers, recipe, product)

    @property
    def casts(self) -> tuple[int, ...]:
        """The indices in `CASTS` of the casts that the rule concerns."""
        return tuple(
            i
            for i, cast in enumerate(CASTS)
            if self.product in (None, cast, *cast.split("."))
        )

    def __str__(self) -> str:
        return " ".join(filter(None, (repr(self.layers), self.product)))


# (layers, product, recipe) of a `LayerRule`; (fraction of the steps, what is in force from there).
RuleTuple = tuple[str, str | None, str | Recipe | None]
Start: TypeAlias = "tuple[float, str | Recipe | Policy | None]"


@dataclass(frozen=True, init=False)
class Policy:
    """Which recipe each layer of a model gets, and when.

    A layer takes ``recipe``; then each rule that matches its name, in order, so that later rules
    override earlier ones; and ``others`` if ``first``, ``last`` or ``keep`` include it, which
    override all rules. `fp8.layers.policies.resolve` applies a policy to a model; `hidden` and
    `umup` are published ones.

    Attributes:
        recipe: a name in `fp8.RECIPES`, a `Recipe`, "auto", or None for high precision.
        rules: `LayerRule` objects, or tuples (layers, product, recipe).
        first, last: the repeated blocks at the start and at the end of the model that take
            ``others``: their number, or as a float between 0 and 1 their share, which `blocks_in`
            rounds up.
        keep: names in `ROLES`: layers that take ``others``.
        others: as ``recipe``; None leaves these layers in high precision, and `fp8.convert` does
            not convert them. "bf16" also rounds the products of a float32 model.
        switch: pairs in ascending order: (fraction, recipe) or (fraction, policy). From that
            fraction of the training steps on, everything else that is cast takes the recipe
            (arXiv:2509.25149 switches to bf16 late), or the policy applies in place of this one,
            also to what this one leaves in high precision. `fp8.advance` applies it.
        name: the name shown in reports; "" shows the recipe's.

    Raises:
        TypeError: for a value of another type.
        ValueError: for an unknown name, for fractions that do not ascend from 0 to 1, for a share
            of blocks that is not between 0 and 1, and for a policy in ``switch`` with a switch.

    >>> policy = Policy("mxfp8", rules=[("*.mlp.*", "grad_weight", None)], keep=("readout",))
    >>> policy.rules[0].product
    'grad_weight'
    >>> Policy.from_json(policy.to_json()) == policy
    True
    """

    recipe: str | Recipe | None
    rules: tuple[LayerRule, ...]
    first: int | float
    last: int | float
    keep: tuple[str, ...]
    others: str | Recipe | None
    switch: tuple[Start, ...]
    name: str

    def __init__(
        self,
        recipe: str | Recipe | None = AUTO,
        *,
        rules: Iterable[LayerRule | RuleTuple] = (),
        first: int | float = 0,
        last: int | float = 0,
        keep: Iterable[str] = (),
        others: str | Recipe | None = None,
        switch: Iterable[Start] = (),
        name: str = "",
    ) -> None:
        if not isinstance(name, str):
            raise TypeError(f"Policy.name must be a string, got {name!r}")
        roles = _sequence("keep", keep)
        for role in roles:
            check_name("role in Policy.keep", role, ROLES)
        vars(self).update(
            recipe=_stored(recipe),
            rules=tuple(map(LayerRule.of, _sequence("rules", rules))),
            first=_blocks("first", first),
            last=_blocks("last", last),
            keep=roles,
            others=_stored(others),
            switch=_switches(_sequence("switch", switch)),
            name=name,
        )

    @staticmethod
    def hidden(
        recipe: str | Recipe | None = AUTO, others: str | Recipe | None = None
    ) -> Policy:
        """The policy of "all hidden linear layer computations" (arXiv:2502.05967): layers outside
        of the repeated blocks take ``others``; the last layer, if the model repeats no block."""
        return Policy(recipe, keep=("embedding", "readout"), others=others)

    @staticmethod
    def umup(
        recipe: str | Recipe | None = AUTO, others: str | Recipe | None = None
    ) -> Policy:
        """The policy of u-muP (arXiv:2407.17465, section 4), there with ``others="bf16"``: as
        `hidden`, and layers whose output is added to the residual stream, attention outputs and
        down projections, take ``others`` too."""
        return Policy(recipe, keep=("embedding", "readout", "residual"), others=others)

    @property
    def selects(self) -> bool:
        """Whether layers may differ in their recipe, so that a model is needed to apply it."""
        return bool(self.rules or self.first or self.last or self.keep)

    @property
    def recipes(self) -> Sources:
        """The recipes of the policy, its rules and its other layers; not of the switch."""
        named = (self.recipe, *(rule.recipe for rule in self.rules), self.others)
        return tuple(map(source_of, named))

    def at(self, fraction: float) -> Policy:
        """The policy, without a switch, in force after this fraction, 0 to 1, of the steps."""
        _check_fraction("fraction", fraction)
        policy = replace(self, switch=())
        for start, to in self.switch:
            if start > fraction:
                break
            policy = to if isinstance(to, Policy) else policy._under(to)
        return policy

    def _under(self, recipe: str | Recipe | None) -> Policy:
        """The policy with ``recipe`` for what is cast: high precision and `others` stay."""
        rules = tuple(replace(r, recipe=r.recipe and recipe) for r in self.rules)
        return replace(self, recipe=self.recipe and recipe, rules=rules)

    def to_dict(self) -> Keywords:
        """The policy as plain values, for JSON. A recipe in `fp8.RECIPES` is stored by name."""
        switch = []
        for start, to in self.switch:
            key = "policy" if isinstance(to, Policy) else "recipe"
            switch.append({"from": start, key: _as_json(to)})
        return dict(
            vars(self),
            recipe=_as_json(self.recipe),
            rules=[dict(vars(r), recipe=_as_json(r.recipe)) for r in self.rules],
            keep=[*self.keep],
            others=_as_json(self.others),
            switch=switch,
        )

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Policy:
        """The policy that `to_dict` wrote. All keys but "recipe" are optional. Raises as Policy,
        and ValueError for an unknown or missing key."""
        check_keys("Policy", values, names_of(Policy), ("recipe",))
        read = dict(
            values,
            recipe=_read(values["recipe"]),
            rules=map(_read_rule, _sequence("rules", values.get("rules", ()))),
            others=_read(values.get("others")),
            switch=map(_read_switch, _sequence("switch", values.get("switch", ()))),
        )
        return Policy(**read)

    def to_json(self, path: str | Path | None = None) -> str:
        """The policy as JSON text, also written to the file ``path`` if given."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    @staticmethod
    def from_json(text: str | Path) -> Policy:
        """The policy in ``text``: JSON (starting with a brace), or else the path of a file. Raises
        as `from_dict`, ValueError for text that is not JSON, OSError for a missing file."""
        if isinstance(text, Path) or not text.lstrip().startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        return Policy.from_dict(json.loads(text))


def _sequence(field: str, values: Any) -> Arguments:
    if isinstance(values, str | Mapping | LayerRule) or not isinstance(
        values, Iterable
    ):
        raise TypeError(f"Policy.{field} must be a list or tuple, got {values!r}")
    return tuple(values)


def _blocks(field: str, got: Any) -> int | float:
    if not isinstance(got, float):
        check_whole(f"Policy.{field}", got, 0)
        return got
    if 0 < got < 1:
        return float(got)
    raise ValueError(
        f"Policy.{field} must be a number of blocks (an int) or a share of them between 0 and 1 "
        f"(a float), got {got!r}"
    )


def blocks_in(share: int | float, count: int) -> int:
    """The number of blocks that ``share`` of ``count`` blocks stands for: an int is that number. A
    float is rounded up, so that the other blocks are rounded down: 0.15 is 5 of 32 and 6 of 36
    blocks (torchtitan, components/quantization/nvfp4.md)."""
    if isinstance(share, int):
        return share
    # The decimal number is multiplied: 0.07 * 100 is above 7 in floating point.
    exact = Fraction(repr(share)) * count
    return -int(-exact // 1)


def _check_fraction(what: str, got: Any) -> None:
    if isinstance(got, bool) or not isinstance(got, int | float):
        raise TypeError(f"{what} must be a number from 0 to 1, got {got!r}")
    if not 0 <= got <= 1:
        raise ValueError(f"{what} must be a number from 0 to 1, got {got!r}")


def _switches(pairs: Arguments) -> tuple[Start, ...]:
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(
                f"an entry of Policy.switch is (fraction, recipe), not {pair!r}"
            )
        _check_fraction("the fraction of Policy.switch", pair[0])
    starts = [float(start) for start, _ in pairs]
    if any(a >= b for a, b in pairwise(starts)):
        raise ValueError(f"the fractions of Policy.switch must ascend, got {starts}")
    switches = []
    for start, to in pairs:
        is_policy = isinstance(to, Policy)
        if is_policy and to.switch:
            raise ValueError(
                f"the policy from {start:g} in Policy.switch has a switch of its own: list its "
                "entries in the outer one"
            )
        switches.append((float(start), to if is_policy else _stored(to)))
    return tuple(switches)


def _as_json(recipe: str | Recipe | Policy | None) -> Any:
    if isinstance(recipe, Recipe | Policy):
        return recipe.to_dict()
    return recipe


def _read(recipe: Any) -> Any:
    if isinstance(recipe, Mapping):
        return Recipe.from_dict(recipe)
    return recipe


def _read_rule(values: Any) -> LayerRule:
    check_keys("rule of a Policy", values, names_of(LayerRule), ("layers",))
    return LayerRule(**{**values, "recipe": _read(values.get("recipe"))})


def _read_switch(values: Any) -> tuple[Any, Any]:
    to = "policy" if isinstance(values, Mapping) and "policy" in values else "recipe"
    check_keys("switch of a Policy", values, ("from", to), ("from", to))
    if to == "policy":
        return values["from"], Policy.from_dict(values["policy"])
    return values["from"], _read(values["recipe"])


def as_policy(policy: Any) -> Policy:
    """The Policy of a policy, a `Recipe` or the name of one. Raises as `get_recipe`."""
    if isinstance(policy, Policy):
        return policy
    recipe_unless_auto(policy)
    return Policy(policy)


def composed(sources: Sources, auto: Recipe) -> Recipe | None:
    """The recipe of a layer whose casts come from ``sources``; None if nothing is cast. auto: that
    of "auto", or "tensor" where a rule parts two casts of an operand that share a static scale.
    Raises ValueError for a combination that no `Recipe` can represent."""
    recipes = [auto if isinstance(source, str) else source for source in sources]
    if all(recipe == recipes[0] for recipe in recipes):
        return recipes[0]
    casts = [recipe.casts[i] if recipe else None for i, recipe in enumerate(recipes)]
    x, w, g, w_second, g_second, x_second = casts
    pairs = ((x, x_second), (w, w_second), (g, g_second))
    parted = [b for a, b in pairs if b is not None and a != b]
    if auto.keeps_history and any(cast.keeps_history for cast in parted):
        return composed(sources, PLAIN)
    casting = [recipe for recipe in recipes if recipe is not None]
    sums = {(recipe.accumulate, recipe.promote) for recipe in casting}
    if len(sums) > 1:
        raise ValueError(f"the casts of a layer have different sums: {_name(recipes)}")
    accumulate, promote = sums.pop()
    fast = [n for n in PRODUCTS if all(n in recipe.fast_sums for recipe in casting)]
    return Recipe(
        name=_name(recipes),
        input=x,
        weight=w,
        grad=g,
        grad_input_weight=_unless_same(w, w_second),
        grad_weight_grad=_unless_same(g, g_second),
        grad_weight_input=_unless_same(x, x_second),
        accumulate=accumulate,
        promote=promote,
        fast_sums=tuple(fast),
    )


def _unless_same(first: Cast | None, second: Cast | None) -> Any:
    """The cast of an operand for its second product, as a field of `Recipe`."""
    return SAME if second == first else second


def _name(recipes: list[Recipe | None]) -> str:
    """ "mxfp8 (grad_weight: high precision)": the most frequent recipe, and the others by cast."""
    names = dict(zip(CASTS, map(name_of, recipes), strict=True))
    base = max((r.name for r in recipes if r), key=[*names.values()].count)
    others: dict[str, str] = {}
    for product, (a, b) in PRODUCTS.items():
        first = f"{product}.{a}"
        second = f"{product}.{b}"
        if names[first] == names[second]:
            others[product] = names[first]
        else:
            others |= {first: names[first], second: names[second]}
    parts = [f"{cast}: {name}" for cast, name in others.items() if name != base]
    return f"{base} ({', '.join(parts)})"
