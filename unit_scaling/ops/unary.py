"""Activations whose factors are computed from the function: see `unit_scaling.rules.elementwise`.

For a standard normal input their output has RMS 1, mean included: the next product sums second
moments. (gelu and silu have u-muP's fitted constants, which tend to a standard deviation.) The
transform scales them wherever a model calls them, including gates.

The transform does not scale clamp, which guards against extremes, or log, roots and other powers,
which are undefined for normal variables or have no second moment. For other functions use
`unit_scaling.unit_scaled`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.constant import specialised
from ..rules.batch import row_scale
from ..rules.elementwise import elementwise_scales, scaled_elementwise
from ..rules.table import Adapter, Scales, positional, row, tie
from ..scale import kept_in, scale_each, scale_output
from .fitted import RELU_GRAD_RMS, RELU_STD, gated_scale
from .generated import REQUIRED, described

__all__ = [
    "abs",
    "atan",
    "celu",
    "clamp",
    "cos",
    "elu",
    "erf",
    "exp",
    "gelu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "logsigmoid",
    "mish",
    "pow",
    "prelu",
    "relu",
    "relu6",
    "relu_squared",
    "selu",
    "sigmoid",
    "silu",
    "sin",
    "softplus",
    "softshrink",
    "softsign",
    "square",
    "tanh",
    "tanhshrink",
]

# Its argument ``inplace`` may be given by position, as in unit-scaling 0.3.5.
_POSITIONAL_INPLACE = ("silu",)

_OURS = {"mult": 1.0, "constraint": "to_output_scale"}

_RULE = "1/RMS of {name} and of its derivative for a standard normal variable, by quadrature."

_DOCUMENTATION = """Computes ``s * {name}({arguments}) / mult``. Other arguments are torch's.

Args:
    input: any shape, floating point.
    mult: the non-linearity, above 0.
    constraint: see `unit_scaling.constraints`.
    inplace: write the result into ``input``.

Returns:
    The shape and dtype of ``input``.
"""


def _spellings(names: Sequence[str], arguments: str) -> dict[Callable[..., Any], Adapter]:
    """Every torch function with one of these names, in place (with _) or not, with its adapter."""
    return {
        getattr(space, name + mark): positional(arguments, {"inplace": True} if mark else None)
        for mark in ("", "_")
        for name in names
        for space in (F, torch, Tensor, torch.special)
        if hasattr(space, name + mark)
    }


def _given(
    name: str, defaults: dict[str, Any], args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[float, str | None, bool, dict[str, Any]]:
    """Returns mult, constraint, inplace and settings of a call, specialised as constants in
    graphs."""
    most = len(defaults) + (name in _POSITIONAL_INPLACE)  # with the input
    if len(args) >= most:
        raise TypeError(f"{name} takes {most} arguments by position")
    given = {**defaults, **dict(zip(defaults, args, strict=False)), **named}
    given = {key: specialised(value) for key, value in given.items()}
    return given.pop("mult"), given.pop("constraint"), given.pop("inplace"), given


def _computed(
    name: str, fn: Callable[..., Tensor], arguments: dict[str, Any]
) -> Callable[..., Scales]:
    """The rule of a function by quadrature."""

    def rule(mult: float = 1.0, constraint: str | None = "to_output_scale", **named: Any) -> Scales:
        return elementwise_scales(fn, (), named, mult, constraint)

    return described(rule, f"{name}_scales", _RULE.format(name=name), arguments)


def _activation(
    name: str,
    fn: Callable[..., Tensor],
    settings: dict[str, Any] | None = None,
    *,
    rule: Callable[[float, str | None], Scales] | None = None,
    spelled: Sequence[str] | None = None,
) -> Callable[..., Tensor]:
    """Adds a row for an elementwise function and returns its unit-scaled version.

    settings: the arguments of ``fn`` after the first, and their defaults. rule: of mult and
    constraint; by default the factors are computed from ``fn``. spelled: its names in torch, by
    default ``name``; () if a transform must not replace it.
    """
    settings, spelled = settings or {}, (name,) if spelled is None else spelled
    defaults = {**_OURS, **settings, "inplace": False}

    def op(input: Tensor, *args: Any, **named: Any) -> Tensor:
        mult, inplace = 1.0, False
        constraint: str | None = "to_output_scale"
        given: dict[str, Any] = {}
        if args or named:
            mult, constraint, inplace, given = _given(name, defaults, args, named)
        if not (input.dtype.is_floating_point or input.dtype.is_complex):
            return kept_in(input if inplace else None, fn(input, **given))
        if rule is None:
            s = elementwise_scales(fn, (), given, mult, constraint)
        else:
            s = rule(mult, constraint)
        x = input.clone() if inplace and mult == 1.0 else input  # autograd may save it
        x = x if mult == 1.0 else x * mult
        output = scale_output(fn(x, **given), s["output"] / mult, s["input"] / mult)
        return input.copy_(output) if inplace else output

    about = _DOCUMENTATION.format(name=name, arguments=", ".join(["mult * input", *settings]))
    by_name = () if name in _POSITIONAL_INPLACE else ("inplace",)
    described(op, name, about, {"input": REQUIRED, **defaults}, by_name)
    forms = _spellings(spelled, " ".join(["input", *settings, "inplace"]))
    return row(rule or _computed(name, fn, {**_OURS, **settings}), adapters=forms)(op)


def gelu_scales(mult: float = 1.0, constraint: str | None = "to_output_scale") -> Scales:
    """Interpolated between x/2 and relu; fitted weights 1/4 and 1/4."""
    output = gated_scale(1 / 4, mult, RELU_STD)
    return tie(constraint, output=output, input=gated_scale(1 / 4, mult, RELU_GRAD_RMS))


def silu_scales(mult: float = 1.0, constraint: str | None = "to_output_scale") -> Scales:
    """Interpolated between x/2 and relu; fitted weights 1/4 and 1."""
    output = gated_scale(1 / 4, mult, RELU_STD)
    return tie(constraint, output=output, input=gated_scale(1, mult, RELU_GRAD_RMS))


def _relu_squared(input: Tensor) -> Tensor:
    """relu(x)**2, the activation of Primer (arXiv 2109.08668)."""
    return torch.relu(input).square()


abs = _activation("abs", torch.abs, spelled=("abs", "absolute"))
atan = _activation("atan", torch.atan, spelled=("atan", "arctan"))
celu = _activation("celu", F.celu, {"alpha": 1.0})
clamp = _activation("clamp", torch.clamp, {"min": None, "max": None}, spelled=())
cos = _activation("cos", torch.cos)
elu = _activation("elu", F.elu, {"alpha": 1.0})
erf = _activation("erf", torch.erf)
exp = _activation("exp", torch.exp)
gelu = _activation("gelu", F.gelu, {"approximate": "none"}, rule=gelu_scales)
hardshrink = _activation("hardshrink", F.hardshrink, {"lambd": 0.5})
hardsigmoid = _activation("hardsigmoid", F.hardsigmoid)
hardswish = _activation("hardswish", F.hardswish)
hardtanh = _activation("hardtanh", F.hardtanh, {"min_val": -1.0, "max_val": 1.0})
leaky_relu = _activation("leaky_relu", F.leaky_relu, {"negative_slope": 0.01})
# Losses use log-probabilities, so the transform does not scale them.
logsigmoid = _activation("logsigmoid", F.logsigmoid, spelled=())
mish = _activation("mish", F.mish)
relu = _activation("relu", torch.relu)
relu6 = _activation("relu6", F.relu6)
relu_squared = _activation("relu_squared", _relu_squared, spelled=())
selu = _activation("selu", F.selu)
sigmoid = _activation("sigmoid", torch.sigmoid, spelled=("sigmoid", "expit"))
silu = _activation("silu", F.silu, rule=silu_scales)
sin = _activation("sin", torch.sin)
softplus = _activation("softplus", F.softplus, {"beta": 1.0, "threshold": 20.0})
softshrink = _activation("softshrink", F.softshrink, {"lambd": 0.5})
softsign = _activation("softsign", F.softsign)
square = _activation("square", torch.square)
tanh = _activation("tanh", torch.tanh)
tanhshrink = _activation("tanhshrink", F.tanhshrink)


def pow_scales(exponent: float, constraint: str | None = "to_output_scale") -> Scales:
    """1/RMS of the power and of its derivative for a standard normal variable, by quadrature."""
    return elementwise_scales(torch.pow, (exponent,), constraint=constraint)


@row(pow_scales)
def pow(input: Tensor, exponent: float, constraint: str | None = "to_output_scale") -> Tensor:
    """Computes ``s * input ** exponent``.

    Args:
        input: any shape, floating point.
        exponent: a positive whole number.
        constraint: see `unit_scaling.constraints`.

    Returns:
        The shape and dtype of ``input``.

    Raises:
        ValueError: the exponent is anything else: a normal variable has no roots, and no inverse
            with a finite second moment.
    """
    return scaled_elementwise(torch.pow, input, (exponent,), {}, 1.0, constraint)


def prelu_scales(
    input: Tensor, weight: Tensor, constraint: str | None = "to_output_scale"
) -> Scales:
    """As leaky_relu with torch's initial slope 1/4; a slope's gradient sums over all negative
    inputs.
    """
    s = elementwise_scales(F.leaky_relu, (0.25,), constraint=constraint)
    return {**s, "weight": 2**0.5 * row_scale(input.numel() // (weight.numel() or 1))}


@row(prelu_scales, replaces=(F.prelu, torch.prelu, torch.Tensor.prelu))
def prelu(input: Tensor, weight: Tensor, constraint: str | None = "to_output_scale") -> Tensor:
    """Computes ``s * prelu(input, weight)``, with a unit-scaled gradient of the slopes.

    Args:
        input: floating point, (batch, channels, ...).
        weight: one slope, or one for each channel.
        constraint: see `unit_scaling.constraints`.
    """
    s = prelu_scales(input, weight, constraint)
    output = F.prelu(input, scale_each(weight, 1.0, s["weight"] / s["input"]))
    return scale_output(output, s["output"], s["input"])
