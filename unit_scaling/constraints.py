"""How the scales of one op are tied together.

An op that gives its output one scale and its input's gradient another computes a gradient that is
only right up to a constant. That is harmless where the graph can be cut, and wrong inside a
residual branch, where two paths meet again. A constraint replaces the scales of an op by one
common value (Blake, Orr and Luschi 2023, "Unit Scaling", section 4.3).

`CONSTRAINTS` holds every constraint by name. A constraint is always given by its name, or as None
for no constraint at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = [
    "CONSTRAINTS",
    "amean",
    "apply_constraint",
    "gmean",
    "hmean",
    "to_grad_input_scale",
    "to_left_grad_scale",
    "to_output_scale",
    "to_right_grad_scale",
]


def amean(*scales: float) -> float:
    """The arithmetic mean of the scales."""
    return sum(scales) / len(scales)


def gmean(*scales: float) -> float:
    """The geometric mean of the scales: of negative ones minus that of their magnitudes."""
    sign = _sign("gmean", scales)
    return float(sign * abs(math.prod(scales)) ** (1 / len(scales)))


def hmean(*scales: float) -> float:
    """The harmonic mean of the scales, all positive or all negative."""
    _sign("hmean", scales)
    return len(scales) / sum(1 / scale for scale in scales)


def _sign(name: str, scales: tuple[float, ...]) -> int:
    """1 or -1. Raises ValueError for scales that have none in common."""
    if any(scale <= 0 for scale in scales) and any(scale >= 0 for scale in scales):
        raise ValueError(f"{name} is a mean of numbers of one sign, none of them 0, got {scales}")
    return -1 if scales[0] < 0 else 1


def to_output_scale(output_scale: float, *grad_input_scale: float) -> float:
    """The scale of the output, for every gradient as well. The default of every op."""
    return output_scale


def to_grad_input_scale(output_scale: float, grad_input_scale: float) -> float:
    """The scale of the gradient of the input: for ops with one input."""
    return grad_input_scale


def to_left_grad_scale(
    output_scale: float, left_grad_scale: float, right_grad_scale: float
) -> float:
    """The scale of the gradient of the left operand: for ops with two inputs."""
    return left_grad_scale


def to_right_grad_scale(
    output_scale: float, left_grad_scale: float, right_grad_scale: float
) -> float:
    """The scale of the gradient of the right operand: for ops with two inputs."""
    return right_grad_scale


#: Every constraint by name.
CONSTRAINTS: dict[str, Callable[..., float]] = {
    "amean": amean,
    "gmean": gmean,
    "hmean": hmean,
    "to_grad_input_scale": to_grad_input_scale,
    "to_left_grad_scale": to_left_grad_scale,
    "to_output_scale": to_output_scale,
    "to_right_grad_scale": to_right_grad_scale,
}

# How many scales (one output, then gradients) a constraint applies to, where not to any number.
_ARITY = {"to_grad_input_scale": 2, "to_left_grad_scale": 3, "to_right_grad_scale": 3}


def checked_constraint(name: str | None) -> str | None:
    """``name``. Raises ValueError for what is neither None, "" nor a key of `CONSTRAINTS`."""
    if name is None or name == "" or (isinstance(name, str) and name in CONSTRAINTS):
        return name
    allowed = ", ".join(map(repr, CONSTRAINTS))
    raise ValueError(f"unknown constraint {name!r}; choose None or one of {allowed}")


def apply_constraint(constraint_name: str | None, *scales: float) -> tuple[float, ...]:
    """The scales after the constraint: as many as were given, all equal unless it is None.

    constraint_name: a key of `CONSTRAINTS`, "" or None. scales: the output's, then one for each
    input's gradient.
    Raises ValueError for an unknown name, and for a constraint that does not fit this number of
    scales ("to_left_grad_scale" with one input); for a geometric or harmonic mean of scales that
    differ in sign or are 0.

    >>> apply_constraint("gmean", 2.0, 8.0)
    (4.0, 4.0)
    >>> apply_constraint(None, 2.0, 8.0)
    (2.0, 8.0)
    """
    checked_constraint(constraint_name)
    if not constraint_name:
        return scales
    arity = _ARITY.get(constraint_name, len(scales))
    if arity != len(scales):
        raise ValueError(
            f"constraint {constraint_name!r} is for ops with {arity - 1} scaled input(s), "
            f"but this op has {len(scales) - 1}"
        )
    return (CONSTRAINTS[constraint_name](*scales),) * len(scales)
