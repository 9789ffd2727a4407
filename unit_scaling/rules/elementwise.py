"""Scale factors of any elementwise function, computed from the function itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from ..common.calls import Args, Kwargs
from ..common.constant import constant, specialised
from ..scale import scale_output
from .quadrature import normal_means
from .table import Scales, tie

Elementwise = Callable[..., Tensor]


def unit_scaled(fn: Elementwise) -> Elementwise:
    """Returns the unit-scaled version of an elementwise function; also usable as a decorator.

    The factors are 1/RMS (about zero, as the next product sums that) of the output and of the
    derivative for standard normal ``x``, by quadrature to about ten digits, including at kinks and
    jumps, once for each ``mult`` and settings.

    Args:
        fn: ``fn(x, *settings, **named)`` of one floating-point tensor of any shape; settings are
            numbers, strings and the like.

    Returns:
        ``scaled(x, *settings, mult=1.0, constraint="to_output_scale", **named)``, which is ``s *
        fn(mult * x) / mult`` in the shape and dtype of ``fn``.

    Raises:
        TypeError: at a call: a setting is a tensor.
        ValueError: at the first call: the function is not elementwise, random, constant, NaN or
            infinite for possible values of a normal variable (log, sqrt), or its output or
            derivative has no finite second moment (1/x, tan).

    >>> snake = unit_scaled(lambda x, a=1.0: x + torch.sin(a * x) ** 2 / a)
    >>> snake(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 1.4938])
    """

    @wraps(fn)
    def scaled(
        input: Tensor,
        *settings: Any,
        mult: float = 1.0,
        constraint: str | None = "to_output_scale",
        **named: Any,
    ) -> Tensor:
        mult = specialised(mult)
        settings = tuple([specialised(value) for value in settings])
        named = {key: specialised(value) for key, value in named.items()}
        s = elementwise_scales(fn, settings, named, mult, constraint)
        output = fn(input if mult == 1.0 else input * mult, *settings, **named)
        return scale_output(output, s["output"] / mult, s["input"] / mult)

    return scaled


def elementwise_scales(
    fn: Elementwise,
    settings: Args = (),
    named: Kwargs | None = None,
    mult: float = 1.0,
    constraint: str | None = "to_output_scale",
) -> Scales:
    """1/RMS of ``fn(mult * x) / mult`` and of its derivative, for standard normal x."""
    named = named or {}
    values = (*settings, *named.values())
    output, derivative = constant(elementwise_rms, fn, mult, tuple(named), *values)
    return tie(constraint, output=mult / output, input=1 / derivative)


def elementwise_rms(
    fn: Elementwise, mult: float, names: tuple[str, ...], *values: Any
) -> tuple[float, float]:
    """The RMS of ``fn(mult * x)`` and of ``fn'(mult * x)`` for standard normal x; for a step
    function both are the RMS of the output. values: positional settings, then the settings of
    ``names``."""
    name = getattr(fn, "__name__", str(fn))
    if any(isinstance(value, Tensor) for value in values):
        raise TypeError(f"settings of {name} are numbers and strings, got a tensor")
    if not 0 < mult < math.inf:
        raise ValueError(f"mult is a positive number, got {mult}")
    positional = values[: len(values) - len(names)]
    named = dict(zip(names, values[len(positional) :], strict=True))

    def f(x: Tensor) -> Tensor:
        return fn(mult * x, *positional, **named)

    _check_elementwise(f, name)

    def squares(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        value = f(x)
        (derivative,) = torch.autograd.grad(value.sum(), x)
        both = torch.stack([value.detach(), derivative / mult])
        bad = ~both.isfinite().all(0)
        if bad.any():
            worst = x[bad][x[bad].abs().argmin()].item() * mult
            raise ValueError(f"{name} cannot be unit-scaled: not finite at {worst:.3g}")
        return both.square()

    try:
        output, derivative = map(math.sqrt, normal_means(squares))
    except ValueError as error:
        if "infinite" not in str(error):
            raise
        raise ValueError(
            f"{name} cannot be unit-scaled: second moment {error}"
        ) from None
    return output, derivative or output / mult


def _check_elementwise(f: Elementwise, name: str) -> None:
    """Raises ValueError unless the value at each point depends on this point only."""
    x = torch.linspace(-6, 6, 30, dtype=torch.float64, device="cpu").requires_grad_()
    try:
        value = f(x)
        parts = torch.cat([f(x[:7]), f(x[7:])])
    except Exception as error:
        raise ValueError(f"{name} is not an elementwise function: {error}") from error
    is_alike = partial(torch.allclose, value, rtol=1e-9, atol=1e-12, equal_nan=True)
    if not (value.shape == parts.shape == x.shape and is_alike(parts)):
        raise ValueError(
            f"{name} is not an elementwise function: its value at a point depends on the other "
            "points, or is random"
        )
    if not (value.dtype.is_floating_point and value.requires_grad):
        raise ValueError(f"{name} cannot be unit-scaled: its output has no gradient")
    if is_alike(value[:1].expand_as(value)):
        raise ValueError(f"{name} cannot be unit-scaled: it is constant from -6 to 6")
