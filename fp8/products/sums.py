"""Sums of products as tensor cores compute them, `fp8.Recipe.accumulate`: what products know of
`fp8.lab.sums`, which is imported when a recipe asks for it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..casts.operands import Casts
from ..recipes.recipe import Recipe
from ..warnings import RecipeWarning, warn_once

Scales = tuple[float, float, float]
"""Factors of the output and of the gradients of the first and second operand."""


class Settings(NamedTuple):
    """The constants of a product and its gradients. sums: `fp8.Recipe.sums`. dtype: the name of
    that of the output."""

    scales: Scales
    casts: Casts
    sums: str
    dtype: str
    bias_scale: float


def summed_product(*args: Any) -> Tensor:
    """`fp8.lab.sums.product.product`."""
    from ..lab.sums.product import product

    return product(*args)


def warn_unsummed(recipe: Recipe, product: str) -> None:
    """Warns, once, of a kind of product with torch's sums."""
    if recipe.accumulate is not None:
        warn_once(RecipeWarning, _UNSUMMED.format(product, recipe.accumulate), key=product)


_UNSUMMED = (
    "{} has no sums of accumulate={!r}: its operands are cast, and its sums are torch's. Linear "
    "layers and matrix products have them"
)
