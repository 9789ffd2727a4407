"""Checks at the first step of an optimizer: whose parameters it steps, at which rate and eps.

Four mistakes raise no error. An optimizer created before a transform steps the parameters of the
original model. A rate for weights of RMS 0.02 hardly changes weights of RMS 1, and one for all
shapes may be too large. Values of the plain model, loaded after `unit_scale` has set others, have
rates of the others. Gradients of weights that were divided by their RMS may be as small as Adam's
eps. A hook of torch checks each optimizer of the process until a step with gradients.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fp8.common.compiler import eager_only
from fp8.warnings import OptimizerWarning, warn_once

from ..rules.rates import RATES, TORCHS_EPS, default_rate
from .first_call import is_near_one, is_weight, known_rms

OFF = 3.0
"""The octaves between a learning rate and the rate of its rule from which it is reported."""

EPS_MARGIN = 100.0
"""An eps above the RMS of the gradients divided by this is reported: it changes each step of Adam
by more than 1 %."""

FEWEST = 3
"""The smallest number of weights that are judged by whether their values are plain ones."""

MOVED = 0.5
"""The octaves by which `unit_scale` has changed the RMS of these weights, or more."""

PLAIN = 0.5
"""A weight counts as plain whose RMS is nearer to its RMS before `unit_scale` than after it, by
this factor, in octaves. Nine of ten weights have to be. In the 20 models of benchmarks/problems.py
they are, with the values of the plain model: in 19 at its start, in 18 after 20 steps of its
training, in 7 after 200. At most a third of the weights of the transformed models are after as many
steps, and at most 0.6 of 7 models after 1000 at a weight decay of 0.002."""


class _Copied(NamedTuple):
    """A model that a transform has copied: its parameters, its copies, and copies of these."""

    transform: str
    parameters: WeakTensorKeyDictionary
    copies: weakref.WeakSet[nn.Module]


_COPIED: list[_Copied] = []
_CHECKED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that were checked after the last copy."""
_RATE_CHECKED: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@cache
def check_optimizers() -> None:
    """Checks the first steps of every optimizer from now on."""
    register_optimizer_step_pre_hook(_before_step)


def remember_copy(model: nn.Module, copy: nn.Module, transform: str) -> None:
    """Records that ``transform`` returned ``copy`` for ``model``, by weak references, with which
    torch cannot swap parameters in conversions."""
    check_optimizers()
    if torch.__future__.get_swap_module_params_on_conversion():
        return
    _COPIED[:] = [each for each in _COPIED if len(each.parameters) and len(each.copies)]
    for each in _COPIED:
        if model in each.copies:
            each.copies.add(copy)
    parameters = WeakTensorKeyDictionary(dict.fromkeys(model.parameters(), True))
    _COPIED.append(_Copied(transform, parameters, weakref.WeakSet([copy])))
    _CHECKED.clear()


@eager_only()
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _CHECKED and _is_copy_checked(optimizer):
        _CHECKED.add(optimizer)
    if optimizer not in _RATE_CHECKED:
        _check_factors_are_read(optimizer)
        _RATE_CHECKED.add(optimizer)
        _check_rate(optimizer)
        _check_values(optimizer)
        _check_eps(optimizer)


def _is_copy_checked(optimizer: Optimizer) -> bool:
    """Whether no further step needs a check. Warns if parameters of copied models are stepped that
    have no gradients, while the parameters of a copy have."""
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    models = []
    for each in _COPIED:
        if any(p in each.parameters for p in stepped):
            models.append(each)
    if not models or any(map(_has_gradient, stepped)):
        return True
    ids = set(map(id, stepped))
    name = type(optimizer).__name__
    pairs = [(each, copy) for each in models for copy in each.copies]
    for model, copy in pairs:
        parameters = list(copy.parameters())
        is_stepped = not ids.isdisjoint(map(id, parameters))
        if is_stepped or not any(map(_has_gradient, parameters)):
            continue
        warn_once(
            OptimizerWarning,
            f"{name} was made before {model.transform}, which returned a copy of the model: it "
            "steps the parameters of the original, which have no gradient, and none of the "
            f"copy's. Make it after {model.transform}: {name}(model.parameters(), ...)",
            about=optimizer,
            key="copied",
        )
        return True
    return False


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())


def _check_factors_are_read(optimizer: Optimizer) -> None:
    """Raises ValueError if the groups are of `unit_scaling.optim`, whose step reads them, and the
    optimizer is not: torch loads any state_dict with as many parameters. Optimizers that contain
    others (ZeroRedundancyOptimizer) may share their groups."""
    has_factors = any("mup_lr_scales" in group for group in optimizer.param_groups)
    module = type(optimizer).__module__
    if has_factors and module.startswith(("torch.optim.", "fp8.optim.")):
        raise ValueError(
            f"{type(optimizer).__name__} has loaded a state_dict of unit_scaling.optim and would "
            "step all parameters at one rate: load it into an optimizer of unit_scaling.optim"
        )


class _Rate(NamedTuple):
    """A weight, its learning rate without the factor of a rule, and how far that is above what the
    rule gives."""

    weight: Tensor
    rate: float
    octaves: float


#: The rules of `unit_scaling.optim.LR_RULES` for optimizers that are not like Adam.
_RULES: dict[type[Optimizer], str] = {torch.optim.SGD: "sgd", torch.optim.Muon: "muon"}


def _check_rate(optimizer: Optimizer) -> None:
    """Warns of a learning rate that is far from the rule's for most of the weights of RMS 1."""
    rule = next((r for cls, r in _RULES.items() if isinstance(optimizer, cls)), "adam")
    rates = list(_rates(optimizer, rule))
    total = _numel(rates)
    if 4 * _numel(each for each in rates if abs(each.octaves) > OFF) <= total:
        return  # less than half of the weights of RMS 1, which are to be more than half of all
    ours = _has_factors(optimizer.param_groups[0])
    near = [each for each in rates if _is_at_its_size(each.weight, ours)]
    if 2 * _numel(near) <= total:
        return  # most weights have sizes of their own
    near.sort(key=lambda each: each.octaves)
    numbers = list(accumulate(each.weight.numel() for each in near))
    # By elements: most weights of a model may be small ones.
    median = near[bisect_left(numbers, numbers[-1] / 2)]
    name = type(optimizer).__name__
    if rule == "sgd" and ours:  # no rate suits all models
        return
    # Only updates of Adam are known to have entries of about the rate.
    if median.octaves < -OFF or (median.octaves > OFF and "Adam" in name):
        where = "above" if median.octaves > 0 else "below"
        times = f"{2 ** abs(median.octaves):.0f} times {where}"
        if ours:
            rate = f"lr={median.rate:.4g}, {times} that of the rule"
            advice = "Leave lr out, or find another by a sweep"
        else:
            rate = f"{median.rate:.4g}, {times} that of the rule for most of them"
            cls = name if name in ("SGD", "Adam", "AdamW") else "AdamW"
            advice = (
                f"Use unit_scaling.optim.{cls}(model.parameters()), whose rates follow the shapes; "
                "or, for another optimizer, the groups of "
                f"unit_scaling.optim.scaled_parameters(model.parameters(), {rule!r})"
            )
        what = f"{name} steps {len(near)} unit-scaled weights, of RMS about 1, at a learning rate"
        warn_once(
            OptimizerWarning, f"{what} of {rate}. {advice}", about=optimizer, key="rate"
        )


def _numel(rates: Iterable[_Rate]) -> int:
    return sum(each.weight.numel() for each in rates)


def _is_at_its_size(weight: Tensor, by_tag: bool) -> bool:
    """Whether a weight has the RMS that its rate is for: 1, or its tag ``mup_scale``. by_tag:
    whether rates follow tags; if not, one rate does in a model of `unit_scale` what it does in the
    plain one, and is not judged."""
    if getattr(weight, "mup_divisor", None) and not by_tag:
        return False
    rms, size = known_rms(weight), getattr(weight, "mup_scale", 1.0)
    return rms is not None and is_near_one(rms / size)


def _rates(optimizer: Optimizer, rule: str) -> Iterator[_Rate]:
    """Yields the learning rates of the weights of an optimizer: the rate that a group was created
    with or that a schedule starts from, without warm-up. A rate of 0 is not judged."""
    for group in optimizer.param_groups:
        scale = group.get("mup_lr_scale") or 1.0
        rates = [(group.get(key), scale) for key in ("lr", "initial_lr", "max_lr")]
        rates.append((optimizer.defaults.get("lr"), 1.0))
        known = [float(lr) / factor for lr, factor in rates if lr is not None]
        rate = max(known, default=0.0)
        for p in group["params"]:
            if is_weight(p):
                wanted = RATES[rule] if _has_factors(group) else default_rate(rule, p)
                yield _Rate(p, rate, math.log2(rate / wanted) if rate > 0 else 0.0)


def _has_factors(group: dict[str, Any]) -> bool:
    """Whether the group is of `scaled_parameters` or of an optimizer of unit_scaling."""
    return "mup_lr_scale" in group or "mup_lr_scales" in group


def _check_values(optimizer: Optimizer) -> None:
    """Warns of weights that have the sizes of before `unit_scale`, at rates of those after it.
    Rates of a state_dict are for the values that were saved with it."""
    judged = 0
    plain = []
    loaded = getattr(optimizer, "_loaded", ())
    for index, group in enumerate(optimizer.param_groups):
        if index in loaded:
            continue
        params = group["params"]
        names = group.get("param_names") or ["" for _ in params]
        for name, p in zip(names, params, strict=False):
            is_plain = _is_plain(p) if _has_factors(group) else None
            judged += is_plain is not None
            if is_plain:
                plain.append(name or f"one of shape {tuple(p.shape)}")
    if judged < FEWEST or 10 * len(plain) < 9 * judged:
        return
    warn_once(
        OptimizerWarning,
        f"{len(plain)} of {judged} weights (as {plain[0]}) have the RMS that they had before "
        "unit_scale, and learning rates for what it made of them: a state_dict of the plain model "
        "was loaded afterwards, or an init was applied. Load it into the plain model, before "
        "unit_scale; or train it with an optimizer of torch, whose rate is that of the plain model",
        about=optimizer,
        key="plain",
    )


def _is_plain(parameter: Tensor) -> bool | None:
    """Whether a weight has the size of before `unit_scale`; None for one that has hardly changed,
    that began as zeros (its size before counts as 1), or whose values are pending or divided."""
    before = getattr(parameter, "mup_divisor", None)
    is_pending = getattr(parameter, "mup_pending", False)
    if parameter.dim() < 2 or before in (None, 1.0) or is_pending:
        return None
    after: float = getattr(parameter, "mup_scale", 1.0)
    if abs(math.log2(before / after)) < MOVED:
        return None
    rms = known_rms(parameter)
    if rms is None:
        return None
    return abs(math.log2(rms / before)) < PLAIN * abs(math.log2(rms / after))


def _check_eps(optimizer: Optimizer) -> None:
    """Warns of an eps that the gradients of weights of `unit_scale` are not large against."""
    near = []
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if not isinstance(eps, float) or (
            "mup_lr_scales" in group and eps == TORCHS_EPS
        ):
            continue
        for p in group["params"]:
            if getattr(p, "mup_divisor", None) and p.grad is not None:
                rms = known_rms(p.grad)
                if rms is not None and rms < EPS_MARGIN * eps:
                    near.append((rms, eps))
    if not near:
        return
    rms, eps = min(near)
    name = type(optimizer).__name__
    warn_once(
        OptimizerWarning,
        f"{name} steps {len(near)} unit-scaled weights whose first gradients are as small as its "
        f"eps of {eps:.1g} or within a factor of {EPS_MARGIN:g} of it (the smallest has RMS "
        f"{rms:.1g}), so their steps are smaller than those of the others. Pass eps=1e-16, as "
        "unit_scaling.optim does by default",
        about=optimizer,
        key="eps",
    )
