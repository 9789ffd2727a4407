"""Constraints between the scale factors of one op.

If an op scales its output and its input's gradient differently, its gradient is correct only up to
a constant. This is harmless at a cut edge of the graph, but wrong inside a residual branch, where
two paths meet again. A constraint, a name in `CONSTRAINTS`, replaces the scales by one value.
Source: Blake, Orr and Luschi 2023, "Unit Scaling", section 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fp8.common.validation import check_name

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
    """Returns the arithmetic mean of the scales."""
    return sum(scales) / len(scales)


def gmean(*scales: float) -> float:
    """Returns the geometric mean of the scales. Raises ValueError unless all are above 0."""
    _check_positive("gmean", scales)
    return float(math.prod(scales) ** (1 / len(scales)))


def hmean(*scales: float) -> float:
    """Returns the harmonic mean of the scales. Raises ValueError as `gmean`."""
    _check_positive("hmean", scales)
    return len(scales) / sum(1 / scale for scale in scales)


def _check_positive(name: str, scales: tuple[float, ...]) -> None:
    if any(scale <= 0 for scale in scales):
        raise ValueError(f"{name} is a mean of numbers above 0, got {scales}")


def to_output_scale(output_scale: float, *grad_input_scale: float) -> float:
    """Returns the scale of the output, for every gradient as well. The default of every op."""
    return output_scale


def to_grad_input_scale(output_scale: float, grad_input_scale: float) -> float:
    """Returns the scale of the input's gradient; for ops with one input."""
    return grad_input_scale


def to_left_grad_scale(
    output_scale: float, left_grad_scale: float, right_grad_scale: float
) -> float:
    """Returns the scale of the left operand's gradient; for ops with two inputs."""
    return left_grad_scale


def to_right_grad_scale(
    output_scale: float, left_grad_scale: float, right_grad_scale: float
) -> float:
    """Returns the scale of the right operand's gradient; for ops with two inputs."""
    return right_grad_scale


#: Constraints by name.
CONSTRAINTS: dict[str, Callable[..., float]] = {
    "amean": amean,
    "gmean": gmean,
    "hmean": hmean,
    "to_grad_input_scale": to_grad_input_scale,
    "to_left_grad_scale": to_left_grad_scale,
    "to_output_scale": to_output_scale,
    "to_right_grad_scale": to_right_grad_scale,
}


def checked_constraint(name: str | None) -> str | None:
    """Returns ``name``. Raises ValueError unless it is None, "" or a key of `CONSTRAINTS`."""
    if name != "":
        check_name("constraint", name, (None, *CONSTRAINTS))
    return name


def apply_constraint(constraint_name: str | None, *scales: float) -> tuple[float, ...]:
    """Returns as many scales as were given, all equal unless there is no constraint.

    Args:
        constraint_name: a key of `CONSTRAINTS`, "" or None.
        scales: the scale of the output, then of each input's gradient.

    Raises:
        ValueError: the name is unknown, or as in `gmean`.
        TypeError: the constraint is for another number of scales ("to_left_grad_scale" with one
            input).

    >>> apply_constraint("gmean", 2.0, 8.0)
    (4.0, 4.0)
    >>> apply_constraint(None, 2.0, 8.0)
    (2.0, 8.0)
    """
    checked_constraint(constraint_name)
    if not constraint_name:
        return scales
    return (CONSTRAINTS[constraint_name](*scales),) * len(scales)
