"""Learning rates: the rules, by kind and shape of a parameter, and what they are without ``lr``.

A parameter is anything with its tags and a shape; see `unit_scaling.parameter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

MupType = Literal["weight", "bias", "norm", "output"]
Kind = Literal[MupType, "kernel", "few"]
"""A mup_type, "kernel": the weight of a convolution over space, or "few", see `multiplier`."""

LrMult = Mapping[Kind, float]
LrFactors = Mapping[str, Callable[[torch.Size], float]]


class ParameterData(Protocol):
    """A tagged parameter."""

    mup_type: MupType
    mup_scaling_depth: int | None
    mup_scale: float
    mup_divisor: float | None

    @property
    def shape(self) -> torch.Size: ...

    def numel(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class LrRule:
    """A row of `RULES`: the learning rate of a parameter relative to ``lr``."""

    #: mup_type -> (shape of the parameter) -> factor.
    factors: LrFactors
    #: Whether updates are proportional to gradients, as in SGD.
    proportional: bool = False
    #: The learning rate without ``lr``. Measured in docs/learning-rates.md.
    rate: float
    #: Additional factors by kind, which u-muP leaves open. Adam changes an entry by about its rate:
    #: a gain or a bias by its own size in a step at the best lr of the weights. Readouts and
    #: kernels are best at a higher rate than hidden matrices; u-muP's factor of a width is too high
    #: for layers of few inputs. Measured in docs/learning-rates.md.
    mult: LrMult = field(default_factory=dict)


def fan_in(shape: torch.Size) -> int:
    """The number of terms in an output's sum: all dimensions but the first; all of a vector. For an
    embedding the width, u-muP's fan-out (table 2); for transposed weights another such width."""
    return math.prod(shape[1:] if len(shape) > 1 else shape) or 1


def _one(shape: torch.Size) -> float:
    return 1.0


def _width(shape: torch.Size) -> float:
    if shape:
        return float(shape[0])
    return 1.0


#: u-muP (arXiv 2407.17465), table 2.
_UMUP: LrFactors = {
    "weight": lambda shape: float(fan_in(shape) ** -0.5),
    "bias": _one,
    "norm": _one,
    "output": _one,
}
_TO_OUTPUT_SCALE: LrFactors = {
    "weight": lambda shape: float(fan_in(shape) ** 0.5),
    "bias": _width,
    "norm": _width,
    "output": _one,
}
_MUON: LrFactors = {
    "weight": lambda shape: math.sqrt(min(shape[0], fan_in(shape)) or 1)
}

#: "adam" is for all optimizers whose updates have entries of about 1 (Adam, AdamW, Lion, ...).
#: "sgd" is the same, since gradients of unit-scaled modules have RMS 1. "sgd_to_output_scale" is
#: for models whose readout has its input gradient tied to its output: gradients are then smaller by
#: the root of the width. "muon" is for hidden matrices under `torch.optim.Muon` with the default
#: adjust_lr_fn, whose updates have singular values sqrt(max(1, fan_out/fan_in)): a layer, which
#: divides by sqrt(fan_in), must change by lr * sqrt(fan_out/fan_in) in spectral norm, as under
#: Adam. Source: arXiv 2310.17813, condition 1.
RULES: dict[str, LrRule] = {
    "adam": LrRule(
        factors=_UMUP,
        rate=0.5,
        mult={
            "kernel": 2.0,
            "output": 2.0,
            "norm": 1 / 32,
            "bias": 1 / 32,
            "few": 1 / 4,
        },
    ),
    "sgd": LrRule(factors=_UMUP, proportional=True, rate=0.02, mult={"kernel": 2.0}),
    "sgd_to_output_scale": LrRule(
        factors=_TO_OUTPUT_SCALE, proportional=True, rate=0.02
    ),
    "muon": LrRule(factors=_MUON, rate=2.0**-5),
}

#: Rule -> mup_type -> (shape of the parameter) -> factor of the learning rate.
LR_RULES = {name: rule.factors for name, rule in RULES.items()}
#: Rule -> kind of parameter -> an additional factor of the learning rate, by default.
LR_MULT = {name: rule.mult for name, rule in RULES.items()}
#: Rule -> the learning rate without ``lr``.
RATES = {name: rule.rate for name, rule in RULES.items()}
#: The ``lr_mult`` of u-muP and of unit-scaling 0.3.5.
UMUP: LrMult = {"kernel": 1.0, "output": 1.0, "norm": 1.0, "bias": 1.0, "few": 1.0}

TORCHS_EPS = 1e-8
SMALL_EPS = 1e-16
"""The eps of Adam, in place of torch's default of 1e-8, for weights of `unit_scale`. Their
gradients are the true ones, which a mean over many tokens and classes makes as small as 1e-9; the
square of 1e-16 is still a normal number of float32."""


def eps_scale(param: ParameterData, eps: float | None) -> float:
    """Returns the factor of Adam's eps, which is in units of the gradient: the gradient of a weight
    whose values have the size mup_scale is 1 / mup_scale times the gradient of a weight of RMS 1.
    See `SMALL_EPS`."""
    is_small = eps == TORCHS_EPS and getattr(param, "mup_divisor", None)
    unit: float = getattr(param, "mup_scale", 1.0)
    return (SMALL_EPS / TORCHS_EPS if is_small else 1.0) / unit


def lr_scale_for_depth(param: ParameterData) -> float:
    """Returns 1 / sqrt(mup_scaling_depth); 1 outside a stack of layers."""
    depth = getattr(param, "mup_scaling_depth", None)
    if depth is None:
        return 1.0
    return float(depth**-0.5)


def lr_scale(rule: str, param: ParameterData) -> float:
    """Returns the factor of a rule. Raises ValueError for a mup_type that it does not cover.

    A weight w with a tag mup_scale takes the steps of u = w / mup_scale, whose gradient is
    mup_scale times the gradient of w: SGD's updates are in proportion to it, Adam's and Muon's are
    not.

    A weight of `unit_scale` has the gradient of the loss and not one of RMS 1. A layer u / sqrt(n)
    of fan-in n is the plain layer w: SGD's step -lr * g_w of w is the step -lr * n * g_u of u.
    Under muP (arXiv 2203.03466, table 3) the rate of w does not depend on the width, the
    rate of a readout w = u / n is in proportion to 1 / n, and the rate of an embedding to its
    fan-out, the width.
    5 puts the best rates where they are for gradients of RMS 1.
    """
    row = RULES[rule]
    kind = param.mup_type
    if kind not in row.factors:
        allowed = ", ".join(map(repr, row.factors))
        raise ValueError(
            f"rule {rule!r} is for parameters of mup_type {allowed}: got {kind!r}, of shape "
            f"{tuple(param.shape)}"
        )
    shape = _shape(param)
    scale: float = getattr(param, "mup_scale", 1.0) ** (2 if row.proportional else 1)
    if row.proportional and getattr(param, "mup_divisor", None):
        return scale * (5.0 * fan_in(shape) if kind in ("weight", "output") else 1.0)
    return row.factors[kind](shape) * lr_scale_for_depth(param) * scale


def kind_of(param: ParameterData) -> Kind:
    """The kind of a parameter. A convolution over one place is a linear layer."""
    stacked: bool = getattr(param, "mup_stacked", False)
    places = param.shape[stacked + 2 :].numel()
    is_matrix = places == 1 or getattr(param, "mup_matrix", False)
    if param.mup_type == "weight" and not is_matrix:
        return "kernel"
    return param.mup_type


def multiplier(mult: LrMult, param: ParameterData) -> float:
    """Returns the additional factor of a parameter: the factor of its kind in ``mult``. "few"
    limits the factor 1/sqrt(fan_in) of a weight; 1/4 limits it to the factor of 16 inputs."""
    factor = mult.get(kind_of(param), 1.0)
    # By u-muP alone, layers of 1 to 9 inputs changed by up to half in a step.
    if param.mup_type == "weight" and "few" in mult:
        factor *= min(1.0, mult["few"] * fan_in(_shape(param)) ** 0.5)
    return factor


def default_rate(rule: str, param: ParameterData) -> float:
    """Returns the learning rate of a parameter without ``lr``."""
    row = RULES[rule]
    return row.rate * multiplier(row.mult, param) * lr_scale(rule, param)


def _shape(param: ParameterData) -> torch.Size:
    """The shape of a parameter, (fan-out, fan-in) if it is stored in another layout; for
    stacked parameters (experts), the shape of each."""
    stacked: bool = getattr(param, "mup_stacked", False)
    shape = param.shape[stacked:]
    terms = getattr(param, "mup_fan_in", None)
    if terms is None:
        return shape
    return torch.Size([shape.numel() // terms or 1, terms])
