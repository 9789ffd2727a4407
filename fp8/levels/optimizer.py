"""Converts an optimizer in place to the class of `fp8.optim` with the same arithmetic."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..optim import SGD, Adam, AdamW, Muon
from ..optim.base import LowPrecision
from ..optim.state import convert

KINDS: dict[type[Optimizer], type[LowPrecision]] = {
    torch.optim.SGD: SGD,
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.Muon: Muon,
}
"""A torch class, subclasses first -> the class with the same arithmetic."""

REMOVED = ("foreach", "fused", "capturable", "differentiable", "amsgrad", "decoupled_weight_decay")
"""Options of torch's classes that are removed from the groups."""


def _kind_of(optimizer: Optimizer) -> type[LowPrecision]:
    """The class of `fp8.optim` with the arithmetic of ``optimizer``.

    Raises TypeError if there is none, ValueError for unsupported options.
    """
    cls = type(optimizer)
    if issubclass(cls, LowPrecision):
        return cls
    known = next((kind for kind in KINDS if issubclass(cls, kind)), None)
    if known is None or inspect.unwrap(cls.step) is not inspect.unwrap(known.step):
        raise TypeError(
            f"{cls.__name__} is not supported: initialize takes Adam, AdamW, SGD and Muon "
            "of torch.optim, unit_scaling.optim and fp8.optim"
        )
    if own := _own_methods(cls, known):
        raise TypeError(f"{cls.__name__} has methods that would be lost: {', '.join(own)}")
    for name in ("amsgrad", "differentiable"):
        if any(group.get(name) for group in optimizer.param_groups):
            raise ValueError(f"{name}=True is not supported by fp8.initialize")
    decoupled = {bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups}
    if len(decoupled) > 1:
        raise ValueError("the groups of the optimizer differ in decoupled_weight_decay")
    return AdamW if decoupled == {True} else KINDS[known]


def _own_methods(cls: type, known: type) -> list[str]:
    """The methods that a subclass of one of KINDS defines, except the constructor and ``step``."""
    derived = [c for c in cls.__mro__ if issubclass(c, known) and c not in KINDS]
    return [
        name
        for c in derived
        for name, value in vars(c).items()
        if inspect.isroutine(value) and name not in ("__init__", "step")
    ]


def _class_for(cls: type[Optimizer], kind: type[LowPrecision]) -> type[Optimizer]:
    """``kind`` with the mixins of ``cls`` (the learning-rate rules of unit_scaling.optim)."""
    if issubclass(cls, kind):
        return cls
    mixed_in = tuple(
        c
        for c in cls.__mro__
        if issubclass(c, Optimizer) and c is not Optimizer and not issubclass(c, tuple(KINDS))
    )
    return _mixed(cls.__name__, (*mixed_in, kind)) if mixed_in else kind


@functools.cache
def _mixed(name: str, bases: tuple[type, ...]) -> Any:
    def reduce(self: Any) -> Any:
        return _blank, (name, bases), self.__getstate__()

    return type(name, bases, {"__doc__": bases[-1].__doc__, "__reduce__": reduce})


def _blank(name: str, bases: tuple[type, ...]) -> Any:
    return object.__new__(_mixed(name, bases))


def settings_of(
    optimizer: Optimizer, formats: Mapping[str, str | None]
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The class, the defaults and the supported ``formats`` that `take_over` uses.

    Raises TypeError for an optimizer with other arithmetic, and TypeError or ValueError for
    unsupported options and parameters.
    """
    kind: Any = _kind_of(optimizer)
    options = {name: value for name, value in formats.items() if name in kind.options}
    defaults = kind([torch.zeros(1, 1)], lr=0.0).defaults
    given = {name: value for name, value in optimizer.defaults.items() if name in defaults}
    defaults = {**defaults, **given, **options}
    for group in optimizer.param_groups:
        kind.check({**defaults, **group, **options})
    return kind, defaults, options


def take_over(
    optimizer: Optimizer, formats: Mapping[str, str | None], replaced: Mapping[Any, Any]
) -> None:
    """Converts ``optimizer`` as `settings_of` specifies; it keeps its groups, hooks and states.

    formats: first_moment, second_moment and master_weights. replaced: old parameter -> new one.
    """
    kind, optimizer.defaults, options = settings_of(optimizer, formats)
    step = vars(optimizer).pop("step", None)
    optimizer.__class__ = _class_for(type(optimizer), kind)
    if step is not None:
        vars(optimizer)["step"] = _scheduled(optimizer, step)
    state = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        old = group["params"]
        group["params"] = [replaced.get(p, p) for p in old]
        for name in REMOVED:
            group.pop(name, None)
        group.update({**optimizer.defaults, **group, **options})
        for before, parameter in zip(old, group["params"], strict=True):
            if state.get(before):
                optimizer.state[parameter] = convert(parameter, state[before], group)


def _scheduled(optimizer: Any, old: Any) -> Any:
    """Replaces the ``step`` that a scheduler wrapped. It records that a step was made and keeps the
    attributes of the wrapper, which the scheduler uses to warn of calls in the wrong order."""

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    vars(step).update(vars(old))
    return step
