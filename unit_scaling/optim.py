"""SGD, Adam and AdamW with u-muP learning rates: one ``lr`` for models of any size.

    lr of a parameter = lr * (rule for its mup_type) / sqrt(mup_scaling_depth)

A weight w of `unit_scale(init="preserve")` has its own scale f = mup_scale. Its relative steps are
those of u = w / f, which has RMS about 1. Updates of Adam and Muon do not depend on the size of the
gradient, so lr is multiplied by f. An update of SGD is the gradient, which for u is f times that
for w, so lr is multiplied by f**2.

`LR_RULES` holds the rules. `scaled_parameters` applies a rule, or a function, for any torch
optimizer. Parameters with equal learning rates share a group, so a model has few groups and the
fused and foreach implementations of torch stay fast.

Schedules that set a rate need one per group: ``OneCycleLR(opt, max_lr=[g["lr"] for g in
opt.param_groups])``. Equal rates in all groups at the first step raise ValueError. More is in
docs/learning-rates.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fp8.common.compiler import eager_only
from fp8.common.pitfalls import OptimizerWarning, warn_once
from fp8.common.validation import check_name, check_number

from .parameter import MupType, ParameterData, has_parameter_data

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
LrMult = Mapping[MupType, float]


def _fan_in(shape: torch.Size) -> int:
    """The number of terms in an output's sum: all dimensions but the first; all of a vector. For an
    embedding the width, u-muP's fan-out (table 2); for transposed weights another such width."""
    return math.prod(shape[1:] if len(shape) > 1 else shape) or 1


def _one(shape: torch.Size) -> float:
    return 1.0


def _width(shape: torch.Size) -> float:
    return float(shape[0]) if shape else 1.0


_LrRule = dict[str, Callable[[torch.Size], float]]

_ADAM: _LrRule = {
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
LR_RULES: dict[str, _LrRule] = {
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


def lr_scale_for_depth(param: ParameterData) -> float:
    """Returns 1 / sqrt(mup_scaling_depth); 1 outside a stack of layers."""
    depth = param.mup_scaling_depth
    return 1.0 if depth is None else float(depth**-0.5)


#: Rule -> exponent of mup_scale in the learning rate.
_SCALE_POWERS = {"adam": 1, "sgd": 2, "sgd_to_output_scale": 2, "muon": 1}


def _lr_scale(rule: str, param: ParameterData) -> float:
    factors = LR_RULES[rule]
    if param.mup_type not in factors:
        allowed = ", ".join(map(repr, factors))
        raise ValueError(
            f"rule {rule!r} is for parameters of mup_type {allowed}: got {param.mup_type!r}, of "
            f"shape {tuple(param.shape)}"
        )
    own = getattr(param, "mup_scale", 1.0) ** _SCALE_POWERS[rule]
    shape = param.shape[1:] if getattr(param, "mup_stacked", False) else param.shape
    return factors[param.mup_type](shape) * lr_scale_for_depth(param) * own


def _as_function(rule: LrScale | str) -> LrScale:
    if not (callable(rule) or isinstance(rule, str)):
        raise TypeError(f"a learning-rate rule must be a name or a function, got {rule!r}")
    if callable(rule):
        return rule
    check_name("learning-rate rule", rule, LR_RULES)
    return partial(_lr_scale, rule)


def lr_scale_func_adam(param: ParameterData) -> float:
    """Returns the learning-rate factor of a parameter under Adam and AdamW."""
    return _lr_scale("adam", param)


#: The constraint of a model's readout -> its rule under SGD.
_SGD_RULES = {None: "sgd", "to_output_scale": "sgd_to_output_scale"}


def lr_scale_func_sgd(readout_constraint: str | None) -> LrScale:
    """Returns a function parameter -> learning-rate factor under SGD.

    Args:
        readout_constraint: the constraint of the model's readout: None or "to_output_scale".

    Raises:
        ValueError: ``readout_constraint`` is anything else.
    """
    check_name("readout_constraint", readout_constraint, _SGD_RULES)
    return _as_function(_SGD_RULES[readout_constraint])


_OWN_KEYS = ("params", "lr", "weight_decay", "mup_lr_scale")


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
        lr_scale_func: the name of a rule in `LR_RULES`, or a function parameter -> factor, which
            must include depth.
        lr: the learning rate of groups without their own.
        weight_decay: the weight decay of groups without their own.
        independent_weight_decay: divide weight_decay by the learning rate, so that the decay per
            step, lr * weight_decay in torch, does not depend on it, except through a schedule. A
            learning rate of 0 leaves it unchanged. Source: Wortsman et al. 2023, arXiv 2309.14322.
        allow_non_unit_scaling_params: use the plain lr for untagged parameters instead of raising.
        lr_mult: mup_type -> an additional factor of the learning rate; 1 for other types.
            ``{"norm": 1 / 32}`` suits gains, whose rate is otherwise the full ``lr``.

    Returns:
        Groups with "params", "lr", "weight_decay", "mup_lr_scale" (the factor included in lr), and
        the other entries of the given groups.

    Raises:
        ValueError: a group has no learning rate, a parameter has no tags or a type that the rule
            does not cover, the rule is unknown, or ``lr_mult`` has an unknown type or a factor that
            is negative or not finite.

    >>> from unit_scaling import Linear
    >>> groups = scaled_parameters(Linear(16, 64).parameters(), "muon", lr=0.5)
    >>> torch.optim.Muon(groups).param_groups[0]["lr"]
    2.0
    """
    lr_scale_func = _multiplied(_as_function(lr_scale_func), lr_mult)
    result = []
    for group in _as_groups(params):
        base = group.get("lr", lr)
        if base is None:
            raise ValueError("scaled_parameters needs lr=, or an 'lr' in every parameter group")
        decay = group.get("weight_decay", weight_decay)
        check_number("lr", base)
        check_number("weight_decay", decay)
        rest = {k: v for k, v in group.items() if k not in _OWN_KEYS}
        for scale, entries in _by_scale(group, lr_scale_func, allow_non_unit_scaling_params):
            rate = base if scale == 1.0 else base * scale
            divide = independent_weight_decay and float(rate) != 0.0
            result.append(
                {
                    **rest,
                    "params": entries,
                    "lr": rate.clone() if isinstance(rate, Tensor) else rate,
                    "weight_decay": decay / float(rate) if divide else decay,
                    "mup_lr_scale": scale,
                }
            )
    return result


def _multiplied(lr_scale_func: LrScale, lr_mult: LrMult | None) -> LrScale:
    """The function times the factor of the parameter's mup_type."""
    if not lr_mult:
        return lr_scale_func
    for kind, factor in lr_mult.items():
        check_name("mup_type in lr_mult", kind, get_args(MupType))
        if not 0 <= factor < math.inf:
            raise ValueError(
                f"lr_mult must be finite and not negative, got {factor!r} for {kind!r}"
            )
    return lambda param: lr_scale_func(param) * lr_mult.get(param.mup_type, 1.0)


def _as_groups(params: ParamsT) -> list[dict[str, Any]]:
    if not isinstance(params, Iterable):
        raise TypeError(f"params must be parameters or groups of them, got {params!r}")
    entries: list[Any] = [params] if isinstance(params, (Tensor, dict)) else list(params)
    if all(isinstance(entry, dict) for entry in entries):
        return entries
    return [{"params": entries}]


def _by_scale(
    group: dict[str, Any], lr_scale_func: LrScale, allow_untagged: bool
) -> Iterable[tuple[float, list[Any]]]:
    """The entries of a group by their learning-rate factor, in order of appearance."""
    params = group["params"]
    found: dict[float, list[Any]] = {}
    for index, entry in enumerate([params] if isinstance(params, Tensor) else list(params)):
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
        found.setdefault(scale, []).append(entry)
    return found.items()


_TORCHS_EPS = 1e-8

SMALL_EPS = 1e-16
"""The eps of Adam, in place of torch's default of 1e-8, for weights of `unit_scale`. Their
gradients are the true ones, which a mean over many tokens and classes makes as small as 1e-9; the
square of 1e-16 is still a normal number of float32."""


def _is_scaled(group: dict[str, Any]) -> bool:
    """Whether `unit_scale` divided one of the parameters by its RMS."""
    entries = group["params"]
    parameters = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    return any(getattr(p, "mup_divisor", None) for p in parameters)


class _UnitScaled(torch.optim.Optimizer):
    """Scales every group that is added, including those of the constructor."""

    def __init__(
        self,
        scaling: tuple[LrScale | str, bool, bool],
        lr_mult: LrMult | None,
        params: ParamsT,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._scaling = scaling  # the rule, independent_weight_decay, allow_non_unit_scaling_params
        self._lr_mult = None if lr_mult is None else dict(lr_mult)
        self._rates: set[float] = set()
        self._begun = False
        self._given: list[Tensor] = []
        torchs: Any = super().__init__
        torchs(params, *args, **kwargs)
        self.register_step_pre_hook(_refuse_flat_rates)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds the parameters of the group, as one group for each learning rate."""
        rule, independent, allow_untagged = self._scaling
        params = param_group["params"]
        entries = [params] if isinstance(params, Tensor) else list(params)
        groups = scaled_parameters(
            [{**param_group, "params": entries}],
            rule,
            self.defaults["lr"],
            self.defaults["weight_decay"],
            independent,
            allow_untagged,
            lr_mult=self._lr_mult,
        )
        for group in groups:
            if group.get("eps", self.defaults.get("eps")) == _TORCHS_EPS and _is_scaled(group):
                group["eps"] = SMALL_EPS
            super().add_param_group(group)
            self._rates.add(float(group["lr"]))
        self._given += [entry[1] if isinstance(entry, tuple) else entry for entry in entries]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; also loads the state_dict of an optimizer with other parameter groups.

        States are assigned in the order in which both optimizers received their parameters. Groups
        of unit-scaling 0.3.5, one for each parameter, keep their learning rates and other settings.
        Of a torch optimizer only the states are loaded, as it has no u-muP rates; this optimizer
        keeps its settings. ``mup_lr_scale`` is kept in both cases.

        Raises:
            ValueError: the number of parameters or the shape of a state differs, or parameters of
                one group have different settings.
        """
        super().load_state_dict(_grouped_as(self, state_dict))

    def __getstate__(self) -> dict[str, Any]:
        own = ("_scaling", "_lr_mult", "_rates", "_begun", "_given")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}


def _grouped_as(opt: _UnitScaled, state_dict: dict[str, Any]) -> dict[str, Any]:
    """``state_dict`` in the groups of ``opt``; unchanged if its groups already are."""
    groups = state_dict["param_groups"]
    if all("mup_lr_scale" in group for group in groups):
        return state_dict
    saved = [(index, group) for group in groups for index in group["params"]]
    if len(saved) != len(opt._given):
        raise ValueError(
            f"the state_dict is of {len(saved)} parameters, this optimizer has {len(opt._given)}"
        )
    for number, (parameter, (index, _)) in enumerate(zip(opt._given, saved, strict=True)):
        for name, value in state_dict["state"].get(index, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                raise ValueError(
                    f"{name} of parameter number {number} has shape {tuple(value.shape)}, the "
                    f"parameter {tuple(parameter.shape)}: give the parameters in the same order"
                )
    of = {id(parameter): entry for parameter, entry in zip(opt._given, saved, strict=True)}
    scaled = _has_own_rates(opt, groups)
    result = []
    for number, own in enumerate(opt.param_groups):
        members = [of[id(parameter)] for parameter in own["params"]]
        settings = _common([group for _, group in members], number) if scaled else {}
        result.append({**own, **settings, "params": [index for index, _ in members]})
    return {**state_dict, "param_groups": result}


def _has_own_rates(opt: _UnitScaled, groups: list[dict[str, Any]]) -> bool:
    """Whether each parameter has its own rate, as in unit-scaling 0.3.5."""
    rates, here = ({float(g["lr"]) for g in found} for found in (groups, opt.param_groups))
    flat = len(rates) == 1 and len(here) > 1
    return not flat and all(len(group["params"]) == 1 for group in groups)


def _common(groups: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """The settings that ``groups`` have in common; rates may differ by rounding."""
    first = {key: value for key, value in groups[0].items() if key not in ("params", "param_names")}
    for key, value in first.items():
        for other in (group.get(key) for group in groups[1:]):
            if isinstance(value, float | Tensor) and isinstance(other, float | Tensor):
                same = math.isclose(value, other, rel_tol=1e-6)
            else:
                same = value == other
            if not same:
                raise ValueError(
                    f"parameters of group {number} have {key} {value} and {other} in the state_dict"
                )
    return first


_FLAT = (
    "all {} parameter groups have learning rate {:.4g}, and u-muP gave them different ones: a "
    "schedule or a loop has set one for all. Give a schedule one per group, as in OneCycleLR(opt, "
    "max_lr=[g['lr'] for g in opt.param_groups]); in a loop, multiply by group['mup_lr_scale']"
)


@eager_only()
def _refuse_flat_rates(opt: Any, args: Any, kwargs: Any) -> None:
    """Raises ValueError for equal rates before the first step with a nonzero rate; warns later, as
    a schedule may end in one rate. Tensors, whose values may be on a device, are not read then."""
    groups = opt.param_groups
    if len(opt._rates) < 2 or (opt._begun and isinstance(groups[0]["lr"], Tensor)):
        return
    rates = {float(group["lr"]) for group in groups}
    flat = len(rates) == 1 and rates != {0.0}
    if flat and not opt._begun:
        raise ValueError(_FLAT.format(len(groups), *rates))
    if flat:
        warn_once(OptimizerWarning, _FLAT.format(len(groups), *rates), about=opt, key="flat")
    opt._begun = opt._begun or rates != {0.0}


class SGD(_UnitScaled, torch.optim.SGD):
    """`torch.optim.SGD` with u-muP learning rates. Other arguments are those of torch.

    Args:
        params: as in `scaled_parameters`.
        weight_decay: as in `scaled_parameters`.
        independent_weight_decay: see `scaled_parameters`.
        allow_non_unit_scaling_params: see `scaled_parameters`.
        lr_mult: see `scaled_parameters`.
        readout_constraint: see `lr_scale_func_sgd`.
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
        lr_mult: LrMult | None = None,
        readout_constraint: str | None = None,
        **kwargs: Any,
    ) -> None:
        for name, number in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            check_number(name, number)
        rule = lr_scale_func_sgd(readout_constraint)
        scaling = (rule, independent_weight_decay, allow_non_unit_scaling_params)
        numbers = (lr, momentum, dampening, weight_decay)
        super().__init__(scaling, lr_mult, params, *numbers, nesterov, **kwargs)


class Adam(_UnitScaled, torch.optim.Adam):
    """`torch.optim.Adam` with u-muP learning rates.

    Positional arguments are those of torch; see `SGD` for the others. The default of ``eps`` is
    `SMALL_EPS` for groups with weights of `unit_scaling.transforms.unit_scale`.
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
        lr_mult: LrMult | None = None,
        **kwargs: Any,
    ) -> None:
        for name, number in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            check_number(name, number)
        scaling = ("adam", independent_weight_decay, allow_non_unit_scaling_params)
        super().__init__(scaling, lr_mult, params, lr, betas, eps, weight_decay, amsgrad, **kwargs)


class AdamW(Adam, torch.optim.AdamW):
    """`torch.optim.AdamW` with u-muP learning rates.

    Positional arguments are those of torch; see `SGD` for the others.

    >>> from unit_scaling import Linear
    >>> opt = AdamW(Linear(16, 4).parameters(), lr=0.5, weight_decay=0.01)
    >>> opt.param_groups[0]["lr"], opt.param_groups[0]["weight_decay"]
    (0.125, 0.08)
    """
