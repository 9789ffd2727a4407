"""SGD, Adam and AdamW whose learning rates follow u-muP: one ``lr`` for a model of any size.

    lr of a parameter = lr * (rule for its mup_type) / sqrt(mup_scaling_depth)

`LR_RULES` holds the rules. Parameters that end up with the same learning rate share a group, so a
model has a handful of groups, and the fused and foreach implementations of torch stay quick.

Learning-rate schedules multiply each group's own rate (LambdaLR, CosineAnnealingLR, ...). One that
sets a rate needs one per group: ``OneCycleLR(opt, max_lr=[g["lr"] for g in opt.param_groups])``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .parameter import ParameterData, has_parameter_data

__all__ = [
    "LR_RULES",
    "SGD",
    "Adam",
    "AdamW",
    "lr_scale_for_depth",
    "lr_scale_func_adam",
    "lr_scale_func_sgd",
    "scaled_parameters",
]

LrScale = Callable[[ParameterData], float]


def _fan_in(shape: torch.Size) -> int:
    """What one output sums over: all dimensions of a weight but the first."""
    return math.prod(shape[1:]) or 1


def _one(shape: torch.Size) -> float:
    return 1.0


def _inverse_sqrt_fan_in(shape: torch.Size) -> float:
    return float(_fan_in(shape) ** -0.5)


def _sqrt_fan_in(shape: torch.Size) -> float:
    return float(_fan_in(shape) ** 0.5)


def _width(shape: torch.Size) -> float:
    return float(shape[0]) if shape else 1.0


#: Optimizer -> mup_type -> (shape of the parameter) -> factor of the learning rate.
#: "adam" is u-muP's table 2 (arXiv 2407.17465); "sgd" is the same, since a unit-scaled gradient
#: has RMS 1 as an Adam update has; "sgd_to_output_scale" is for a readout whose input gradient is
#: tied to its output, and so is smaller by the square root of the width throughout the model.
LR_RULES: dict[str, dict[str, Callable[[torch.Size], float]]] = {
    "adam": {"weight": _inverse_sqrt_fan_in, "bias": _one, "norm": _one, "output": _one},
    "sgd": {"weight": _inverse_sqrt_fan_in, "bias": _one, "norm": _one, "output": _one},
    "sgd_to_output_scale": {
        "weight": _sqrt_fan_in,
        "bias": _width,
        "norm": _width,
        "output": _one,
    },
}


def lr_scale_for_depth(param: ParameterData) -> float:
    """1 / sqrt(mup_scaling_depth); 1 outside a stack of layers."""
    depth = param.mup_scaling_depth
    return 1.0 if depth is None else float(depth**-0.5)


def _lr_scale(rule: str, param: ParameterData) -> float:
    return LR_RULES[rule][param.mup_type](param.shape) * lr_scale_for_depth(param)


def lr_scale_func_adam(param: ParameterData) -> float:
    """The factor of the learning rate of a parameter under Adam and AdamW."""
    return _lr_scale("adam", param)


def lr_scale_func_sgd(readout_constraint: str | None) -> LrScale:
    """The factors under SGD, for a model whose readout has this constraint.

    readout_constraint: None or "to_output_scale"; ValueError for anything else.
    """
    rules = {None: "sgd", "to_output_scale": "sgd_to_output_scale"}
    if readout_constraint not in rules:
        raise ValueError(
            f"unknown readout_constraint {readout_constraint!r}; choose None or 'to_output_scale'"
        )
    rule = rules[readout_constraint]

    def lr_scale(param: ParameterData) -> float:
        return _lr_scale(rule, param)

    return lr_scale


def scaled_parameters(
    params: ParamsT,
    lr_scale_func: LrScale,
    lr: float | Tensor | None = None,
    weight_decay: float = 0,
    independent_weight_decay: bool = True,
    allow_non_unit_scaling_params: bool = False,
) -> list[dict[str, Any]]:
    """Parameter groups for any torch optimizer: one for each learning rate.

    params: parameters, (name, parameter) pairs or groups, as torch's optimizers take them.
    lr_scale_func: parameter -> factor. lr, weight_decay: for groups without their own.
    independent_weight_decay: divide weight_decay by the learning rate, so that the decay per step,
    lr * weight_decay in torch, does not depend on it (Wortsman et al. 2023, arXiv 2309.14322). It
    still follows the schedule. At a learning rate of 0 it is left as it is.
    allow_non_unit_scaling_params: give parameters without tags the plain lr, instead of raising
    ValueError.
    Raises ValueError for a group without a learning rate.
    """
    result = []
    for group in _as_groups(params):
        base = group.get("lr", lr)
        if base is None:
            raise ValueError("scaled_parameters needs lr=, or an 'lr' in every parameter group")
        decay = group.get("weight_decay", weight_decay)
        rest = {k: v for k, v in group.items() if k not in ("params", "lr", "weight_decay")}
        for scale, entries in _by_scale(group, lr_scale_func, allow_non_unit_scaling_params):
            rate = base if scale == 1.0 else base * scale
            divide = independent_weight_decay and float(rate) != 0.0
            result.append(
                {
                    **rest,
                    "params": entries,
                    "lr": rate.clone() if isinstance(rate, Tensor) else rate,
                    "weight_decay": decay / float(rate) if divide else decay,
                }
            )
    return result


def _as_groups(params: ParamsT) -> list[dict[str, Any]]:
    entries: list[Any] = [params] if isinstance(params, (Tensor, dict)) else list(params)
    if all(isinstance(entry, dict) for entry in entries):
        return entries
    return [{"params": entries}]


def _by_scale(
    group: dict[str, Any], lr_scale_func: LrScale, allow_untagged: bool
) -> Iterable[tuple[float, list[Any]]]:
    """The entries of a group by the factor of their learning rate, in order of appearance."""
    params = group["params"]
    found: dict[float, list[Any]] = {}
    for index, entry in enumerate([params] if isinstance(params, Tensor) else list(params)):
        name, parameter = entry if isinstance(entry, tuple) else (f"number {index}", entry)
        if has_parameter_data(parameter):
            scale = lr_scale_func(parameter)
        elif allow_untagged:
            scale = 1.0
        else:
            raise ValueError(
                f"parameter {name} of shape {tuple(parameter.shape)} has no mup_type, so its "
                "learning rate is not known: use modules of unit_scaling or "
                "unit_scaling.Parameter, or pass allow_non_unit_scaling_params=True"
            )
        found.setdefault(scale, []).append(entry)
    return found.items()


class _UnitScaled(torch.optim.Optimizer):
    """Scales every group that is added, those of the constructor included."""

    def _configure(self, lr_scale_func: LrScale, independent: bool, allow_untagged: bool) -> None:
        self._scaling = (lr_scale_func, independent, allow_untagged)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds the parameters of the group, as one group for each learning rate."""
        lr_scale_func, independent, allow_untagged = self._scaling
        groups = scaled_parameters(
            [param_group],
            lr_scale_func,
            self.defaults["lr"],
            self.defaults["weight_decay"],
            independent,
            allow_untagged,
        )
        for group in groups:
            super().add_param_group(group)


class SGD(_UnitScaled, torch.optim.SGD):
    """`torch.optim.SGD` with u-muP learning rates.

    Positional arguments are torch's. independent_weight_decay and allow_non_unit_scaling_params:
    see `scaled_parameters`. readout_constraint: see `lr_scale_func_sgd`. kwargs: torch's others.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        readout_constraint: str | None = None,
        **kwargs: Any,
    ) -> None:
        scale = lr_scale_func_sgd(readout_constraint)
        self._configure(scale, independent_weight_decay, allow_non_unit_scaling_params)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **kwargs)


class Adam(_UnitScaled, torch.optim.Adam):
    """`torch.optim.Adam` with u-muP learning rates. Arguments as in `SGD`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        **kwargs: Any,
    ) -> None:
        self._configure(lr_scale_func_adam, independent_weight_decay, allow_non_unit_scaling_params)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **kwargs)


class AdamW(_UnitScaled, torch.optim.AdamW):
    """`torch.optim.AdamW` with u-muP learning rates. Arguments as in `SGD`.

    >>> from unit_scaling import Linear
    >>> opt = AdamW(Linear(16, 4).parameters(), lr=0.5, weight_decay=0.01)
    >>> opt.param_groups[0]["lr"], opt.param_groups[0]["weight_decay"]
    (0.125, 0.08)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        **kwargs: Any,
    ) -> None:
        self._configure(lr_scale_func_adam, independent_weight_decay, allow_non_unit_scaling_params)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **kwargs)
