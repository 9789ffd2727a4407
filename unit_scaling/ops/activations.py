"""Activations: elementwise functions, gated units and softmax.

The factors of elementwise functions are computed from the function by
`unit_scaling.rules.elementwise`, except for gelu and silu, which have u-muP's fitted constants. For
other functions use `unit_scaling.unit_scaled`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.calls import Function
from ..core.functional import logarithmic_interpolation
from ..rules.elementwise import elementwise_scales
from ..rules.table import Scales, row, tie
from ..scale import scale_output
from .generated import CONSTRAINT, described, spellings, unary

# u-muP's fitted factors: between the limits of an op for a small and a large mult

# gelu and silu tend to relu as mult grows, whose standard deviation is sqrt((1 - 1/pi) / 2) for
# standard normal x; at small mult they tend to x/2. The weights in between are fits, within 4 % of
# the exact value at mult = 1. Source: u-muP, arXiv 2407.17465, appendix B.
_RELU_STD = math.sqrt((1 - 1 / math.pi) / 2)
_RELU_GRAD_RMS = math.sqrt(1 / 2)


def _limit_weight(weight: float, mult: float) -> float:
    """The interpolation weight of an op's limit for large mult. Raises ValueError if mult is not a
    positive number, as for torch's positional arguments: ``silu(x, inplace)``."""
    default = mult == 1.0 and mult is not True  # the only check in most graphs
    if not default and (isinstance(mult, (bool, str)) or not mult > 0):
        raise ValueError(
            f"mult is {mult!r}, not a number above 0; give torch's arguments by name"
        )
    return 1 / (1 + weight / mult**2)


def _gated_scale(weight: float, mult: float, limit: float) -> float:
    """1/RMS of x * sigmoid-like(mult * x): between x/2, of RMS 1/2, and relu-like as mult grows."""
    return logarithmic_interpolation(_limit_weight(weight, mult), 2.0, 1 / limit)


# Elementwise functions

_OURS = {"mult": 1.0, **CONSTRAINT}

_RULE = "1/RMS of {name} and of its derivative for a standard normal variable, by quadrature."

_DOCUMENTATION = """Computes ``s * {name}({arguments}) / mult``. Other arguments are torch's.

Args:
    input: any shape, floating point.
    mult: the non-linearity, above 0.
    inplace: write the result into ``input``.
"""


def _activation(
    fn: Callable[..., Tensor],
    rule: Callable[[float, str | None], Scales] | None = None,
    replaces: Sequence[Function] | None = None,
    name: str = "",
    **theirs: object,
) -> Callable[..., Tensor]:
    """Adds the row of an elementwise function. rule: by default the factors are computed from
    ``fn``. name: by default the name of ``fn``. theirs: the arguments of ``fn`` after the first,
    and their defaults."""

    def computed(
        mult: float = 1.0, constraint: str | None = "to_output_scale", **named: Any
    ) -> Scales:
        return elementwise_scales(fn, (), named, mult, constraint)

    name = name or fn.__name__.strip("_")
    settings = {**_OURS, **theirs}
    described(computed, f"{name}_scales", _RULE.format(name=name), settings)
    arguments = ", ".join(["mult * input", *theirs])
    about = _DOCUMENTATION.format(name=name, arguments=arguments)
    settings["inplace"] = False
    return unary(fn, rule or computed, about, settings, name=name, replaces=replaces)


def gelu_scales(
    mult: float = 1.0, constraint: str | None = "to_output_scale"
) -> Scales:
    """Interpolated between x/2 and relu; fitted weights 1/4 and 1/4."""
    return _between_half_and_relu(mult, constraint, 1 / 4)


def silu_scales(
    mult: float = 1.0, constraint: str | None = "to_output_scale"
) -> Scales:
    """Interpolated between x/2 and relu; fitted weights 1/4 and 1."""
    return _between_half_and_relu(mult, constraint, 1)


def _between_half_and_relu(mult: float, constraint: str | None, fit: float) -> Scales:
    output = _gated_scale(1 / 4, mult, _RELU_STD)
    return tie(constraint, output=output, input=_gated_scale(fit, mult, _RELU_GRAD_RMS))


def _relu_squared(input: Tensor) -> Tensor:
    """relu(x)**2, the activation of Primer (arXiv 2109.08668)."""
    return torch.relu(input).square()


abs = _activation(torch.abs, replaces=spellings("abs", "absolute"))
cos = _activation(torch.cos)
elu = _activation(F.elu, alpha=1.0)
erf = _activation(torch.erf)
exp = _activation(torch.exp)
gelu = _activation(F.gelu, gelu_scales, approximate="none")
hardsigmoid = _activation(F.hardsigmoid)
hardswish = _activation(F.hardswish)
hardtanh = _activation(F.hardtanh, min_val=-1.0, max_val=1.0)
leaky_relu = _activation(F.leaky_relu, negative_slope=0.01)
# Losses use log-probabilities, so the transform does not scale them.
logsigmoid = _activation(F.logsigmoid, replaces=(), name="logsigmoid")
mish = _activation(F.mish)
relu = _activation(torch.relu)
relu6 = _activation(F.relu6)
relu_squared = _activation(_relu_squared, replaces=())
selu = _activation(F.selu)
sigmoid = _activation(torch.sigmoid, replaces=spellings("sigmoid", "expit"))
silu = _activation(F.silu, silu_scales)
sin = _activation(torch.sin)
softplus = _activation(F.softplus, beta=1.0, threshold=20.0)
softsign = _activation(F.softsign)
square = _activation(torch.square)
tanh = _activation(torch.tanh)


# Gated units: a value times an activation of another one. The gradients of both are tied.


def _times(
    input: Tensor,
    gate: Tensor,
    activation: Callable[[Tensor], Tensor],
    s: Scales,
    mult: float,
) -> Tensor:
    if mult != 1.0:
        gate = gate * mult
    return (input * activation(gate)).mul_(s["output"] / mult)


_GATED = ("output", "input", "gate")


def silu_glu_scales(mult: float = 1.0) -> Scales:
    """One scale for all, about 1/RMS of silu."""
    return dict.fromkeys(_GATED, _gated_scale(1, mult, _RELU_GRAD_RMS))


@row(silu_glu_scales)
def silu_glu(input: Tensor, gate: Tensor, mult: float = 1.0) -> Tensor:
    """Computes ``s * input * silu(mult * gate) / mult``, the gated unit of Llama's MLP.

    Args:
        input: floating point, broadcastable with ``gate``.
        gate: floating point.
        mult: the non-linearity of the gate, above 0.
    """
    return _times(input, gate, F.silu, silu_glu_scales(mult), mult)


def geglu_scales(mult: float = 1.0, approximate: str = "none") -> Scales:
    """One scale for all, 1/RMS of gelu."""
    s = elementwise_scales(F.gelu, (), {"approximate": approximate}, mult)
    return dict.fromkeys(_GATED, s["output"])


@row(geglu_scales)
def geglu(
    input: Tensor, gate: Tensor, mult: float = 1.0, approximate: str = "none"
) -> Tensor:
    """Computes ``s * input * gelu(mult * gate) / mult``; arguments as in `silu_glu` and `gelu`.

    Source: Shazeer 2020, arXiv 2002.05202.
    """
    gelu = partial(F.gelu, approximate=approximate)
    return _times(input, gate, gelu, geglu_scales(mult, approximate), mult)


def glu_scales(constraint: str | None = "to_output_scale") -> Scales:
    """A standard normal times the sigmoid of another; one factor for both halves of the
    gradient."""
    s = elementwise_scales(torch.sigmoid, constraint=None)
    gradient = (s["output"] ** -2 + s["input"] ** -2) / 2
    return tie(constraint, output=s["output"], input=gradient**-0.5)


glu = unary(
    F.glu,
    glu_scales,
    """Computes ``s * a * sigmoid(b)``, where a and b are the halves of ``input`` along ``dim``.

    Args:
        input: floating point, of even size along ``dim``.
        dim: the dimension to split.
    """,
    {"dim": -1, **CONSTRAINT},
)


# Softmax


def _softmax_dim(input: Tensor, dim: int | None) -> int:
    """The dimension, with the default of `torch.nn.functional.softmax`."""
    if dim is None:
        return int(input.ndim not in (0, 1, 3))
    return dim


def softmax_scales(
    input: Tensor,
    dim: int | None = None,
    constraint: str | None = "to_output_scale",
    mult: float = 1.0,
) -> Scales:
    """Between n (near uniform) and sqrt(n) as mult grows, with a fitted weight, for n entries; the
    gradient between n/mult and sqrt(n/mult). Source: u-muP, arXiv 2407.17465, appendix B."""
    size = input.size(_softmax_dim(input, dim)) if input.ndim else 1
    if size == 0:
        return tie(constraint, output=1.0, input=1.0)
    # Logarithmic interpolation of n and its root.
    power = 1 - _limit_weight(4, mult) / 2
    return tie(constraint, output=size**power, input=(size / mult) ** power)


@row(softmax_scales, replaces=(F.softmax, torch.softmax, Tensor.softmax))
def softmax(
    input: Tensor,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    constraint: str | None = "to_output_scale",
    mult: float = 1.0,
) -> Tensor:
    """Computes ``s * softmax(mult * input)`` along ``dim``; the entries sum to s, not 1.

    Args:
        input: any shape, floating point.
        dim: the dimension; the default of None is torch's.
        dtype: the dtype that ``input`` is cast to first.
        mult: the inverse of a temperature.
    """
    s = softmax_scales(input, dim, constraint, mult)
    logits = input if mult == 1.0 else input * mult
    output = F.softmax(logits, _softmax_dim(input, dim), dtype=dtype)
    return scale_output(output, s["output"], s["input"])
