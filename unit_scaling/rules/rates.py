"""Learning rates: the rules, by kind and shape of a parameter, and what they are without ``lr``.

A parameter is anything with its tags and a shape; see `unit_scaling.parameter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

Kind = Literal["weight", "bias", "norm", "output", "kernel"]
"""A mup_type, or "kernel": a weight of three or more dimensions."""

LrMult = Mapping[Kind, float]


def _fan_in(shape: torch.Size) -> int:
    """The number of terms in an output's sum: all dimensions but the first; all of a vector. For an
    embedding the width, u-muP's fan-out (table 2); for transposed weights another such width."""
    return math.prod(shape[1:] if len(shape) > 1 else shape) or 1


def _one(shape: torch.Size) -> float:
    return 1.0


def _width(shape: torch.Size) -> float:
    return float(shape[0]) if shape else 1.0


LrRule = dict[str, Callable[[torch.Size], float]]

_ADAM: LrRule = {
    "weight": lambda shape: float(_fan_in(shape) ** -0.5),
    "bias": _one,
    "norm": _one,
    "output": _one,
}

#: Rule -> mup_type -> (shape of the parameter) -> factor of the learning rate. "adam" is for all
#: optimizers whose updates have entries of about 1 (Adam, AdamW, NAdam, RAdam, Adamax, Lion, ...).
#: Source: u-muP (arXiv 2407.17465), table 2. "sgd" is the same, with or without momentum, since
#: gradients of unit-scaled modules have RMS 1, as Adam updates have. "sgd_to_output_scale" is for
#: models whose readout has its input gradient tied to its output: gradients are then smaller by the
#: square root of the width. "muon" is for hidden matrices under `torch.optim.Muon` with the default
#: adjust_lr_fn, whose updates have singular values sqrt(max(1, fan_out/fan_in)). A layer, which
#: divides by sqrt(fan_in), must change by lr * sqrt(fan_out/fan_in) in spectral norm, as under
#: Adam. Source: arXiv 2310.17813, condition 1.
LR_RULES: dict[str, LrRule] = {
    "adam": _ADAM,
    "sgd": {**_ADAM},
    "sgd_to_output_scale": {
        "weight": lambda shape: float(_fan_in(shape) ** 0.5),
        "bias": _width,
        "norm": _width,
        "output": _one,
    },
    "muon": {"weight": lambda shape: math.sqrt(min(shape[0], _fan_in(shape)) or 1)},
}

#: The factors of SGD for weights of `unit_scale`, whose gradients are those of the loss and not of
#: RMS 1. A layer u / sqrt(n) of fan-in n is the plain layer w, and u has the gradient
#: g_w / sqrt(n): the step -lr * g_w of w is the step -lr * n * g_u of u. Under muP (arXiv
#: 2203.03466, table 3) the rate of w does not depend on the width, that of a readout w = u / n is
#: in proportion to 1 / n, and that of an embedding to its fan-out, the width. 5 puts the best rates
#: where they are for gradients of RMS 1.
_TRUE_GRADIENTS: LrRule = {
    "weight": lambda shape: 5.0 * _fan_in(shape),
    "bias": _one,
    "norm": _one,
    "output": lambda shape: 5.0 * _fan_in(shape),
}

LR_MULT: dict[str, LrMult] = {
    "adam": {"kernel": 2.0, "output": 2.0, "norm": 1 / 32, "bias": 1 / 32},
    "sgd": {"kernel": 2.0},
}
"""Rule -> kind of parameter -> an additional factor of the learning rate, by default.

u-muP leaves these constants open. Adam changes an entry by about its rate; a weight of fan-in n has
lr / sqrt(n), and a gain or a bias lr itself, which at the best lr of the weights is its own size in
a step. Readouts and convolutions ("kernel": weights of three or more dimensions) are best at a
higher rate than hidden matrices. Measured in docs/learning-rates.md."""

UMUP: LrMult = {"kernel": 1.0, "output": 1.0, "norm": 1.0, "bias": 1.0}
"""The ``lr_mult`` of u-muP and of unit-scaling 0.3.5."""

RATES: dict[str, float] = {
    "adam": 0.5,
    "sgd": 0.02,
    "sgd_to_output_scale": 0.02,
    "muon": 2.0**-5,
}
"""Rule -> the learning rate without ``lr``. Measured in docs/learning-rates.md."""


def lr_scale_for_depth(param: Any) -> float:
    """Returns 1 / sqrt(mup_scaling_depth); 1 outside a stack of layers."""
    depth = getattr(param, "mup_scaling_depth", None)
    return 1.0 if depth is None else float(depth**-0.5)


#: Rule -> exponent of mup_scale in the learning rate.
_SCALE_POWERS = {"adam": 1, "sgd": 2, "sgd_to_output_scale": 2, "muon": 1}


def lr_scale(rule: str, param: Any) -> float:
    """Returns the factor of a rule. Raises ValueError for a mup_type that it does not cover."""
    factors = LR_RULES[rule]
    if param.mup_type not in factors:
        allowed = ", ".join(map(repr, factors))
        raise ValueError(
            f"rule {rule!r} is for parameters of mup_type {allowed}: got {param.mup_type!r}, of "
            f"shape {tuple(param.shape)}"
        )
    shape = param.shape[1:] if getattr(param, "mup_stacked", False) else param.shape
    if rule.startswith("sgd") and getattr(param, "mup_divisor", None):
        return _TRUE_GRADIENTS[param.mup_type](shape)
    own = getattr(param, "mup_scale", 1.0) ** _SCALE_POWERS[rule]
    return factors[param.mup_type](shape) * lr_scale_for_depth(param) * own


def kind_of(param: Any) -> Kind:
    """The kind of a parameter."""
    dimensions = len(param.shape) - getattr(param, "mup_stacked", False)
    kind: Kind = "kernel" if param.mup_type == "weight" and dimensions > 2 else param.mup_type
    return kind


def default_rate(rule: str, param: Any) -> float:
    """Returns the learning rate of a parameter without ``lr``."""
    mult = LR_MULT.get(rule, {}).get(kind_of(param), 1.0)
    return RATES[rule] * mult * lr_scale(rule, param)
