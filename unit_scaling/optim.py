"""SGD, Adam and AdamW with u-muP learning rates: one ``lr`` for models of any size.

    lr of a parameter = lr * (rule for its mup_type) * lr_mult / sqrt(mup_scaling_depth)

Without ``lr`` the rate is that of `RATES`. `scaled_parameters` applies a rule of `LR_RULES`, or a
function, for any torch optimizer. Parameters with equal learning rates share a group. Schedules
that set a rate need one per group: ``OneCycleLR(opt, max_lr=[g["lr"] for g in opt.param_groups])``;
equal rates in all groups at the first step raise ValueError. More is in docs/learning-rates.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fp8.common.compiler import eager_only
from fp8.common.validation import check_name, check_number
from fp8.warnings import OptimizerWarning, warn_once

from .checks.late import LateRates
from .parameter import ParameterData, has_parameter_data, tags_of
from .rules.rates import (
    LR_MULT,
    LR_RULES,
    RATES,
    UMUP,
    Kind,
    LrMult,
    lr_scale,
    lr_scale_for_depth,
    multiplier,
)

__all__ = [
    "LR_MULT",
    "LR_RULES",
    "RATES",
    "SGD",
    "UMUP",
    "Adam",
    "AdamW",
    "lr_scale_for_depth",
    "lr_scale_func_adam",
    "lr_scale_func_sgd",
    "scaled_parameters",
]

LrScale = Callable[[ParameterData], float]


def lr_scale_func_adam(param: ParameterData) -> float:
    """Returns the learning-rate factor of a parameter under Adam and AdamW."""
    return lr_scale("adam", param)


#: The constraint of a model's readout -> its rule under SGD.
_SGD_RULES = {None: "sgd", "to_output_scale": "sgd_to_output_scale"}


def lr_scale_func_sgd(readout_constraint: str | None) -> LrScale:
    """Returns a function parameter -> learning-rate factor under SGD.

    readout_constraint: that of the model's readout, None or "to_output_scale", else a ValueError.
    """
    check_name("readout_constraint", readout_constraint, _SGD_RULES)
    return partial(lr_scale, _SGD_RULES[readout_constraint])


_SET_KEYS = ("params", "lr", "weight_decay", "mup_lr_scale")


def scaled_parameters(
    params: ParamsT,
    lr_scale_func: LrScale | str,
    lr: float | Tensor | None = None,
    weight_decay: float = 0,
    independent_weight_decay: bool = True,
    allow_non_unit_scaling_params: bool = False,
    *,
    lr_mult: LrMult | None = None,
) -> list[dict[str, Any]]:
    """Returns parameter groups for any torch optimizer: one for each learning rate.

    Args:
        params: parameters, (name, parameter) pairs or groups, as for torch optimizers.
        lr_scale_func: a name in `LR_RULES`, or a function parameter -> factor that includes depth.
        lr: the learning rate of groups without their own; by default that of the rule in `RATES`.
        weight_decay: the weight decay of groups without their own.
        independent_weight_decay: divide weight_decay by the learning rate, so that the decay per
            step, lr * weight_decay in torch, does not depend on it, except through a schedule. A
            learning rate of 0 leaves it unchanged. Source: Wortsman et al. 2023, arXiv 2309.14322.
        allow_non_unit_scaling_params: use the plain lr for untagged parameters instead of raising.
        lr_mult: kind -> an additional factor of the learning rate, by default that of the rule in
            `LR_MULT`. A kind is a mup_type, "kernel" for a weight of three or more dimensions, or
            "few" for the largest factor of a weight by its fan-in.
            `UMUP` leaves u-muP's rates, those of unit-scaling 0.3.5.

    Returns:
        Groups with "params", "lr", "weight_decay", "mup_lr_scale" (the factor included in lr), and
        the other entries of the given groups.

    Raises:
        ValueError: a group has no learning rate, and the rule is a function or the parameters are
            not at their initialization; a parameter has no tags or a type that the rule does not
            cover; the rule or a kind is unknown; a factor is negative or not finite.

    >>> from unit_scaling import Linear
    >>> groups = scaled_parameters(Linear(16, 64).parameters(), "muon", lr=0.5)
    >>> torch.optim.Muon(groups).param_groups[0]["lr"]
    2.0
    """
    rule, factors = lr_scale_func, _factors(lr_scale_func, lr_mult)
    groups = _as_groups(params)
    without_lr = [_tensor(e) for g in groups if g.get("lr", lr) is None for e in g["params"]]
    default = _default_rate(rule, without_lr) if without_lr else lr
    result = []
    for group in groups:
        base: Any = group.get("lr", default)
        decay = group.get("weight_decay", weight_decay)
        check_number("lr", base)
        if independent_weight_decay:
            _warn_of_decay(float(decay))
        others = {k: v for k, v in group.items() if k not in _SET_KEYS}
        for scale, entries in _by_scale(group, factors, allow_non_unit_scaling_params):
            rate = base if scale == 1.0 else base * scale
            divide = independent_weight_decay and float(rate) != 0.0
            result.append(
                {
                    **others,
                    "params": entries,
                    "lr": rate.clone() if isinstance(rate, Tensor) else rate,
                    "weight_decay": decay / float(rate) if divide else decay,
                    "mup_lr_scale": scale,
                }
            )
    return result


HIGH_DECAY = 0.01
"""A weight decay of a step from which it is reported; AdamW of plain models has about 1e-4."""


def _warn_of_decay(decay: float) -> None:
    if decay >= HIGH_DECAY:
        warn_once(
            OptimizerWarning,
            f"weight_decay={decay:g} takes {decay:.0%} off each weight at every step, as it is not "
            f"multiplied by the learning rate here. torch's AdamW(lr=1e-3, weight_decay={decay:g}) "
            f"takes {1e-3 * decay:.1g}: pass weight_decay times the lr of the plain model",
            key=f"decay {decay}",
        )


def _default_rate(rule: LrScale | str, parameters: Sequence[Any]) -> float:
    if not isinstance(rule, str):
        raise ValueError("lr: a function has no default rate; pass lr, or an 'lr' in every group")
    is_start = any(getattr(p, "mup_divisor", None) for p in parameters)
    for p in parameters:
        if has_parameter_data(p) and (is_start or p.mup_scale == 1.0):
            continue  # in a model of init="unit" some weights keep their values
        why = "keeps its values" if has_parameter_data(p) else "has no mup_type"
        raise ValueError(
            f"lr: a parameter of shape {tuple(p.shape)} {why}, and the default rate of "
            f"{RATES[rule]:.3g} is for parameters of RMS 1 at their initialization; pass lr"
        )
    return RATES[rule]


def _entries(params: Any) -> list[Any]:
    """Parameters or (name, parameter) pairs."""
    entries = [params] if isinstance(params, Tensor) else list(params)
    for entry in map(_tensor, entries):
        if not isinstance(entry, Tensor):
            kind = type(entry).__name__
            raise TypeError(f"params must be parameters or groups of them, got a {kind}")
    return entries


def _tensor(entry: Any) -> Any:
    return entry[1] if isinstance(entry, tuple) else entry


def _factors(rule: LrScale | str, lr_mult: LrMult | None) -> LrScale:
    """The factor of a rule, times that of the parameter's kind: its default, or that of lr_mult."""
    mult: dict[Kind, float] = {}
    if callable(rule):
        scale = rule
    else:
        check_name("learning-rate rule", rule, LR_RULES)
        scale, mult = partial(lr_scale, rule), {**LR_MULT[rule]}
    for kind, factor in (lr_mult or {}).items():
        check_name("kind in lr_mult", kind, get_args(Kind))
        if not 0 <= factor < math.inf:
            raise ValueError(
                f"lr_mult must be finite and not negative, got {factor!r} for {kind!r}"
            )
        mult[kind] = factor
    return partial(_multiplied, scale, mult)


def _multiplied(scale: LrScale, mult: LrMult, param: ParameterData) -> float:
    return scale(param) * multiplier(mult, param)


def _as_groups(params: ParamsT) -> list[dict[str, Any]]:
    """Groups of parameters or (name, parameter) pairs."""
    entries: list[Any] = [params] if isinstance(params, (Tensor, dict)) else list(params)
    groups = entries if all(isinstance(e, dict) for e in entries) else [{"params": entries}]
    return [{**group, "params": _entries(group["params"])} for group in groups]


def _by_scale(
    group: dict[str, Any], lr_scale_func: LrScale, allow_untagged: bool
) -> Iterable[tuple[float, list[Any]]]:
    by_scale: dict[float, list[Any]] = {}
    for index, entry in enumerate(group["params"]):
        name, parameter = entry if isinstance(entry, tuple) else (f"number {index}", entry)
        if getattr(parameter, "_fsdp_flattened", False):
            raise ValueError(
                f"FullyShardedDataParallel has flattened parameter {name}, whose shape decides its "
                "learning rate: make the optimizer before wrapping the model with "
                "use_orig_params=True, or use fully_shard"
            )
        if has_parameter_data(parameter):
            scale = lr_scale_func(parameter)
        elif allow_untagged:
            scale = 1.0
        else:
            raise ValueError(
                f"parameter {name} of shape {tuple(parameter.shape)} has no mup_type, so its "
                "learning rate is not known: use modules of unit_scaling or "
                "unit_scaling.Parameter, unit_scaling.parameter.restore_tags(model) if it has "
                "replaced one that had, or pass allow_non_unit_scaling_params=True"
            )
        by_scale.setdefault(scale, []).append(entry)
    return by_scale.items()


_TORCHS_EPS = 1e-8
SMALL_EPS = 1e-16
"""The eps of Adam, in place of torch's default of 1e-8, for weights of `unit_scale`. Their
gradients are the true ones, which a mean over many tokens and classes makes as small as 1e-9; the
square of 1e-16 is still a normal number of float32."""


class _UnitScaled(torch.optim.Optimizer):
    """Scales every group that is added, including those of the constructor.

    numbers: further arguments of torch's optimizer, in order.
    """

    def __init__(
        self,
        rule: str,
        params: ParamsT,
        lr: float | Tensor | None,
        *numbers: Any,
        independent_weight_decay: bool,
        allow_non_unit_scaling_params: bool,
        lr_mult: LrMult | None,
        **kwargs: Any,
    ) -> None:
        self._scaled = partial(
            scaled_parameters,
            lr_scale_func=rule,
            independent_weight_decay=independent_weight_decay,
            allow_non_unit_scaling_params=allow_non_unit_scaling_params,
            lr_mult=lr_mult,
        )
        self._rates: set[float] = set()
        self._has_stepped = False
        self._late = LateRates(tags_of, _factors(rule, lr_mult))
        init: Any = super().__init__
        init(params, RATES[rule] if lr is None else lr, *numbers, **kwargs)
        if lr is None:
            _default_rate(rule, [p for group in self.param_groups for p in group["params"]])
        self.register_step_pre_hook(_before_step)
        self.register_step_post_hook(_after_step)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds the parameters of the group, as one group for each learning rate."""
        defaults = {name: self.defaults[name] for name in ("lr", "weight_decay")}
        for group in self._scaled([param_group], **defaults):
            parameters = [_tensor(entry) for entry in group["params"]]
            if group.get("eps", self.defaults.get("eps")) == _TORCHS_EPS and any(
                getattr(p, "mup_divisor", None) for p in parameters
            ):
                group["eps"] = SMALL_EPS
            super().add_param_group(group)
            self._rates.add(float(group["lr"]))
            self._late.add(parameters)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch. Raises ValueError for a state_dict of another optimizer, such as torch's and
        those of unit-scaling 0.3.5, whose groups are others."""
        if not all("mup_lr_scale" in group for group in state_dict["param_groups"]):
            raise ValueError("the state_dict is not of an optimizer of unit_scaling.optim")
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        names = ("_scaled", "_rates", "_has_stepped", "_late")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}


_FLAT = (
    "all {} parameter groups have learning rate {:.4g}, and u-muP gave them different ones: a "
    "schedule or a loop has set one for all. Give a schedule one per group, as in OneCycleLR(opt, "
    "max_lr=[g['lr'] for g in opt.param_groups]); in a loop, multiply by group['mup_lr_scale']"
)


@eager_only()
def _after_step(opt: Any, args: Any, kwargs: Any) -> None:
    opt._late.after_step()


@eager_only()
def _before_step(opt: Any, args: Any, kwargs: Any) -> None:
    """Raises ValueError for equal rates before the first step with a nonzero rate; warns later, as
    a schedule may end in one rate. Tensors, whose values may be on a device, are not read then."""
    opt._late.before_step(opt)
    groups = opt.param_groups
    if len(opt._rates) < 2 or (opt._has_stepped and isinstance(groups[0]["lr"], Tensor)):
        return
    rates = {float(group["lr"]) for group in groups}
    if len(rates) == 1 and rates != {0.0}:
        message = _FLAT.format(len(groups), *rates)
        if not opt._has_stepped:
            raise ValueError(message)
        warn_once(OptimizerWarning, message, about=opt, key="flat")
    opt._has_stepped = opt._has_stepped or rates != {0.0}


class SGD(_UnitScaled, torch.optim.SGD):
    """`torch.optim.SGD` with u-muP learning rates.

    Arguments are those of torch, of `scaled_parameters`, and the ``readout_constraint`` of
    `lr_scale_func_sgd`. For weights of `unit_scaling.transforms.unit_scale`, whose gradients are
    true ones, the factor of lr is 5 times the fan-in.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        lr_mult: LrMult | None = None,
        readout_constraint: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_name("readout_constraint", readout_constraint, _SGD_RULES)
        numbers = (momentum, dampening, weight_decay, nesterov)
        super().__init__(
            _SGD_RULES[readout_constraint],
            params,
            lr,
            *numbers,
            independent_weight_decay=independent_weight_decay,
            allow_non_unit_scaling_params=allow_non_unit_scaling_params,
            lr_mult=lr_mult,
            **kwargs,
        )


class Adam(_UnitScaled, torch.optim.Adam):
    """`torch.optim.Adam` with u-muP learning rates; arguments are as in `SGD`.

    The default of ``eps`` is `SMALL_EPS` for groups with weights of
    `unit_scaling.transforms.unit_scale`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        lr_mult: LrMult | None = None,
        **kwargs: Any,
    ) -> None:
        numbers = (betas, eps, weight_decay, amsgrad)
        super().__init__(
            "adam",
            params,
            lr,
            *numbers,
            independent_weight_decay=independent_weight_decay,
            allow_non_unit_scaling_params=allow_non_unit_scaling_params,
            lr_mult=lr_mult,
            **kwargs,
        )


class AdamW(Adam, torch.optim.AdamW):
    """`torch.optim.AdamW` with u-muP learning rates; arguments are as in `Adam`.

    >>> from unit_scaling import Linear
    >>> opt = AdamW(Linear(16, 4).parameters(), weight_decay=1e-3)
    >>> opt.param_groups[0]["lr"], opt.param_groups[0]["weight_decay"]
    (0.125, 0.008)
    """
