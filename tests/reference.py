"""Slow, obvious float64 oracles of the matrix products and of what happens to their operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp8 import Cast, Format, Recipe, get_format, get_recipe

Product = Callable[..., Tensor]

NONE = Recipe(name="none")


def rounded(x: Tensor, format: Format, scale: float = 1.0) -> Tensor:
    """x to the nearest value of the format, ties to even, saturating: in float64, by definition."""
    magnitude = (x.double() / scale).abs()
    exponent = torch.where(magnitude > 0, magnitude, 1.0).log2().floor()
    exponent = exponent.clamp(min=format.min_exponent)
    step = 2.0 ** (exponent - format.mantissa_bits)
    value = (torch.round(magnitude / step) * step).clamp(max=format.max)  # rounds half to even
    return torch.copysign(value, x.double()) * scale


def tensor_scale(x: Tensor, format: Format) -> float:
    """The smallest power of two, 2**-126 to 2**127, times which max is not exceeded."""
    amax = x.double().abs().max().item() if x.numel() else 0.0
    if amax == 0 or not math.isfinite(amax):
        return 1.0
    fitting = (2.0**e for e in range(-126, 128) if amax <= format.max * 2.0**e)
    return next(fitting, 2.0**127)


def cast(x: Tensor, how: Cast | None) -> Tensor:
    """What a cast (nearest, saturating) makes of an operand, in float64."""
    if how is None:
        return x.detach().double()
    format = get_format(how.format)
    scale = 1.0 if how.scaling == "unit" else tensor_scale(x, format)
    return rounded(x.detach(), format, scale)


def product(
    function: Product,
    operands: Sequence[Tensor],
    grad: Tensor,
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0),
    recipe: Recipe | str = NONE,
    layer: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """[y, da, db] of ``y = s * function(a, b)`` and the same sums of magnitudes, in float64.

    The second list bounds the rounding errors of any order of summation. layer: whether b is
    cast as a weight.
    """
    recipe = get_recipe(recipe)
    a, b = operands
    right = recipe.weight if layer else recipe.input
    q = [cast(a, recipe.input), cast(b, right)]
    g = cast(grad, recipe.grad)
    values = _three(function, q, g, scales)
    magnitudes = _three(function, [t.abs() for t in q], g.abs(), [abs(s) for s in scales])
    return values, magnitudes


def _three(
    function: Product, q: list[Tensor], grad: Tensor, scales: Sequence[float]
) -> list[Tensor]:
    q = [t.clone().requires_grad_() for t in q]
    y = function(*q)
    return [
        s * t.detach() for s, t in zip(scales, (y, *torch.autograd.grad(y, q, grad)), strict=True)
    ]


def unit(dtype: torch.dtype) -> float:
    """Half a unit in the last place of 1: the relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def assert_within(
    got: Tensor, value: Tensor, magnitude: Tensor, dtype: torch.dtype, roundings: int = 3
) -> None:
    """``got`` is ``value`` up to a sum in float32 and ``roundings`` in ``dtype``.

    A sum of n terms in precision u is off by at most n u times the sum of magnitudes, in any order
    (Higham, Accuracy and Stability of Numerical Algorithms, 3.1); no test here sums more than 300.
    """
    summed = torch.float64 if dtype == torch.float64 else torch.float32
    relative = 300 * unit(summed) + roundings * unit(dtype)
    absolute = roundings * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    error = (got.double() - value).abs()
    assert got.shape == value.shape
    assert bool((error <= relative * magnitude + absolute).all()), float(error.max())
