"""Checks at the first step of an optimizer: whose parameters it steps, at which rate and eps.

Three mistakes raise no error. An optimizer created before a transform steps the parameters of the
original model, not of the copy. A rate for weights of RMS 0.02 hardly changes weights of RMS 1.
And gradients of weights that were divided by their RMS are smaller, perhaps as small as Adam's eps.

The check is a torch hook that runs before each step of every optimizer of the process. It is
installed when the first parameter is tagged or the first model copied, and checks each optimizer
until one step with gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fp8.common.compiler import eager_only
from fp8.common.pitfalls import OptimizerWarning, warn_once

from .first_call import RANGE, known_rms

LOW_RATE = 2.0**-8
"""A learning rate below this is one for weights much smaller than 1.

Adam changes an entry by about its rate in a step. The best rate of u-muP is about 1/2 over the
square root of the fan-in (docs/learning-rates.md): 2**-7 for a fan-in of 4096, higher for smaller
ones; for readouts, gains and biases it is 1/2.
"""


class _Copied(NamedTuple):
    """A model that a transform has copied: its parameters, its copies, and copies of these."""

    transform: str
    parameters: WeakTensorKeyDictionary
    copies: weakref.WeakSet[nn.Module]


EPS_MARGIN = 100.0
"""An eps above the RMS of the gradients divided by this is reported: it changes each step of Adam
by more than 1 %."""

_COPIED: list[_Copied] = []
_CHECKED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that were checked after the last copy."""
_RATE_CHECKED: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@cache
def check_optimizers() -> None:
    """Checks the first steps of every optimizer from now on."""
    register_optimizer_step_pre_hook(_before_step)


def remember_copy(model: nn.Module, copy: nn.Module, transform: str) -> None:
    """Records that ``transform`` returned ``copy`` for ``model``; both are weakly referenced.

    Nothing is recorded while torch is set to swap parameters in conversions, which fails for
    tensors with weak references.
    """
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
    if optimizer not in _CHECKED and _steps_its_own(optimizer):
        _CHECKED.add(optimizer)
    if optimizer not in _RATE_CHECKED:
        _RATE_CHECKED.add(optimizer)
        _check_rate(optimizer)
        _check_eps(optimizer)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _steps_its_own(optimizer: Optimizer) -> bool:
    """Whether no further step needs a check. Warns if parameters of copied models are stepped that
    have no gradients, while those of a copy have."""
    steps = list(_parameters(optimizer))
    models = [each for each in _COPIED if any(p in each.parameters for p in steps)]
    if not models or any(_has_gradient(p) for p in steps):
        return True
    own = {id(p) for p in steps}
    for model in models:
        for copy in model.copies:
            parameters = list(copy.parameters())
            if any(id(p) in own for p in parameters) or not any(map(_has_gradient, parameters)):
                continue
            name = type(optimizer).__name__
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


def _check_rate(optimizer: Optimizer) -> None:
    """Warns of one low rate for weights of RMS 1, unless groups were made for them."""
    weights = [
        (_rate(optimizer, group), p)
        for group in optimizer.param_groups
        if "mup_lr_scale" not in group
        for p in group["params"]
        if getattr(p, "mup_type", "") in ("weight", "output") and p.dim() > 1
    ]
    rates = {rate for rate, _ in weights}
    if len(rates) != 1 or not 0 < (rate := rates.pop()) < LOW_RATE:
        return
    near = [p.numel() * _is_near_one(p) for _, p in weights]
    if 2 * sum(near) <= sum(p.numel() for _, p in weights):
        return  # weights with their own scales, as with init="preserve"
    name = type(optimizer).__name__
    ours = name if name in ("SGD", "Adam", "AdamW") else "AdamW"
    warn_once(
        OptimizerWarning,
        f"{name} steps {len(weights)} unit-scaled weights, of RMS about 1, at one learning rate, "
        f"{rate:.4g}: that changes a weight of RMS 1 by {rate:.1g} of itself in a step, and is a "
        "rate for weights of RMS 0.02. Use unit_scaling.optim."
        f"{ours}(model.parameters(), lr=2**-2), whose rates follow the shapes; or, for another "
        "optimizer, the groups of unit_scaling.optim.scaled_parameters(model.parameters(), "
        f"'adam', lr=2**-2); or a rate of more than {LOW_RATE:.4g}, found by a sweep",
        about=optimizer,
        key="rate",
    )


def _check_eps(optimizer: Optimizer) -> None:
    """Warns of an eps that the gradients of weights of `unit_scale` are not large against."""
    near = []
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if not isinstance(eps, float):
            continue
        for p in group["params"]:
            if getattr(p, "mup_divisor", None) and p.grad is not None:
                rms = known_rms(p.grad)
                near += [(rms, eps)] if rms is not None and rms < EPS_MARGIN * eps else []
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


def _rate(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """The rate that the group was created with or that a schedule starts from, ignoring warm-up."""
    given = (group.get("lr"), group.get("initial_lr"), optimizer.defaults.get("lr"))
    return max((float(rate) for rate in given if rate is not None), default=0.0)


def _is_near_one(parameter: Tensor) -> bool:
    """Whether the RMS is near 1; False if unknown, as for sharded or quantized tensors."""
    rms = known_rms(parameter)
    return rms is not None and RANGE[0] <= rms <= RANGE[1]
