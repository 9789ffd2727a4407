"""The casts of the operands of a layer's three products, and which operands share one copy.

A recipe without a rule for scales ("unit") casts operands without a scale. An operand of known RMS
may have a *static* scale factor instead: a power of two that is a constant of the call,
``f * Q(x / f)``.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

from ..common.compiler import compiled_as, taken_as_constant
from .casting import LoweredCast, labelled, shifted, unrotated

Exponents = tuple[int, ...]
"""The base-2 logarithms of the static scale factors of operands; 0 for none."""


class Casts(NamedTuple):
    """The lowered casts of the six operands of a layer's three products. An operand of the backward
    products is None if it needs no cast, or no second one."""

    a: LoweredCast | None = None
    b: LoweredCast | None = None
    grad_for_a: LoweredCast | None = None
    b_for_grad_a: LoweredCast | None = None
    grad_for_b: LoweredCast | None = None
    a_for_grad_b: LoweredCast | None = None


def static_exponent(weight: object) -> int:
    """The exponent of the static scale factor of a parameter, from its tag ``mup_scale`` set by
    `unit_scaling.parameter`; 0 without a tag."""
    return math.frexp(getattr(weight, "mup_scale", 1.0))[1] - 1


def _casts_of(
    text: str,
    layer: bool = True,
    name: str = "",
    static: Exponents = (0, 0),
    rotated: bool = True,
) -> Casts:
    """The lowered casts of the recipe with this `Recipe.text`.

    layer: whether b is a weight; otherwise it is cast like a, and in the backward pass rotated like
    the gradient that it is multiplied by. name: of the product, for `fp8.stats`. rotated: False
    omits rotations.
    """
    specs = [LoweredCast.from_text(line) if line else None for line in text.split("\n")]
    a, b, grad_for_a, b_for_grad_a, grad_for_b, a_for_grad_b = specs
    if not layer:
        b, b_for_grad_a = a, unrotated(a)
        if a is not None and grad_for_a is not None:
            b_for_grad_a = a._replace(hadamard=grad_for_a.hadamard, signs=grad_for_a.signs)
        grad_for_a = unrotated(grad_for_a) if a is None else grad_for_a
    if any(static):
        a, a_for_grad_b = (shifted(spec, static[0]) for spec in (a, a_for_grad_b))
        b, b_for_grad_a = (shifted(spec, static[1]) for spec in (b, b_for_grad_a))
    casts = Casts(a, b, grad_for_a, b_for_grad_a, grad_for_b, a_for_grad_b)
    casts = casts if rotated else Casts(*map(unrotated, casts))
    if not name:
        return casts
    second = "weight" if layer else "other"
    roles = ("input", second, "grad", f"{second} again", "grad again", "input again")
    return Casts(*map(labelled, casts, [name] * len(casts), roles))


@taken_as_constant
def _fields(*key: Any) -> tuple[Any, ...]:
    return tuple(spec and tuple(spec) for spec in _casts_of(*key))


def _in_graph(*key: Any) -> Casts:
    return Casts(*[fields and LoweredCast(*fields) for fields in _fields(*key)])


casts_of = compiled_as(_in_graph)(cache(_casts_of))


def one_copy(first: LoweredCast | None, second: LoweredCast | None) -> bool:
    """Whether an operand cast under ``first`` can be reused where ``second`` applies, along the
    other axis."""
    if first is None or second is None:
        return first is second
    across, along = first.tile
    equal = first == second or first.settings == second.settings
    return equal and across == along and not first.hadamard


class Copies(NamedTuple):
    """What the backward products need of the operands. a, b: whether they use the cast copy of the
    forward product. casts: the specs, without those of second casts that are not needed."""

    a: bool
    b: bool
    casts: Casts


@cache
def copies_of(casts: Casts) -> Copies:
    """The copies of the operands of a product."""
    a, b = one_copy(casts.a, casts.a_for_grad_b), one_copy(casts.b, casts.b_for_grad_a)
    needed = casts._replace(
        a_for_grad_b=None if a else casts.a_for_grad_b,
        b_for_grad_a=None if b else casts.b_for_grad_a,
    )
    return Copies(a, b, needed)
