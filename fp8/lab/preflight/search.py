"""Which layers to keep in high precision: squared update errors add, so the choice is a knapsack.

Each layer alone under the recipe gives its squared error and its share of the FLOPs. Keeping the
layers with the largest error per FLOP first is the optimal order of the fractional knapsack
(Dantzig 1957, "Discrete-variable extremum problems"); its points are the frontier of FLOPs cast
against error.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ...formats.format import get_format
from ...recipes.policy import Policy, Rule
from ...recipes.recipe import PRODUCTS, Recipe
from ..trace import Product
from .choices import FINE


def shares(products: Iterable[Product]) -> dict[str, float]:
    """Layer -> its share of the FLOPs of all products. Layers that cannot be cast count in the
    total and are not listed."""
    products = list(products)
    total = sum(product.flops for product in products)
    share: dict[str, float] = {}
    for product in products:
        if not product.why_not:
            share[product.layer] = share.get(product.layer, 0.0) + product.flops / total
    return share


def keeping(recipe: Recipe | str, kept: Sequence[str]) -> Policy:
    """The policy that casts all layers but those in ``kept``."""
    return Policy(recipe, rules=tuple(Rule(name) for name in kept))


class LayerError(NamedTuple):
    """The squared update error of a layer alone. share: of the FLOPs of all products."""

    layer: str
    squared_error: float
    share: float


class Selection(NamedTuple):
    """kept: the layers in high precision. share: of the FLOPs, that are cast. error: the update
    error by the sum of the squared errors of the layers that are cast."""

    kept: list[str]
    share: float
    error: float


def frontier(errors: Sequence[LayerError]) -> list[Selection]:
    """All prefixes of the order by squared error per FLOP: from all layers cast to none."""
    order = sorted(errors, key=lambda e: e.squared_error / max(e.share, 1e-12), reverse=True)
    return [
        Selection(
            [e.layer for e in order[:count]],
            sum(e.share for e in order[count:]),
            math.sqrt(sum(e.squared_error for e in order[count:])),
        )
        for count in range(len(order) + 1)
    ]


def knee(selections: Sequence[Selection]) -> Selection:
    """The point farthest from the line between the ends of a frontier of FLOPs against squared
    error, both from 0 to 1 (Satopaa et al. 2011, "Finding a kneedle in a haystack"). The squared
    error is convex along the frontier; the error itself is not."""
    first = selections[0]
    height, width = first.error**2 or 1.0, first.share or 1.0
    return max(selections, key=lambda s: s.share / width - s.error**2 / height)


def choose(
    recipe: Recipe, errors: Sequence[LayerError], probes: Sequence[Callable[[Policy], float]]
) -> Selection:
    """The first point of the frontier whose error is measured to be fine at all snapshots or, if
    none is, the knee. Errors fall along the frontier, so that the first is found by bisection; they
    are measured, as predictions of recipes that lose values, as those without scales, are too
    low."""
    selections = frontier(errors)
    inner = selections[1:-1]

    def is_fine(selection: Selection) -> bool:
        policy = keeping(recipe, selection.kept)
        return max(probe(policy) for probe in probes) <= FINE

    first = bisect_left(inner, True, key=is_fine)
    return inner[first] if first < len(inner) else knee(selections)


def name_of(recipe: str, kept: Sequence[str]) -> str:
    """The name of a policy that keeps some layers: "mxfp4 except lm_head"."""
    if not kept:
        return recipe
    if len(kept) > 2:
        return f"{recipe} except {kept[0]} and {len(kept) - 1} more"
    return f"{recipe} except {' and '.join(kept)}"


def bits_of(recipe: Recipe, share: float) -> float:
    """Bits per operand, averaged over the FLOPs of all products, of which ``share`` is cast; high
    precision counts as 16."""
    widths = [
        max(16 if cast is None else get_format(cast.format).bits for cast in getattr(recipe, name))
        for name in PRODUCTS
    ]
    return share * statistics.fmean(widths) + (1 - share) * 16
