"""SGD, Adam and AdamW with u-muP learning rates: one ``lr`` for models of any size.

    lr of a parameter = lr * (rule for its mup_type) * lr_mult / sqrt(mup_scaling_depth)

Without ``lr`` the rate is in `RATES`. `scaled_parameters` applies a rule of `LR_RULES`, or a
function, in groups for any torch optimizer. The optimizers here keep the user's groups, whose lr is
the one above, and read the tags in each step. More is in docs/learning-rates.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fp8.common.validation import check_name, check_number
from fp8.torch_internals.decorators import untraced
from fp8.warnings import OptimizerWarning, warn_once

from .common.calls import Args, Function, Kwargs
from .parameter import ParameterData, Tags, has_parameter_data
from .rules.rates import (
    LR_MULT,
    LR_RULES,
    RATES,
    UMUP,
    Kind,
    LrMult,
    eps_scale,
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
Group = dict[str, Any]


def lr_scale_func_adam(param: ParameterData) -> float:
    """Returns the learning-rate factor of a parameter under Adam and AdamW."""
    return lr_scale("adam", param)


#: The constraint of a model's readout -> its rule under SGD.
_SGD_RULES = {None: "sgd", "to_output_scale": "sgd_to_output_scale"}


def lr_scale_func_sgd(readout_constraint: str | None) -> LrScale:
    """Returns a function parameter -> learning-rate factor under SGD.

    readout_constraint: the constraint of the readout, None or "to_output_scale", else a ValueError.
    """
    check_name("readout_constraint", readout_constraint, _SGD_RULES)
    return partial(lr_scale, _SGD_RULES[readout_constraint])


def scaled_parameters(
    params: ParamsT,
    lr_scale_func: LrScale | str,
    lr: float | Tensor | None = None,
    weight_decay: float = 0,
    independent_weight_decay: bool = True,
    allow_non_unit_scaling_params: bool = False,
    *,
    lr_mult: LrMult | None = None,
) -> list[Group]:
    """Returns parameter groups for any torch optimizer: one for each learning rate.

    Args:
        params: parameters, (name, parameter) pairs or groups, as for torch optimizers.
        lr_scale_func: a name in `LR_RULES`, or a function parameter -> factor that includes depth.
        lr: the learning rate of groups without their own; by default the rule's in `RATES`.
        weight_decay: the weight decay of groups without their own.
        independent_weight_decay: divide weight_decay by the learning rate, so that the decay per
            step, lr * weight_decay in torch, does not depend on it, except through a schedule. A
            learning rate of 0 leaves it unchanged. Source: Wortsman et al. 2023, arXiv 2309.14322.
        allow_non_unit_scaling_params: use the plain lr for untagged parameters instead of raising.
        lr_mult: kind -> an additional factor of the learning rate, by default the factor of the
            rule in `LR_MULT`. A kind is a mup_type, "kernel" for a convolution over space, or
            "few" for the largest factor of a weight by its fan-in.
            `UMUP` leaves u-muP's rates, as in unit-scaling 0.3.5.

    Returns:
        Groups with "params", "lr", "weight_decay", "mup_lr_scale" (the factor included in lr), and
        the other entries of the given groups.

    Raises:
        ValueError: a group has no learning rate, and the rule is a function or the parameters are
            not at their initialization; a parameter has no tags or a type that the rule does not
            cover, or `unit_scale` has not set its values; the rule or a kind is unknown; a factor
            is negative or not finite.

    >>> from unit_scaling import Linear
    >>> groups = scaled_parameters(Linear(16, 64).parameters(), "muon", lr=0.5)
    >>> torch.optim.Muon(groups).param_groups[0]["lr"]
    2.0
    """
    factors = _factors(lr_scale_func, lr_mult)
    groups = _as_groups(params)
    without_lr = []
    for group in groups:
        parameters = [_tensor(entry) for entry in group["params"]]
        if any(map(_is_pending, parameters)):
            raise ValueError(f"scaled_parameters: {_PENDING}")
        if group.get("lr", lr) is None:
            without_lr += parameters
    default = lr
    if without_lr:
        default = _default_rate(lr_scale_func, without_lr)
    result = []
    for group in groups:
        base: Any = group.setdefault("lr", default)
        decay = group.setdefault("weight_decay", weight_decay)
        check_number("lr", base)
        if independent_weight_decay:
            _warn_of_decay(float(decay))
        for scale, entries in _by_scale(group, factors, allow_non_unit_scaling_params):
            new = {**group, "params": entries, "mup_lr_scale": scale}
            rate = new["lr"] = base * scale
            # torch multiplies by lr: the decay of a step is weight_decay (arXiv 2309.14322).
            if independent_weight_decay and float(rate) != 0.0:
                new["weight_decay"] = decay / float(rate)
            result.append(new)
    return result


_PENDING = (
    "unit_scale(model) has not set the values of these parameters, and their learning rates follow "
    "from these: the model must run once as a whole before, or pass batch= to unit_scale"
)


def _is_pending(parameter: Any) -> bool:
    return bool(getattr(parameter, "mup_pending", False))


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
        raise ValueError(
            "lr: a function has no default rate; pass lr, or an 'lr' in every group"
        )
    is_start = any(getattr(p, "mup_divisor", None) for p in parameters)
    for p in parameters:
        why = "has no mup_type"
        if has_parameter_data(p):
            if is_start or p.mup_scale == 1.0:
                continue  # in a model of unit_scale some weights keep their values
            why = "keeps its values"
        raise ValueError(
            f"lr: a parameter of shape {tuple(p.shape)} {why}, and the default rate of "
            f"{RATES[rule]:.3g} is for parameters of RMS 1 at their initialization; pass lr"
        )
    return RATES[rule]


def _tensor(entry: Any) -> Any:
    """The parameter, also of a (name, parameter) pair. Raises TypeError for anything else."""
    parameter = entry[1] if isinstance(entry, tuple) else entry
    if not isinstance(parameter, Tensor):
        kind = type(parameter).__name__
        raise TypeError(f"params must be parameters or groups of them, got a {kind}")
    return parameter


def _factors(rule: LrScale | str, lr_mult: LrMult | None) -> LrScale:
    """The factor of a rule, times the factor of the parameter's kind: its default, or the one in
    lr_mult."""
    scale = rule
    mult = lr_mult or {}
    if not callable(scale):
        check_name("learning-rate rule", scale, LR_RULES)
        mult = {**LR_MULT[scale], **mult}
        scale = partial(lr_scale, scale)
    for kind, factor in mult.items():
        check_name("kind in lr_mult", kind, get_args(Kind))
        if not 0 <= factor < math.inf:
            raise ValueError(
                f"lr_mult must be finite and not negative, got {factor!r} for {kind!r}"
            )
    return partial(_multiplied, scale, mult)


def _multiplied(scale: LrScale, mult: LrMult, param: ParameterData) -> float:
    return scale(param) * multiplier(mult, param)


def _as_list(params: Any) -> list[Any]:
    if isinstance(params, (Tensor, dict)):
        return [params]
    return list(params)


def _as_groups(params: ParamsT) -> list[Group]:
    """Groups of parameters or (name, parameter) pairs."""
    groups = _as_list(params)
    if not all(isinstance(group, dict) for group in groups):
        groups = [{"params": groups}]
    return [{**group, "params": _as_list(group["params"])} for group in groups]


def _by_scale(
    group: Group, lr_scale_func: LrScale, allow_untagged: bool
) -> Iterable[tuple[float, list[Any]]]:
    by_scale: dict[float, list[Any]] = {}
    for index, entry in enumerate(group["params"]):
        name = entry[0] if isinstance(entry, tuple) else f"number {index}"
        scale = _scale_of(name, _tensor(entry), lr_scale_func, allow_untagged)
        by_scale.setdefault(scale, []).append(entry)
    return by_scale.items()


def _scale_of(
    name: str,
    parameter: Any,
    lr_scale_func: LrScale,
    allow_untagged: bool,
    known: float = math.nan,
) -> float:
    """known: the factor that is on record, for a parameter whose tags or shape are gone; NaN if
    there is none."""
    flattened = getattr(parameter, "_fsdp_flattened", False)
    if has_parameter_data(parameter) and not flattened:
        return lr_scale_func(parameter)
    if not math.isnan(known):
        return known
    if flattened:
        raise ValueError(
            f"FullyShardedDataParallel has flattened parameter {name}, whose shape decides its "
            "learning rate: make the optimizer before wrapping the model with "
            "use_orig_params=True, or use fully_shard"
        )
    if allow_untagged:
        return 1.0
    raise ValueError(
        f"parameter {name} of shape {tuple(parameter.shape)} has no mup_type, so its "
        "learning rate is not known: use modules of unit_scaling or "
        "unit_scaling.Parameter, unit_scaling.parameter.restore_tags(model) if it has "
        "replaced one that had, or pass allow_non_unit_scaling_params=True"
    )


_LR_SCALES, _EPS_SCALES, _DECAY_LR = "mup_lr_scales", "mup_eps_scales", "mup_decay_lr"
"""Entries of a group: the factors of lr and of eps of each parameter, and the lr at which a step
decays by weight_decay, or None for torch's decay. Checkpoints of all forms take lists of numbers.
"""

_OWN = set("params param_names lr eps weight_decay".split())
_OWN |= {_LR_SCALES, _EPS_SCALES, _DECAY_LR}


class _Key(NamedTuple):
    """What the split of a group depends on. ids: the ids of the parameters. tags: the fields of
    each."""

    ids: list[int]
    tags: list[Args]
    eps: float | None


def _unchanged(before: _Split | None, key: _Key) -> set[int]:
    """The indices of the parameters whose tags are those before, or were pending then."""
    if before is None or before.key.ids != key.ids:
        return set(range(len(key.ids)))
    pending = Tags._fields.index("mup_pending")
    pairs = zip(before.key.tags, key.tags, strict=True)
    return {i for i, (old, new) in enumerate(pairs) if old == new or old[pending]}


class _Split(NamedTuple):
    """A group of the user, what its split depends on, and the groups that torch steps: one for each
    rate and eps."""

    given: Group
    key: _Key
    parts: list[Group]

    def set_numbers(self) -> None:
        """Gives the parts the entries that the user's group has now."""
        given = self.given
        shared = {name: value for name, value in given.items() if name not in _OWN}
        decay_lr = given.get(_DECAY_LR) or 0.0
        for part in self.parts:
            lr_scale = part["mup_lr_scale"]
            part.update(shared, lr=_times(given["lr"], lr_scale, part.get("lr")))
            # torch multiplies the decay by the rate of the part.
            part["weight_decay"] = given["weight_decay"] / (decay_lr * lr_scale or 1.0)
            if "eps" in given:
                part["eps"] = given["eps"] * part["mup_eps_scale"]

    def keep_what_is_set(self) -> None:
        """Gives the user's group what a step has set, as ``skipped_steps`` of `fp8.optim`."""
        for name in self.given.keys() - _OWN:
            self.given[name] = self.parts[0][name]


def _times(
    lr: float | Tensor, scale: float, previous: float | Tensor | None
) -> float | Tensor:
    """A tensor keeps its memory, which is a constant of a CUDA graph and of a compiled step."""
    if scale == 1.0:
        return lr
    if not isinstance(lr, Tensor) or lr.requires_grad:
        return lr * scale
    if isinstance(previous, Tensor) and previous.device == lr.device:
        return torch.mul(lr, scale, out=previous)
    return lr * scale


class _Settings(NamedTuple):
    """What the optimizers take besides the arguments of torch's."""

    lr_scale: LrScale
    independent_decay: bool
    allow_untagged: bool


class _UnitScaled(torch.optim.Optimizer):
    """Steps each parameter at the rate of its tags, which are read in each step.

    ``param_groups`` are the user's. A step replaces them by groups of one rate each.
    numbers: further arguments of torch's optimizer, in order.
    """

    def __init__(
        self,
        rule: str,
        params: ParamsT,
        lr: float | Tensor | None,
        *numbers: Any,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        lr_mult: LrMult | None = None,
        **kwargs: Any,
    ):
        self._settings = _Settings(
            _factors(rule, lr_mult),
            independent_weight_decay,
            allow_non_unit_scaling_params,
        )
        self._splits: list[_Split] = []
        # The indices of groups with the factors of a state_dict.
        self._loaded = set[int]()
        init: Any = super().__init__
        init(params, RATES[rule] if lr is None else lr, *numbers, **kwargs)
        if lr is None:
            params = [p for group in self.param_groups for p in group["params"]]
            _default_rate(rule, params)

    def add_param_group(self, param_group: Group) -> None:
        """Adds a parameter group, as in torch.optim.

        Raises ValueError for a parameter whose learning rate is not known.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if "mup_lr_scale" in group:
                raise ValueError(
                    "groups of scaled_parameters are for optimizers of other packages"
                )
            check_number("lr", group["lr"])
            if self._settings.independent_decay:
                _warn_of_decay(float(group["weight_decay"]))
                group.setdefault(_DECAY_LR, float(group["lr"]) or None)
            self._update_splits()
        except (TypeError, ValueError):
            # torch has added it already.
            del self.param_groups[-1]
            raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs a step, as in torch.optim. The closure is called first, with the groups of the
        user."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        given = self._replace_groups()
        try:
            _next_step(type(self))(self)
        finally:
            self._restore_groups(given)
        return loss

    step.calls_the_next = True  # type: ignore[attr-defined]  # for `fp8.initialize`

    @untraced
    def _replace_groups(self) -> Any:
        given = self.param_groups
        for group in given:
            if any(_is_pending(p) and p.grad is not None for p in group["params"]):
                raise RuntimeError(f"step: {_PENDING}")
        self._update_splits()
        self.param_groups = [part for split in self._splits for part in split.parts]
        return given

    @untraced
    def _restore_groups(self, given: Any) -> None:
        self.param_groups = given
        for split in self._splits:
            split.keep_what_is_set()

    def _update_splits(self) -> None:
        """Splits the groups whose parameters, tags or eps have changed, and sets all numbers."""
        before = {id(split.given): split for split in self._splits}
        self._splits = []
        for index, group in enumerate(self.param_groups):
            params = group["params"]
            # Parameters are alive as long as their parts: an id belongs to one parameter.
            # `tags_of` is slow.
            tags = [tuple(map(vars(p).get, Tags._fields)) for p in params]
            key = _Key(list(map(id, params)), tags, group.get("eps"))
            split = before.get(id(group))
            if split is None or split.key != key:
                kept = _unchanged(split, key) if index in self._loaded else set[int]()
                is_new_eps = split is not None and split.key.eps != key.eps
                parts = self._parts_of(group, kept, is_new_eps)
                split = _Split(group, key, parts)
            split.set_numbers()
            self._splits.append(split)

    def _parts_of(
        self, group: Group, kept: set[int], is_new_eps: bool
    ) -> list[dict[str, Any]]:
        """Records the factors of each parameter in the group. Untagged parameters, and parameters
        in ``kept``, keep theirs. is_new_eps: the user has changed the eps of the group."""
        count = len(group["params"])
        names = group.get("param_names") or [f"number {i}" for i in range(count)]
        lr_scales = group.get(_LR_SCALES, [])
        eps_scales = group.get(_EPS_SCALES, [1.0] * count)
        allow_untagged = self._settings.allow_untagged
        if len(lr_scales) != count:
            # DeepSpeed flattens all parameters of a group into one: no rate is known.
            allow_untagged = allow_untagged and not lr_scales
            lr_scales = [math.nan] * count
            eps_scales = [1.0] * count
            kept = set()
        parts: dict[tuple[float, float], Group] = {}
        records: list[tuple[float, float]] = []
        for i, p in enumerate(group["params"]):
            lr = known = lr_scales[i]
            eps = eps_scales[i]
            is_decided = i in kept and not math.isnan(known)
            if not is_decided:
                scale = self._settings.lr_scale
                lr = _scale_of(names[i], p, scale, allow_untagged, known)
                # A factor that `unit_scale` has yet to decide on is none for who loads it.
                known = math.nan if _is_pending(p) else lr
            if has_parameter_data(p) and (is_new_eps or not is_decided):
                eps = eps_scale(p, group.get("eps"))
            records.append((known, eps))
            parts.setdefault((lr, eps), _part(lr, eps))["params"].append(p)
        group[_LR_SCALES] = [lr for lr, _ in records]
        if "eps" in group:
            group[_EPS_SCALES] = [eps for _, eps in records]
        return list(parts.values()) or [_part(1.0, 1.0)]

    def state_dict(self) -> Group:
        """Returns the state, as in torch.optim. Each group has the factors of lr and eps of its
        parameters."""
        self._update_splits()
        return super().state_dict()

    def load_state_dict(self, state_dict: Group) -> None:
        """Loads a state_dict. The saved factors of a parameter hold until its tags change.

        Raises ValueError for a state_dict of another optimizer, such as torch's or one of
        unit-scaling 0.3.5, whose lr and weight_decay have another meaning.
        """
        if not all(_LR_SCALES in group for group in state_dict["param_groups"]):
            raise ValueError(
                "the state_dict is not of an optimizer of unit_scaling.optim"
            )
        super().load_state_dict(state_dict)
        self._loaded = set(range(len(self.param_groups)))

    def __repr__(self) -> str:
        """Returns the text of torch.optim, with the range of the factors instead of their list."""
        self._update_splits()
        shown: Any = object.__new__(type(self))
        shown.param_groups = [{**group} for group in self.param_groups]
        for group in shown.param_groups:
            for key in group.keys() & {_LR_SCALES, _EPS_SCALES}:
                low = min(group[key], default=1.0)
                high = max(group[key], default=1.0)
                is_known = not any(map(math.isnan, group[key]))
                group[key] = (
                    f"{low:.4g} to {high:.4g}" if is_known else "set by the first call"
                )
        text: str = super(_UnitScaled, shown).__repr__()
        return text

    def __getstate__(self) -> Kwargs:
        own = {"_settings": self._settings, "_splits": [], "_loaded": self._loaded}
        return {**super().__getstate__(), **own}


def _part(lr: float, eps: float) -> Group:
    return {"params": [], "mup_lr_scale": lr, "mup_eps_scale": eps}


def _next_step(cls: type) -> Function:
    """The step of the class after `_UnitScaled`, without the hooks that torch puts into the step of
    a class when it makes the first instance: the hooks of this step have run."""
    step: Any = super(_UnitScaled, cls).step  # type: ignore[misc]
    if getattr(step, "hooked", False):
        return step.__wrapped__
    return step


class SGD(_UnitScaled, torch.optim.SGD):
    """`torch.optim.SGD` with u-muP learning rates.

    Takes the arguments of torch, of `scaled_parameters`, and the ``readout_constraint`` of
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
        # By position as torch's: 0.3.5 takes the momentum of SGD(params, 0.1, 0.9) for lr.
        super().__init__(
            _SGD_RULES[readout_constraint],
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            independent_weight_decay=independent_weight_decay,
            allow_non_unit_scaling_params=allow_non_unit_scaling_params,
            lr_mult=lr_mult,
            **kwargs,
        )


class Adam(_UnitScaled, torch.optim.Adam):
    """`torch.optim.Adam` with u-muP learning rates; arguments are as in `SGD`.

    The default of ``eps`` is 1e-16 for weights of `unit_scaling.transforms.unit_scale`.
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
        super().__init__(
            "adam",
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            independent_weight_decay=independent_weight_decay,
            allow_non_unit_scaling_params=allow_non_unit_scaling_params,
            lr_mult=lr_mult,
            **kwargs,
        )


class AdamW(Adam, torch.optim.AdamW):
    """`torch.optim.AdamW` with u-muP learning rates; arguments are as in `Adam`.

    >>> from unit_scaling import Linear
    >>> opt = AdamW(Linear(16, 4).parameters())
    >>> opt.param_groups[0]["lr"], opt.param_groups[0]["mup_lr_scales"]
    (0.5, [0.25])
    """
