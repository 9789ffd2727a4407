"""What happens to each operand of the products of a layer: frozen, named, checked at birth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .formats import Format, get_format
from .quantize import OVERFLOWS
from .rounding import ROUNDINGS
from .scaling import SCALINGS

__all__ = ["RECIPES", "Cast", "Recipe", "get_recipe"]


def _check(what: str, got: object, allowed: Iterable[str]) -> None:
    names = tuple(allowed)
    if not isinstance(got, str):
        raise TypeError(f"{what} is a {type(got).__name__}; give a name")
    if got not in names:
        raise ValueError(f"unknown {what} {got!r}; choose one of {', '.join(map(repr, names))}")


@dataclass(frozen=True, kw_only=True)
class Cast:
    """How one operand gets into its format.

    format: a name in `fp8.FORMATS`, or a `fp8.Format`.
    scaling: a name in `fp8.SCALINGS`.
    rounding, overflow, random_bits: as in `fp8.quantize`. Stochastic rounding draws a new seed at
    each use.
    Raises ValueError for an unknown name and for overflow="nonfinite" with a format that has
    neither Inf nor NaN, TypeError for what is not a name.
    """

    format: str | Format
    scaling: str = "unit"
    rounding: str = "nearest"
    overflow: str = "saturate"
    random_bits: int = 31

    def __post_init__(self) -> None:
        format = get_format(self.format)
        _check("scaling", self.scaling, SCALINGS)
        _check("rounding", self.rounding, ROUNDINGS)
        _check("overflow", self.overflow, OVERFLOWS)
        if self.overflow == "nonfinite" and format.nonfinite is None:
            raise ValueError(f"format {format.name!r} has neither Inf nor NaN for 'nonfinite'")
        if not (isinstance(self.random_bits, int) and 1 <= self.random_bits <= 31):
            raise ValueError(f"random_bits must be 1 to 31, got {self.random_bits!r}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The casts of the three products of a layer, forward ``y = x w`` and backward ``dx``, ``dw``.

    input: activations, and both operands of a product of two activations.
    weight: the second operand of a linear layer or convolution.
    grad: the gradient of the output, in both backward products.
    None leaves an operand as it is.
    """

    name: str
    input: Cast | None = None
    weight: Cast | None = None
    grad: Cast | None = None

    def __post_init__(self) -> None:
        for field in ("input", "weight", "grad"):
            cast = getattr(self, field)
            if cast is not None and not isinstance(cast, Cast):
                raise TypeError(f"Recipe.{field} must be a Cast or None, not {cast!r}")


def _e4m3_e5m2(name: str, scaling: str) -> Recipe:
    """e4m3 where precision counts, e5m2 where range does (Micikevicius et al. 2022, section 3)."""
    forward = Cast(format="e4m3", scaling=scaling)
    return Recipe(
        name=name, input=forward, weight=forward, grad=Cast(format="e5m2", scaling=scaling)
    )


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for recipe in (_e4m3_e5m2("unit", "unit"), _e4m3_e5m2("tensor", "tensor"))
}
"""Name -> recipe. "unit" has scale one everywhere; "tensor" scales each operand by its amax."""


def get_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe of that name; a Recipe is returned as it is.

    Raises ValueError, with the names there are, for another, and TypeError for what is neither.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"a recipe must be a name or a Recipe, not {type(recipe).__name__}")
    _check("recipe", recipe, RECIPES)
    return RECIPES[recipe]
