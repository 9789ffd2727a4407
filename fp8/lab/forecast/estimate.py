"""The time of a training step from the sizes of its matrix products alone, by a roofline.

A product takes the longer of its arithmetic and its memory traffic, a cast its memory traffic, at
the rates that large kernels reach. Convolutions and products of activations stay in bfloat16.
Norms, the softmax of attention, the optimizer, communication and recomputation are left out. How
far the estimate is off is on docs/slower.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ...formats.format import get_format
from ...recipes.cast import Cast
from ...recipes.recipe import OPERANDS, PRODUCTS, Recipe
from ..hardware import BF16, UNITS, Hardware
from ..trace import Product
from .result import Variant

# Scalings whose cast is part of the kernel that computes an activation or a gradient.
FUSED = ("unit", "static")

# Scalings whose cast follows two kernels for the largest magnitude of the tensor.
WITH_AMAX = ("tensor", "nv")

# The formats of 8 bits or fewer that matrix units multiply.
_MULTIPLIED = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")


def estimate(
    products: Sequence[Product],
    recipes: Mapping[str, Recipe | None],
    device: Hardware,
    name: str = BF16,
) -> Variant:
    """The time of all products of a training step with their casts. recipes: layer -> recipe;
    without one, bfloat16. A recipe of which the device lacks matrix units is bfloat16 in that
    product, and named in `Variant.simulated`. name: `Variant.recipe`."""
    layers: dict[str, float] = defaultdict(float)
    other, simulated = 0.0, ""
    for product in products:
        recipe, units, missing = None, dict[str, str](), ""
        if not product.why_not:
            recipe = recipes.get(product.layer)
        if recipe is not None:
            units, missing = _units(recipe, device)
        if product.kind != "linear":  # what it saves is not cast either
            units = {}
        seconds = product.calls * _seconds(product, recipe, units, device)
        if product.why_not:
            other += seconds
        else:
            layers[product.layer] += seconds
        simulated = simulated or missing
    return Variant(
        recipe=name,
        seconds=other + sum(layers.values()),
        layers=dict(layers),
        flops=3 * sum(product.flops for product in products),
        simulated=simulated,
    )


def _unit(cast: Cast) -> str:
    """The kind of matrix unit that multiplies operands under this cast; the format where no unit
    does."""
    format = get_format(cast.format)
    if format.bits == 16:
        return BF16
    prefix = {"mx": "mxfp", "nv": "nvfp"}.get(cast.scaling, "fp")
    if format.name in _MULTIPLIED:
        return f"{prefix}{format.bits}"
    return format.name


def _units(recipe: Recipe, device: Hardware) -> tuple[dict[str, str], str]:
    """Product -> its matrix unit, of those that run in low precision; and why the device does not
    run one of them, or ""."""
    units, missing = {}, ""
    for name in PRODUCTS:
        pair = getattr(recipe, name)
        if None in pair:
            continue
        kinds = {_unit(cast): cast for cast in pair}
        lacking = [cast for kind, cast in kinds.items() if kind not in device.peak]
        for cast in lacking[:1]:
            why = f"has no units for {cast.format} with scaling {cast.scaling!r}"
            missing = missing or f"{device.name} {why}"
        if len(kinds) == 1 and not lacking and BF16 not in kinds:
            units[name] = next(iter(kinds))
    return units, missing


def _seconds(
    product: Product, recipe: Recipe | None, units: Mapping[str, str], device: Hardware
) -> float:
    """Estimates the seconds of one call of the three products, with their casts."""
    p, total = product, 0.0
    elements = {
        "input": p.input_elements or p.m * p.k,
        "weight": p.k * p.n,
        "grad": p.m * p.n,
    }
    for name, operands in PRODUCTS.items():
        unit = units.get(name, BF16)
        moved = sum(
            n * UNITS[unit if x in operands else BF16] for x, n in elements.items()
        )
        narrowest = min(p.m, p.k, p.n)
        flops = 2 * p.m * p.k * p.n
        total += device.seconds(unit, flops, moved, narrowest=narrowest)
    for operand, names in OPERANDS.items():
        casts = [
            getattr(recipe, n)[PRODUCTS[n].index(operand)] if n in units else None
            for n in names
        ]
        for size in _passes(casts, operand == "weight"):
            total += device.seconds(BF16, 0, size * elements[operand])
    return total


def _passes(casts: Sequence[Cast | None], is_weight: bool) -> list[float]:
    """Bytes per element of each kernel that casts an operand for its two products (None: in high
    precision), the second of which sums over the other axis. A weight is cast for each, in the
    forward and in the backward pass."""
    first, second = casts
    is_fused = first is not None and first.scaling in FUSED and not is_weight
    passes: list[float] = []
    if any(cast and cast.scaling in WITH_AMAX for cast in casts):
        passes = [2.0, 0.0]
    once = first == second and not is_weight
    if first and once and first.tile[0] == first.tile[1] and not first.hadamard:
        size = UNITS[_unit(first)]  # a kernel that transposes, or one that writes both
        if is_fused:
            return [2 * size]
        return [*passes, 2 + 2 * size]
    if first and not is_fused:
        passes.append(2 + UNITS[_unit(first)])
    if second:
        passes += [2.0] * (second.scaling == "row") + [2 + UNITS[_unit(second)]]
    return passes
